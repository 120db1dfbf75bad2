"""Runs whose workdir is in a bucket end as those on a disk, killed anywhere or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import object_store
import pytest
from test_resume import INT, KILL, ROOT, assert_same_run, configs, lives, read

from coa_jax.bucket import mirror
from coa_jax.bucket.objects import Bucket

__all__ = ["configs"]  # a fixture

# Where each process ends, as in `test_resume`; each is on a machine with an empty disk.
ENDS = {
  "sft": [
    ("push", 2, KILL),
    ("put", 40, KILL),
    ("damage", 0, 0),
  ],
  "rl": [
    ("tool", 2, KILL),
    ("put", 10, KILL),
    ("push", 2, KILL),
    ("update", 3, KILL),
    ("log", 1, INT),
    ("damage", 0, 0),
  ],
}


@pytest.mark.parametrize(
  ("scheme", "journey"),
  [
    ("gs", "sft"),
    pytest.param("gs", "rl", marks=pytest.mark.slow),
    pytest.param("s3", "sft", marks=pytest.mark.slow),
  ],
)
def test_ended_anywhere_and_run_again_elsewhere(configs, scheme, journey, tmp_path):
  object_store.needs(scheme)
  config = configs[journey]
  whole = str(tmp_path / "whole")
  machines = str(tmp_path / "machines")
  lives(journey, config, whole, [])
  with object_store.Store(scheme).running() as store:
    lives(journey, config, store.uri + "/run", ENDS[journey], machines)
    with mirror.opened(store.uri + "/run", str(tmp_path / "seen")) as broken:
      assert_same_run(broken, whole)


def program(config: str, workdir: str, *flags: str) -> subprocess.CompletedProcess:
  """Runs `experiments.sft` to its end."""
  command = [sys.executable, "-m", "experiments.sft", f"--config={config}"]
  return subprocess.run(
    [*command, f"--workdir={workdir}", "--compile_cache=", *flags],
    env={**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, *sys.path])},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )


@pytest.mark.slow
def test_a_run_in_a_bucket_from_a_bucket_is_one_on_a_disk(configs, tmp_path):
  object_store.needs("gs")
  sections = json.loads(json.dumps(configs["sft"]))
  sections["data"] |= {"steps": 2, "rows": 2, "micro_batches": 1}
  sections["lora"] = {"rank": 2}
  file = tmp_path / "config.py"
  file.write_text(
    "import ml_collections\n"
    f"get_config = lambda: ml_collections.ConfigDict({sections!r})\n"
  )
  local = str(tmp_path / "local")
  done = program(str(file), local)
  assert done.returncode == 0, done.stderr
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
    # --- On two machines, the second of which finds nothing to do.
    for machine in ("one", "two"):
      scratch = f"--scratch={tmp_path / machine}"
      done = program(str(file), store.uri + "/run", scratch, *flags)
      assert done.returncode == 0, done.stderr
    files = store.files("run")
  # --- The same model and adapters, but for the address of what they began from.
  record = json.loads(files["config.json"])["config"]
  assert record["init"] == given["init"]
  assert record["data"]["trajectories"] == given["data.trajectories"]
  for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
    assert files[name] == read(local, name), name
  adapter = json.loads(files["adapter/adapter_config.json"])
  assert adapter["base_model_name_or_path"] == given["init"]
  assert "results.json" in files and "checkpoints/2/manifest.json" in files
