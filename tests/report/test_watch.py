"""Early warning: rules over synthetic metrics."""

from __future__ import annotations

import dataclasses
import math

import pytest

from coa_jax.report.watch import RULES, CollapsedError, Watch, WatchConfig

HEALTHY = {
  "loss": 0.1,
  "grad_norm": 0.5,
  "entropy": 0.4,
  "entropy_plan": 0.3,
  "informative": 0.6,
  "tokens_per_trajectory": 100.0,
  "truncated_share": 0.1,
  "repeated_share": 0.1,
  "gap_share": 0.0,
  "ratio_tail": 0.0,
  "removed_mass": 0.01,
  "infrastructure_share": 0.0,
}
# Metric -> what it is once it went wrong, and the field that limits it.
WRONG = {
  "entropy": (1e-5, "entropy"),
  "entropy_plan": (1e-4, "entropy_drop"),
  "informative": (0.0, "informative"),
  "tokens_per_trajectory": (400.0, "length_growth"),
  "truncated_share": (0.9, "truncated"),
  "repeated_share": (0.8, "repeated"),
  "gap_share": (0.2, "gap"),
  "ratio_tail": (0.5, "ratio_tail"),
  "removed_mass": (0.5, "removed_mass"),
  "infrastructure_share": (0.6, "infrastructure"),
}


def said(config: WatchConfig, series: list[dict[str, float]]) -> list[tuple[int, str]]:
  """(step, line) of everything that is said of a series."""
  out, watch = [], Watch(config)
  for step, values in enumerate(series, 1):
    watch.look(step, values, lambda line, step=step: out.append((step, line)))
    watch.end(step)
  return out


def test_every_field_has_a_rule_and_every_rule_a_case():
  limits = {f.name for f in dataclasses.fields(WatchConfig)} - {"stop", "patience"}
  assert set(RULES) == limits == {field for _, field in WRONG.values()}


def test_a_healthy_run_is_left_alone():
  assert said(WatchConfig(stop=True), [HEALTHY] * 50) == []
  # Some noise beyond every limit, never `patience` steps in a row, is no collapse.
  wrong = HEALTHY | {name: value for name, (value, _) in WRONG.items()}
  series = [HEALTHY] * 5 + [wrong, wrong, wrong, wrong, HEALTHY] * 5
  assert said(WatchConfig(stop=True), series) == []


@pytest.mark.parametrize("metric", WRONG)
def test_each_collapse_is_named_once_with_its_limit_and_a_remedy(metric):
  value, field = WRONG[metric]
  wrong = HEALTHY | {metric: value}
  config = WatchConfig(patience=3)
  series = [HEALTHY] * 4 + [wrong] * 6 + [HEALTHY] + [wrong] * 3
  first, again = said(config, series)
  assert (first[0], again[0]) == (7, 14)  # the third in a row, and again later
  assert f"warning: step 7: {metric} is {value:.4g}" in first[1]
  assert f"watch.{field}=" in first[1] and "3 steps in a row" in first[1]
  assert RULES[field].remedy in first[1] and "\n" not in first[1]
  with pytest.raises(CollapsedError, match=rf"stopped at step 7 \(saved\).*{metric}"):
    said(dataclasses.replace(config, stop=True), series)
  off = dataclasses.replace(config, stop=True, **{field: 0.0})
  assert said(off, series) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_at_once_and_never_saved(bad):
  series = [HEALTHY, HEALTHY | {"grad_norm": bad}]
  ((step, line),) = said(WatchConfig(), series)
  assert step == 2 and f"grad_norm is {bad}" in line
  watch = Watch(WatchConfig(stop=True))
  with pytest.raises(CollapsedError, match=r"step 1 \(not saved"):
    watch.look(1, series[1], lambda line: None)  # before the run could be saved


def test_steps_that_lack_a_metric_or_have_no_mean_of_it_count_for_nothing():
  """A step without an update has no entropy, one without a grade no reward."""
  wrong = HEALTHY | {"entropy": 1e-5}
  without = {k: v for k, v in HEALTHY.items() if k != "entropy"}
  series = [wrong, without, {**without, "reward": math.nan}, wrong]
  assert [step for step, _ in said(WatchConfig(patience=2), series)] == [4]


def test_limits_that_can_not_be_meant_are_refused():
  with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
    WatchConfig(patience=0)
  with pytest.raises(ValueError, match=r"gap must be at least 0 .*got -0.1"):
    WatchConfig(gap=-0.1)
