"""Runs in a bucket are bit-identical to runs on a disk, even if killed."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import http_server
import object_store
import pytest
from programs import config_file, ended, free_address, start
from test_resume import INT, KILL, ROOT, TERM, assert_same_run, configs, lives, read

from coa_jax.runtime.bucket import mirror
from coa_jax.runtime.bucket.objects import Bucket

__all__ = ["configs"]  # a fixture
NO_CACHE = "--compile_cache="

# The place where each process ends, as in `test_resume`. Each process starts with an
# empty disk.
SHORT = [
  ("push", 2, KILL),
  ("put", 40, KILL),
  ("damage", 0, 0),
]
# Ends over a whole run, including the bucket's own places.
ENDS = {
  "sft": [
    ("lease", 1, KILL),
    ("upload", 3, KILL),
    ("proof", 1, KILL),
    ("proven", 1, KILL),
    ("fetch", 3, KILL),
    ("micro-batch", 2, KILL),
    ("save", 1, KILL),
    ("forget", 1, KILL),
    ("damage", 0, 0),
    ("seal", 1, KILL),
    ("log", 1, TERM),
    ("model", 1, KILL),
  ],
  "rl": [
    ("tool", 2, KILL),
    ("put", 10, KILL),
    ("push", 2, KILL),
    ("upload", 3, KILL),
    ("proof", 1, KILL),
    ("update", 3, KILL),
    ("proven", 1, KILL),
    ("fetch", 3, KILL),
    ("decode", 1, KILL),
    ("log", 1, INT),
    ("damage", 0, 0),
    ("decode", 1, TERM),
    ("model", 1, KILL),
  ],
}


@pytest.fixture(scope="module")
def uninterrupted(configs, tmp_path_factory):
  """Maps a stage to its config, and an uninterrupted disk run's workdir and seconds."""

  @functools.cache
  def run(journey: str) -> tuple[dict, str, float]:
    config = configs[journey]
    if journey == "rl":  # enough steps for all ends
      config = {**config, "algo": {**config["algo"], "steps": 12}}
    workdir = str(tmp_path_factory.mktemp("whole") / journey)
    (row,), _ = lives(journey, config, workdir, [])
    return config, workdir, row["seconds"]

  return run


@pytest.mark.parametrize(
  ("scheme", "journey", "ends"),
  [
    pytest.param("gs", "sft", ENDS["sft"], marks=pytest.mark.soak),
    pytest.param("gs", "rl", ENDS["rl"], marks=pytest.mark.slow),
    pytest.param("s3", "sft", SHORT, marks=pytest.mark.slow),
    pytest.param("s3", "sft", ENDS["sft"], marks=pytest.mark.soak),
  ],
)
def test_ended_anywhere_and_run_again_elsewhere(
  uninterrupted, scheme, journey, ends, tmp_path
):
  object_store.needs(scheme)
  config, whole, _ = uninterrupted(journey)
  machines = str(tmp_path / "machines")
  with object_store.Store(scheme).running() as store:
    lives(journey, config, store.uri + "/run", ends, machines)
    with mirror.opened(store.uri + "/run", str(tmp_path / "seen")) as broken:
      assert_same_run(broken, whole)
  places = sorted({place for place, _, number in ends if number})
  killed = sum(number == KILL for _, _, number in ends)
  print(f"{scheme} {journey}: {killed} kills, {len(places)} places: {places}")


class Slow:
  """Makes a store slow and unreliable, and records when checkpoint proofs arrive."""

  def __init__(self, store: object_store.Store, machines: str):
    self._machines = machines
    self._asked = 0
    self.proofs: list[tuple[int, int]] = []  # (a proof's step, steps logged by then)
    store.latency_s = 0.5
    store.bytes_per_s = 1_000_000
    store.fault = self.fault

  def fault(self, request: http_server.Request) -> str:
    where = object_store.asked(request)
    proof = re.search(r"checkpoints(?:/|%2F)(\d+)(?:/|%2F)manifest", where)
    if proof and request.command in ("POST", "PUT"):
      self.proofs.append((int(proof[1]), self._logged()))
    self._asked += 1
    if self._asked % 17 == 0:
      return "503"
    return "cut" if self._asked % 29 == 0 else ""

  def _logged(self) -> int:
    """Returns the last step logged on any machine."""
    steps = [0]
    for path in pathlib.Path(self._machines).rglob("metrics.jsonl"):
      for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
          steps.append(json.loads(line).get("step", 0))
    return max(steps)


@pytest.mark.parametrize(
  "journey",
  [
    pytest.param("sft", marks=pytest.mark.slow),
    pytest.param("rl", marks=pytest.mark.soak),
  ],
)
def test_a_slow_store_costs_no_run_and_no_grace(uninterrupted, journey, tmp_path):
  """A request takes 0.5 s at 1 MB/s; one in 17 gets a 503, one in 29 is cut."""
  object_store.needs("gs")
  config, whole, local = uninterrupted(journey)
  machines = str(tmp_path / "machines")
  with object_store.Store("gs").running() as store:
    slow = Slow(store, machines)
    ends = [("log", 4, TERM), ("proof", 1, KILL)]
    rows, _ = lives(journey, config, store.uri + "/run", ends, machines)
    store.latency_s = 0
    store.bytes_per_s = 0
    store.fault = lambda request: ""
    with mirror.opened(store.uri + "/run", str(tmp_path / "seen")) as broken:
      assert_same_run(broken, whole)
  # Uploads run in the background: a proof arrived after later steps were logged.
  assert any(logged > step for step, logged in slow.proofs), slow.proofs
  # The pod's manifest leaves 600 s between SIGTERM and SIGKILL by default.
  assert rows[0]["seconds_to_end"] < 600 / 4, rows
  print(
    f"{journey}: {local:.0f} s on a disk; {store.faults} faults, lives of "
    f"{', '.join(format(row['seconds'], '.0f') for row in rows)} s, SIGTERM to the end "
    f"{rows[0]['seconds_to_end']:.1f} s, proofs (of, at step) {slow.proofs}"
  )


@pytest.mark.slow
def test_a_run_in_a_bucket_from_a_bucket_is_one_on_a_disk(configs, tmp_path):
  object_store.needs("gs")
  sections = json.loads(json.dumps(configs["sft"]))
  sections["data"] |= {"steps": 2, "rows": 2, "micro_batches": 1}
  sections["lora"] = {"rank": 2}
  file = config_file(tmp_path / "config.py", sections)
  local = str(tmp_path / "local")
  ended([start("sft", file, local, NO_CACHE)])
  with object_store.Store("gs").running() as store:
    inputs = Bucket(store.uri + "/in")
    for name in os.listdir(sections["init"]):
      inputs.put(os.path.join(sections["init"], name), "model/" + name)
    inputs.put(sections["data"]["trajectories"], "trajectories.jsonl")
    given = {
      "init": store.uri + "/in/model",
      "data.trajectories": store.uri + "/in/trajectories.jsonl",
    }
    flags = [f"--config.{name}={value}" for name, value in given.items()]
    flags.append(f"--compile_cache={store.uri}/xla")
    # --- Two machines in turn; the second finds nothing to do.
    for machine in ("one", "two"):
      scratch = f"--scratch={tmp_path / machine}"
      ended([start("sft", file, store.uri + "/run", scratch, *flags)])
    files = store.files("run")
    assert store.files("xla")  # compiled programs for the next machine
  # --- The same model and adapter; only the recorded input addresses differ.
  record = json.loads(files["config.json"])["config"]
  assert record["init"] == given["init"]
  assert record["data"]["trajectories"] == given["data.trajectories"]
  for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
    assert files[name] == read(local, name), name
  adapter = json.loads(files["adapter/adapter_config.json"])
  assert adapter["base_model_name_or_path"] == given["init"]
  assert "results.json" in files and "checkpoints/2/manifest.json" in files


def together(uri: str, scratch: str, processes: int, *do: str) -> list[int]:
  """Runs `checkpoints_in_processes.py`; returns the restored steps."""
  address = free_address()
  command = [sys.executable, os.path.join(ROOT, "tests", "checkpoints_in_processes.py")]
  started = []
  for i in range(processes):
    started.append(
      subprocess.Popen(
        [*command, uri, f"{scratch}/{i}", address, str(processes), str(i), *do],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  with concurrent.futures.ThreadPoolExecutor(processes) as threads:
    said = list(threads.map(lambda each: each.communicate(timeout=600), started))
  expected = -KILL if any("kill" in what for what in do) else 0
  for each, (_, errors) in zip(started, said, strict=True):
    assert each.returncode == expected, errors
  # Gloo writes to standard output, too.
  return [int(n) for out, _ in said for n in out.splitlines() if n.isdigit()]


@pytest.mark.slow
def test_several_processes_write_their_parts_straight_to_a_bucket(tmp_path):
  """Each process has its own machine, with an empty disk each time."""
  object_store.needs("gs")
  with object_store.Store("gs").running() as store:
    uri = store.uri + "/run"
    done = together(uri, f"{tmp_path}/1", 2, "restore", "save=1", "save=2", "save=3")
    assert done == [0, 0]
    files = store.files("run")
    steps = {name.split("/")[1] for name in files if name.startswith("checkpoints/")}
    assert steps == {"2.000001", "3.000001"}  # with the first lease's number
    assert files["log"] == files["process_1/log"] == b"1\n2\n3\n"
    parts = [
      name for name in files if "checkpoints/3.000001/state/ocdbt.process_" in name
    ]
    assert {name.split("/")[3] for name in parts} == {
      "ocdbt.process_0",
      "ocdbt.process_1",
    }
    # --- A kill between the data and the proof: the data is in the bucket.
    together(uri, f"{tmp_path}/2", 2, "restore", "kill=4")
    assert any("checkpoints/4." in name for name in store.files("run"))
    # --- One process resumes from the last proven step, then two from its checkpoint.
    assert together(uri, f"{tmp_path}/4", 1, "restore", "save=5") == [3]
    assert not any("checkpoints/4." in name for name in store.files("run"))
    assert together(uri, f"{tmp_path}/5", 2, "restore", "save=6") == [5, 5]
    # --- A rewritten object voids its checkpoint: both restore the one before.
    bucket = Bucket(uri)
    name = next(n for n in bucket.list("checkpoints/6.000004/state/ocdbt.process_1/d"))
    bucket.write(name, bucket.read(name))
    assert together(uri, f"{tmp_path}/6", 2, "restore") == [5, 5]


@pytest.mark.slow
def test_a_run_of_two_processes_in_a_bucket_is_theirs_on_a_shared_disk(
  configs, tmp_path
):
  object_store.needs("gs")
  sections = json.loads(json.dumps(configs["sft"]))
  sections["mesh"] = {"fsdp": 2}
  sections["checkpoint"] = {"every": 1}
  sections["data"] |= {"steps": 2, "micro_batches": 1}
  local = str(tmp_path / "local")

  def two(workdir: str, machines: str) -> None:
    where = free_address()
    programs = []
    for i in range(2):
      flags = f"--scratch={tmp_path}/{machines}{i}", f"--distributed={where},2,{i}"
      programs.append(start("sft", file, workdir, NO_CACHE, *flags))
    ended(programs)

  file = config_file(tmp_path / "config.py", sections)
  two(local, "none")
  with object_store.Store("gs").running() as store:
    two(store.uri + "/run", "first")
    # --- Again on other machines: both resume from the last checkpoint.
    two(store.uri + "/run", "second")
    files = store.files("run")
  assert files["model/model.safetensors"] == read(local, "model", "model.safetensors")
  for log in ("metrics.jsonl", "process_1/metrics.jsonl"):
    losses = [
      [json.loads(row).get("loss") for row in text.splitlines()]
      for text in (files[log], read(local, log))
    ]
    assert losses[0] == losses[1] and losses[0][-1]
