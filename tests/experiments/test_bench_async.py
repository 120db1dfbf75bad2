"""The benchmark of asynchronous RL: what it runs, and what it makes of the logs."""

from __future__ import annotations

import time

import pytest

from coa_jax.config import section
from coa_jax.learner.algorithms import AlgoConfig
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rollout.toolbox import ToolsConfig
from experiments import bench_async as bench


@pytest.mark.parametrize("quick", [False, True])
def test_contestants_differ_in_what_is_compared_alone(quick, tmp_path):
  (tmp_path / "sft" / "model").mkdir(parents=True)
  args = str(tmp_path), 2, 5, quick
  plain = section(bench.config_of(*args, {}), "algo", AlgoConfig)
  changes = {"staleness": 2, "importance_cap": 2.0}
  config = bench.config_of(*args, changes)
  ahead = section(config, "algo", AlgoConfig)
  assert plain.staleness == 0 and vars(ahead) == {**vars(plain), **changes}
  assert ahead.steps == config.dev.every == 5
  assert config.init == str(tmp_path / "sft" / "model") and config.rollout.seed == 2


def test_a_slow_call_is_the_real_one_later():
  with bench.SlowToolbox(ToolsConfig(tools=("code",), workers=1)) as toolbox:
    began = time.monotonic()
    call = toolbox.call("code", "```py\nprint(2+3)\n```")
    assert time.monotonic() - began >= 0.1
  assert (call.status, call.result) == (CallStatus.OK, "5")


def test_figures_leave_out_the_steps_that_compile():
  rows = [
    {"seconds_learn": 100.0 if i < 3 else 1.0, "seconds_rollout": 2.0, "reward": i / 8}
    for i in range(6)
  ]
  rows[4] |= {"staleness": 1.5, "staleness_max": 2, "rollouts_waited": 3.0}
  out = bench.figures_of(rows, {"dev_accuracy_first": 0.25, "dev_accuracy": 0.5})
  assert (out["seconds"], out["learn"], out["learner_waited"]) == (3.0, 1.0, 2.0)
  assert (out["staleness"], out["staleness_max"]) == (0.5, 2)
  assert (out["rollouts_waited"], out["reward"]) == (1.0, 0.5)
  assert (out["before"], out["after"]) == (0.25, 0.5)


def test_without_a_quickstart_it_says_how_to_make_one(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"run python -m experiments\.quickstart"):
    bench.run(str(tmp_path), str(tmp_path / "w"), 1, 4, 2, True)
