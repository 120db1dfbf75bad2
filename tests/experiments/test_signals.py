"""SIGTERM and Ctrl-C to a run in a process: it saves, reports this, and ends."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import guessing
import pytest
import toy
from programs import (
  ROOT,
  config_file,
  ended,
  start,
  start_together,
  toy_runs,
  wait_for_step,
  whole_lines,
)

from coa_jax.learner.checkpoint import whole_steps
from coa_jax.protocol.trajectory import read_trajectories
from coa_jax.report.metrics import read_metrics

NO_CACHE = "--compile_cache="
MANY = 10_000_000  # steps: none of these runs finishes


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
  """Config files for runs that save only on a signal."""
  folder = tmp_path_factory.mktemp("inputs")
  runs = toy_runs(folder)
  runs["sft"]["data"] |= dict(steps=MANY, validate_every=MANY)
  runs["rl"]["algo"] |= dict(steps=MANY, keep_every=MANY)
  runs["rl"]["dev"]["every"] = MANY
  for config in runs.values():
    config["checkpoint"] = dict(every=MANY)
  return {
    name: config_file(folder / f"{name}.py", runs[name]) for name in ("sft", "rl")
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  ("journey", "lives", "number", "status"),
  [("sft", 2, signal.SIGTERM, 143), ("rl", 1, signal.SIGINT, 130)],
)
def test_a_signal_saves_and_the_same_command_goes_on(
  configs, journey, lives, number, status, tmp_path
):
  checkpoints, at = tmp_path / "checkpoints", 0
  for _ in range(lives):
    process = start(journey, configs[journey], tmp_path, NO_CACHE)
    wait_for_step([process], tmp_path, at + 2)
    process.send_signal(number)
    (errors,) = ended([process], status)
    assert "Traceback" not in errors
    before, at = at, whole_steps(checkpoints)[-1]
    assert f"stopped after step {at}, which is saved in {checkpoints};" in errors
    assert f"{signal.Signals(number).name}: saving at the next boundary" in errors
    assert at >= before + 2
    # The log ends at the checkpoint's step.
    steps = [row["step"] for row in read_metrics(tmp_path, journey)]
    assert steps == list(range(1, at + 1))
  assert not (tmp_path / "model").exists()


def played(workdir: pathlib.Path) -> list[tuple]:
  """The first step's rollouts, sorted."""
  rows = []
  for file in sorted(workdir.glob("**/trajectories/step_000000.jsonl")):
    for t in read_trajectories(file):
      segments = [(s.ids, s.logps) for s in t.segments]
      rows.append((t.task_id, t.sample, segments, [c.result for c in t.calls]))
  return sorted(rows)


@pytest.mark.soak
def test_a_signal_to_one_process_ends_the_rollouts_of_both(tmp_path):
  """Nothing waits for the interrupted step; the next run repeats it bit-identical."""
  config = guessing.rl_config(tmp_path, steps=100).to_dict()
  config["algo"] |= dict(steps=1, keep_every=1)
  config["algo"]["sampling"] |= dict(prompts=2, samples=64)
  config["algo"]["batch"] = dict(rows=2, length=toy.MAX_LEN)
  config["rollout"]["slots"] = 2
  file = config_file(tmp_path / "rl.py", config)
  whole = tmp_path / "whole"
  broken = tmp_path / "broken"
  ended(start_together("rl", file, whole, 2))

  # --- The second process gets the signal after its first tool answers.
  both = start_together("rl", file, broken, 2)
  journal = broken / "process_1" / "tool_calls" / "step_000000.jsonl"
  while len(whole_lines(journal)) < 8:  # an evaluation has fewer
    assert [p.poll() for p in both] == [None, None]
    time.sleep(0.02)
  both[1].send_signal(signal.SIGTERM)
  texts = ended(both, 143, seconds=120)
  assert all("stopped after step 0, which is saved" in text for text in texts)
  assert whole_steps(broken / "checkpoints") == [0]
  assert not (broken / "metrics.jsonl").exists()

  # --- The same command resumes, without repeating answered tool calls.
  assert len(whole_lines(journal)) < 64
  ended(start_together("rl", file, broken, 2))
  assert played(broken) == played(whole)
  model = "model/model.safetensors"
  assert (broken / model).read_bytes() == (whole / model).read_bytes()


BUSY = """
import hashlib, sys
from coa_jax.learner.checkpoint import Checkpoints
from coa_jax.cli.launch import with_clear_errors

def work():
  with Checkpoints(sys.argv[1]):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # as a long program on a device

with_clear_errors(work)
"""


def test_a_second_signal_ends_a_run_that_reaches_no_boundary(tmp_path):
  process = subprocess.Popen(
    [sys.executable, "-c", BUSY, str(tmp_path)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  assert process.stdout.readline() == "ready\n"
  process.send_signal(signal.SIGTERM)
  while "saving at the next boundary" not in (line := process.stderr.readline()):
    assert line, "it ended"
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 143
  assert "again: ended at once" in errors
