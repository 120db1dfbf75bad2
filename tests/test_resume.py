"""Killed anywhere and run again: bit for bit the run that was never interrupted."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys

import ml_collections
import pytest
import toy

from coa_jax.protocol.trajectory import write_jsonl

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Dies in its n-th log line (the checkpoint of that step is not begun) or in its n-th
# checkpoint, which orbax is still writing in the background.
PROGRAM = """
import importlib, json, os, signal, sys
import ml_collections
from coa_jax.learner.checkpoint import Checkpoints
from coa_jax.report.metrics import Metrics

journey, config, workdir, where, n = sys.argv[1:]
cls, name = {"log": (Metrics, "log"), "save": (Checkpoints, "save")}[where]
real, calls = getattr(cls, name), []

def deadly(*args, **kwargs):
  real(*args, **kwargs)
  calls.append(1)
  if len(calls) == int(n):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(cls, name, deadly)
config = ml_collections.ConfigDict(json.loads(config))
importlib.import_module(f"coa_jax.{journey}").run(config, workdir)
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, dict]:
  """A few updates of each journey."""
  folder = tmp_path_factory.mktemp("inputs")
  write_jsonl(folder / "trajectories.jsonl", toy.trajectories() * 6)
  toy.save_policy(str(folder / "model"), toy.actor(75).params)
  (folder / "tasks.jsonl").write_text(
    "".join(
      json.dumps({"id": q, "question": q, "answers": [a]}) + "\n"
      for q, a in (("2 + 3", "5"), ("4 * 4 + 1", "17"), ("mixed", "7"))
    )
  )
  tasks = str(folder / "tasks.jsonl")
  return {
    "sft": dict(
      init=str(folder / "model"),
      model={},
      optim=dict(name="muon", lr=0.01, warmup=2),
      data=dict(
        trajectories=str(folder / "trajectories.jsonl"),
        steps=9,
        rows=2,
        length=toy.MAX_LEN,
        micro_batches=2,
        validation=2,
        validate_every=4,
      ),
      checkpoint=dict(every=2, keep=1),
    ),
    "rl": dict(
      init=str(folder / "model"),
      model={},
      optim=dict(lr=1e-3),
      rollout=dict(style="brief", slots=8, max_len=toy.MAX_LEN),
      tools=dict(tools=["code"]),
      tasks=dict(uri=tasks),
      algo=dict(steps=6, prompts=2, samples=4, rows=4, length=128, keep_every=2),
      dev=dict(every=3, uri=tasks),
      checkpoint=dict(every=2, keep=1),
    ),
  }


def read(*path: str) -> bytes:
  with open(os.path.join(*path), "rb") as f:
    return f.read()


def timeless(workdir: str) -> list[dict]:
  """The log without seconds."""
  rows = [json.loads(line) for line in read(workdir, "metrics.jsonl").splitlines()]
  return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in rows]


def killed(journey: str, config: dict, workdir: str, where: str, n: int) -> None:
  args = [journey, json.dumps(config), workdir, where, str(n)]
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM, *args],
    env={**os.environ, "PYTHONPATH": ROOT},
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("journey", ["sft", "rl"])
def test_killed_twice_and_run_again_is_uninterrupted(configs, journey, tmp_path):
  run = importlib.import_module(f"coa_jax.{journey}").run
  config = configs[journey]
  whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
  expected = run(ml_collections.ConfigDict(config), whole)
  killed(journey, config, broken, "log", 3)
  assert os.listdir(os.path.join(broken, "checkpoints"))
  assert not os.path.exists(os.path.join(broken, "results.json"))
  # In its second checkpoint, or in the first where there are few steps.
  killed(journey, config, broken, "save", 2 if journey == "sft" else 1)
  # Its log is at least that of a checkpoint, which may have been the first run's last.
  assert 2 <= len(timeless(broken)) < len(timeless(whole))
  results = run(ml_collections.ConfigDict(config), broken)
  assert timeless(broken) == timeless(whole)
  for name in ("model.safetensors", "config.json", "tokenizer.json"):
    assert read(broken, "model", name) == read(whole, "model", name), name
  clock = {k for k in expected if k.startswith("seconds")} | {"tokens_per_second"}
  for key in set(expected) - clock:
    assert results[key] == expected[key], key
  assert set(results) == set(expected)
  # Once more: nothing is left to do, and nothing changes.
  assert run(ml_collections.ConfigDict(config), broken) == results
  if journey == "rl":
    names = sorted(os.listdir(os.path.join(whole, "trajectories")))
    assert names == [f"step_{n:06d}.jsonl" for n in (0, 2, 4)]
    for name in names:
      assert ids(broken, name) == ids(whole, name)


def ids(workdir: str, name: str) -> list[list]:
  rows = read(workdir, "trajectories", name).splitlines()
  return [[s["ids"] for s in json.loads(row)["segments"]] for row in rows]
