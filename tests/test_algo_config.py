"""Section `algo`: presets, and errors for fields that contradict each other."""

from __future__ import annotations

import ml_collections
import pytest

from coa_jax.learner.algorithms import PRESETS, preset
from coa_jax.plan.rl import AlgoConfig
from coa_jax.runtime.config import ConfigError, read_config


def read(**fields) -> AlgoConfig:
  """Reads the section with these fields; a dict becomes a subsection."""
  config = ml_collections.ConfigDict({"algo": {"steps": 1, **fields}})
  return read_config(config.algo, AlgoConfig, "algo")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_an_algorithm_of_its_own(name: str):
  sections = preset(name)
  config = ml_collections.ConfigDict({"steps": 1, "loss": {"critic_lr": 1e-3}})
  config.update(sections)
  algo = read(**config)
  assert algo.loss.advantage == sections["loss"]["advantage"]
  assert algo.loss.critic_lr == 1e-3
  assert [n for n, other in PRESETS.items() if other == sections["loss"]] == [name]
  sections["loss"].clear()
  assert preset(name)["loss"]  # `preset` returns a copy


def test_an_unknown_preset_is_named():
  with pytest.raises(ValueError, match="no algorithm 'gpro'; there are grpo"):
    preset("gpro")


MASK = {"is_mode": "mask"}
LOSSES = [
  ({"advantage": "gpro"}, "advantage 'gpro'; accepted: grpo, dr_grpo"),
  ({"kl_coef": 0.1, "kl_estimator": "k1"}, "gradient of mean 0"),
  ({"dual_clip": 0.5}, "dual_clip is 0.5; it must be 0"),
  ({"dual_clip": 3.0, "surrogate": "cispo"}, "with surrogate 'clip'"),
  ({"is_min": 0.5}, "is_min is 0.5; without is_mode='mask'"),
  ({"is_min": 0.5, "is_clip": 2.0}, "is_min is 0.5; without is_mode='mask'"),
  (MASK, "is_mode is 'mask', and without weights .* leave it at 'truncate'"),
  ({"is_level": "sequence"}, "is_level is 'sequence', and without .* at 'token'"),
  # The mask's range must contain 1, the weight of every on-policy token.
  (MASK | {"is_clip": 1.0}, "is_clip is 1.0; with is_mode 'mask' it must be above 1"),
  (MASK | {"is_clip": 2.0, "is_min": 1.5}, "is_min is 1.5; .* at least 0 and below 1"),
]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    *(({"loss": fields}, message) for fields, message in LOSSES),
    ({"sampling": {"samples": 1}}, "sampling.samples is 1; it must be at least 2"),
    (
      {"sampling": {"samples": 1}, "loss": {"advantage": "gae"}},
      "sampling.filter_groups=False",
    ),
    ({"sampling": {"staleness": 1}}, "staleness=1 needs loss.is_clip above 0"),
    (
      {
        "sampling": {"staleness": 1},
        "loss": {"is_clip": 2.0},
        "guards": {"max_logp_diff_share": 0.5},
      },
      "max_logp_diff_share is 0.5: .* leave it at 1",
    ),
  ],
)
def test_an_impossible_config_is_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    read(**fields)


@pytest.mark.parametrize("path", ["sampling.prompts", "loss.clip_high", "batch.rows"])
def test_a_field_that_has_moved_is_named_by_its_path(path: str):
  with pytest.raises(ConfigError, match=f"did you mean '{path}'"):
    read(**{path.partition(".")[2]: 1})
