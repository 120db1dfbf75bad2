"""Shards on separate machines with a shared bucket give one machine's output."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import object_store
import pytest
from programs import ROOT, small_distillation

from coa_jax.runtime.bucket.objects import Bucket

# Runs a module with a short lease timeout and frequent pushes.
QUICK = """
import runpy, sys
from coa_jax.runtime.bucket import lease, mirror
lease.BEAT_S, lease.SILENT_S, mirror.PUSH_EVERY_S = 0.2, 5.0, 0.1
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def start(module: str, *flags: str) -> subprocess.Popen[str]:
  """Starts `experiments.MODULE`."""
  return subprocess.Popen(
    [sys.executable, "-c", QUICK, f"experiments.{module}", *flags],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def end(process: subprocess.Popen[str]) -> str:
  """Waits for a program that must succeed, and returns its output."""
  out, errors = process.communicate(timeout=600)
  assert process.returncode == 0, errors
  return out


def timeless(text: str) -> str:
  return re.sub(r'(seconds\w*": )[^,}\n]+', r"\1", text)


@pytest.fixture
def store():
  object_store.needs("gs")
  with object_store.Store("gs").running() as running:
    yield running


@pytest.fixture(scope="module")
def distillation(tmp_path_factory) -> str:
  return small_distillation(tmp_path_factory.mktemp("distillation"))


@pytest.mark.slow
def test_three_machines_distill_one_is_lost(distillation, store, tmp_path):
  whole = tmp_path / "whole"
  end(start("distill", f"--config={distillation}", f"--workdir={whole}"))
  uri = store.uri + "/run"
  bucket = Bucket(uri)

  def shard(number: int, machine: str) -> subprocess.Popen[str]:
    scratch = f"--scratch={tmp_path / machine}"
    flags = f"--config={distillation}", f"--workdir={uri}", f"--shard={number}/3"
    return start("distill", "--json", *flags, scratch)

  # --- Shard 1 is killed once some of its runs are in the bucket.
  machines = [shard(i, f"m{i}") for i in range(3)]
  while not (bucket.read("shards/1-of-3/runs.jsonl") or b"").count(b"\n"):
    assert machines[1].poll() is None, machines[1].communicate()
    time.sleep(0.05)
  machines[1].send_signal(signal.SIGKILL)
  machines[1].wait()
  kept = bucket.read("shards/1-of-3/runs.jsonl")
  end(machines[0])
  end(machines[2])
  assert bucket.read("results.json") is None
  before = bucket.list("shards")

  # --- It resumes on another machine and, as the last shard, joins all.
  out = end(shard(1, "m3"))
  assert json.loads(out)["tasks"] == 40
  files = store.files("run")
  for name in ("runs.jsonl", "trajectories.jsonl", "teacher.jsonl", "results.json"):
    assert timeless(files[name].decode()) == timeless((whole / name).read_text()), name
  assert files["shards/1-of-3/runs.jsonl"].startswith(kept)
  # The other shards' files were not written again.
  for name, stored in before.items():
    if not name.startswith("shards/1-of-3") and "/.lease/" not in name:
      assert bucket.list(name) == {name: stored}, name

  # --- Two repeated shards at once change nothing; all disks are left empty.
  late = [shard(0, "m0"), shard(2, "m2")]
  for process in late:
    end(process)
  again = store.files("run")
  for name, data in files.items():
    if ".lease/" not in name:
      assert again[name] == data, name
  for machine in ("m0", "m2", "m3"):
    assert not any(p.is_file() for p in (tmp_path / machine).rglob("*")), machine


def test_shards_in_a_bucket_that_do_not_fit_are_refused(distillation, store, tmp_path):
  bucket = Bucket(store.uri + "/run")
  bucket.write("shards/shards.json", b'{"config": {}, "shards": 2}')
  flags = f"--config={distillation}", f"--scratch={tmp_path}"
  for workdir, reason in (
    (bucket.uri, "has 2 shards, not 3"),
    (store.uri + "/other", "was not cut into shards"),
  ):
    Bucket(store.uri + "/other").write("config.json", b"{}")
    process = start("distill", *flags, f"--workdir={workdir}", "--shard=0/3")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2 and "Traceback" not in errors, errors
    last = errors.splitlines()[-1]  # a client without credentials warns first
    assert last.startswith("error: ") and workdir in last and reason in last
  assert list(pathlib.Path(tmp_path).iterdir()) == []


@pytest.mark.slow
def test_two_machines_import_from_a_bucket_into_it(store, tmp_path):
  rows = []
  for i in range(40):
    call = {"name": "wiki_search", "arguments": {"query": f"{i}"}}
    step = {"model_output": "go", "tool_calls": [call], "observations": f"in {i}"}
    row = {"task_id": f"t{i}", "question": f"Where is town {i % 30}?"}
    row |= {"prediction": "there" if i % 7 else "nowhere", "true_answer": "there"}
    plan = {"facts": f"I look for town {i % 30}.", "plan": "look"}
    rows.append({**row, "intermediate_steps": [plan, step]})
  Bucket(store.uri).write("in/runs.jsonl", "\n".join(map(json.dumps, rows)).encode())
  flags = ["--variant=unified", "--convert.missing_think=Go on.", "--filter"]
  flags += ["--convert.score_right", "--filters.max_similarity=0.9"]
  flags.append(f"--file={store.uri}/in/runs.jsonl")

  def run(folder: str, machine: str, *more: str) -> str:
    out = f"--out={store.uri}/{folder}/t.jsonl"
    scratch = f"--scratch={tmp_path / machine}"
    return end(start("import_traces", *flags, out, scratch, *more))

  told = run("whole", "m0")
  run("cut", "m1", "--shard=1/2")
  assert "t.jsonl" not in store.files("cut")
  assert run("cut", "m2", "--shard=0/2") == told
  files = store.files("cut")
  expected = store.files("whole")
  assert set(expected) == {name for name in files if ".work/" not in name}
  for name, data in expected.items():
    assert files[name] == data, name
  config = json.loads(files["t.jsonl.manifest.json"])["config"]
  assert config["file"] == f"{store.uri}/in/runs.jsonl"
