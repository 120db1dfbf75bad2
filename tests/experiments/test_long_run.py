"""500 RL updates with tools: memory, open files, threads and step time stay flat."""

from __future__ import annotations

import itertools
import statistics
import time

import guessing
import psutil
import pytest
from programs import config_file, ended, reached, start

from coa_jax.report.metrics import read_metrics

STEPS = 500
# Rounds that a step may need: a group of two is mixed half the time.
ROUNDS = 8
# Host memory may grow by this share.
GROWTH = 0.05


def usage(process: psutil.Process) -> dict[str, int]:
  """The process's memory in bytes, open files and threads; how many descendants."""
  with process.oneshot():
    return {
      "memory": process.memory_info().rss,
      "files": process.num_fds(),
      "threads": process.num_threads(),
      "processes": len(process.children(recursive=True)),
    }


@pytest.mark.soak
def test_a_long_run_uses_no_more_at_its_end(tmp_path):
  config = guessing.rl_config(tmp_path).to_dict()
  config["optim"] = dict(lr=1e-9)  # the policy keeps guessing, so groups stay mixed
  config["algo"] |= dict(
    steps=STEPS,
    sampling=dict(prompts=2, samples=2, rounds=ROUNDS, filter_groups=True),
  )
  config["dev"]["every"] = config["checkpoint"]["every"] = 100
  workdir = tmp_path / "run"
  process = start("rl", config_file(tmp_path / "rl.py", config), workdir)

  # --- One sample per step, while it runs.
  watched = psutil.Process(process.pid)
  samples: dict[int, dict[str, int]] = {}
  while process.poll() is None and (step := reached(workdir)) < STEPS:
    if step not in samples:
      samples[step] = usage(watched)
    time.sleep(0.05)
  ended([process])

  # --- A hundred steps after the first checkpoint, which starts threads; the last ones.
  def of(first: int, last: int) -> dict[str, float]:
    rows = [row for step, row in samples.items() if first <= step < last]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}

  metrics = read_metrics(str(workdir), "rl")
  seconds = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(metrics)]
  before, after = of(150, 250), of(400, 500)
  before["ms"] = 1e3 * statistics.median(seconds[150:250])
  after["ms"] = 1e3 * statistics.median(seconds[400:500])
  print(f"steps 150 to 250: {before}\nsteps 400 to 500: {after}")
  assert after["memory"] <= before["memory"] * (1 + GROWTH)
  for name in ("files", "threads", "processes"):
    assert after[name] <= before[name] + 1, name
  assert after["ms"] <= 1.25 * before["ms"]
