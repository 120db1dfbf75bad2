"""The benchmark of asynchronous RL: what it runs, and what it makes of the logs."""

from __future__ import annotations

import dataclasses
import math
import time

import ml_collections
import pytest
import toy

from coa_jax import rl
from coa_jax.config import read_config
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.report.metrics import read_metrics
from coa_jax.tools.toolbox import ToolsConfig
from experiments.bench import async_rl as bench
from tests.backend import BACKEND


@pytest.mark.parametrize("quick", [False, True])
def test_contestants_differ_in_what_is_compared_alone(quick, tmp_path):
  (tmp_path / "sft" / "model").mkdir(parents=True)
  args = str(tmp_path), 2, 5, quick
  plain = read_config(bench.config_of(*args, {}).algo, rl.AlgoConfig, "algo")
  changes = {"sampling": {"staleness": 2}, "loss": {"is_clip": 2.0}}
  config = bench.config_of(*args, changes)
  ahead = read_config(config.algo, rl.AlgoConfig, "algo")
  assert plain.sampling.staleness == 0
  assert ahead == dataclasses.replace(
    plain,
    sampling=dataclasses.replace(plain.sampling, staleness=2),
    loss=dataclasses.replace(plain.loss, is_clip=2.0),
  )
  assert ahead.steps == config.dev.every == 5
  assert config.init == str(tmp_path / "sft" / "model") and config.rollout.seed == 2


def test_a_slow_call_is_the_real_one_later():
  with bench.SlowToolbox(ToolsConfig(("code",), workers=1, sandbox=BACKEND)) as toolbox:
    began = time.monotonic()
    call = toolbox.call("code", "```py\nprint(2+3)\n```")
    assert time.monotonic() - began >= 0.1
  assert (call.status, call.result) == (CallStatus.OK, "5")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
  """A folder with a policy that calls a tool, and a task for it."""
  folder = tmp_path_factory.mktemp("policy")
  toy.save_policy(str(folder / "model"), toy.actor(75).params)
  (folder / "tasks.jsonl").write_text('{"question": "2 + 3", "answers": ["5"]}\n')
  return str(folder)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_takes_what_the_clock_says_but_evaluation_and_saving(
  policy, tmp_path, monkeypatch, staleness
):
  """Of lines that runs really write: in turns, decoding and tools are waited for."""
  config = ml_collections.ConfigDict(
    dict(
      init=f"{policy}/model",
      rollout=dict(style="brief", slots=4, max_len=toy.MAX_LEN),
      tools=dict(tools=("code",), sandbox=BACKEND),
      tasks=dict(uri=f"{policy}/tasks.jsonl"),
      algo=dict(
        steps=4,
        sampling=dict(prompts=2, samples=2, rounds=1, staleness=staleness),
        loss=dict(is_clip=2.0 if staleness else 0.0),
        batch=dict(rows=4, length=128),
      ),
      dev=dict(every=2, uri=f"{policy}/tasks.jsonl"),
      checkpoint=dict(every=1),
    )
  )
  monkeypatch.setattr(bench, "_COMPILES", 1)
  with monkeypatch.context() as patch:
    patch.setattr(rl, "Toolbox", bench.SlowToolbox)
    results = rl.run(config, str(tmp_path))
  log = read_metrics(str(tmp_path), "rl")
  out = bench.figures_of(log, results)
  left_out = sum(r.get(f"seconds_{x}", 0.0) for r in log[1:] for x in ("dev", "save"))
  took = log[-1]["seconds"] - log[0]["seconds"] - left_out
  # `seconds` is rounded to milliseconds, and read at a line of code of its own.
  assert out["seconds"] == pytest.approx(took / 3, rel=0.05, abs=0.05)
  assert out["learn"] == pytest.approx(sum(r["seconds_learn"] for r in log[1:]) / 3)
  assert out["learner_waited"] == pytest.approx(out["seconds"] - out["learn"])
  if not staleness:
    waited = sum(r["seconds_decode"] + r["seconds_tools"] for r in log[1:]) / 3
    assert out["learner_waited"] > waited > 0.1
    assert out["staleness"] == out["rollouts_waited"] == 0


def test_figures_leave_out_the_steps_that_compile():
  rows = [
    {"seconds_learn": 100.0 if i < 3 else 1.0, "seconds_rollout": 2.0, "reward": i / 8}
    for i in range(6)
  ]
  rows[4] |= {"staleness": 1.5, "staleness_max": 2, "rollouts_waited": 3.0}
  rows[5] |= {"seconds_dev": 7.0, "seconds_save": 8.0}
  out = bench.figures_of(rows, {"dev_accuracy_first": 0.25, "dev_accuracy": None})
  assert (out["seconds"], out["learn"], out["learner_waited"]) == (3.0, 1.0, 2.0)
  assert (out["staleness"], out["staleness_max"]) == (0.5, 2)
  assert (out["rollouts_waited"], out["reward"]) == (1.0, 0.5)
  assert out["before"] == 0.25 and math.isnan(out["after"])


def test_without_a_quickstart_it_says_how_to_make_one(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"run python -m experiments\.quickstart"):
    bench.run(str(tmp_path), str(tmp_path / "w"), 1, 4, 2, True)
