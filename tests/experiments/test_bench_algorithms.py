"""The benchmark of algorithms: what it runs, and what it makes of the logs."""

from __future__ import annotations

import json

import pytest

from coa_jax.config import section
from coa_jax.learner.algorithms import PRESETS, AlgoConfig
from experiments import bench_algorithms as bench


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("quick", [False, True])
def test_every_run_has_the_presets_fields_and_the_same_budget(name: str, quick: bool):
  config = bench.config_of(name, "Q", 2, 5, quick)
  algo = section(config, "algo", AlgoConfig)
  fields = {**PRESETS[name], "rounds": 1}
  assert {k: getattr(algo, k) for k in fields} == fields
  other = section(bench.config_of("dapo", "Q", 2, 5, quick), "algo", AlgoConfig)
  assert (algo.steps, algo.prompts, algo.samples) == (
    other.steps,
    other.prompts,
    other.samples,
  )
  assert algo.steps == (2 if quick else 5)
  assert config.init == "Q/sft/model" and config.rollout.seed == 2


def test_a_line_of_the_table_is_the_mean_over_seeds(tmp_path):
  rewards = {"a": [0.25, 0.5, 0.75, 0.75, 0.75], "b": [0.5, 0.5, 0.25, 0.5, 0.25]}
  for name, values in rewards.items():
    (tmp_path / name).mkdir()
    rows = [
      {"stage": "rl", "step": i + 1, "reward": r, "entropy": 0.5, "seconds": 2.0 * i}
      for i, r in enumerate(values)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name / "metrics.jsonl").write_text(text)
  row = bench.row_of("x", [str(tmp_path / n) for n in rewards])
  assert (row["before"], row["improved"], row["seeds"]) == (0.375, 1, 2)
  assert row["after"] == pytest.approx((0.75 + 1 / 3) / 2)
  assert row["least"] == pytest.approx(1 / 3)
  assert (row["entropy"], row["seconds"]) == (0.5, 8.0)


def test_without_a_quickstart_it_says_how_to_make_one(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"run python -m experiments\.quickstart"):
    bench.run(["ppo"], str(tmp_path), str(tmp_path / "w"), 1, 1, True)
