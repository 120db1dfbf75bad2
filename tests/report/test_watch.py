"""Early warning: rules over synthetic metrics."""

from __future__ import annotations

import dataclasses
import math

import pytest

from coa_jax.report.health import RULES, CollapsedError, HealthMonitor, WatchConfig
from coa_jax.report.metrics import Metrics
from coa_jax.runtime.config import ConfigError, read_config

HEALTHY = {
  "loss": 0.1,
  "grad_norm": 0.5,
  "entropy": 0.4,
  "entropy_plan": 0.3,
  "reward_variance_share": 0.6,
  "tokens_per_trajectory": 100.0,
  "truncated_share": 0.1,
  "repeated_share": 0.1,
  "calls_per_trajectory": 2.0,
  "logp_diff_share": 0.0,
  "ratio_outlier_share": 0.0,
  "removed_mass": 0.01,
  "infrastructure_share": 0.0,
}
# Metric -> its value in a failing run.
WRONG = {
  "entropy": 1e-5,
  "entropy_plan": 1e-4,
  "reward_variance_share": 0.0,
  "tokens_per_trajectory": 400.0,
  "truncated_share": 0.9,
  "repeated_share": 0.8,
  "calls_per_trajectory": 0.3,
  "logp_diff_share": 0.2,
  "ratio_outlier_share": 0.5,
  "removed_mass": 0.5,
  "infrastructure_share": 0.6,
}


def limit_of(metric: str) -> str:
  """The name of a metric's limit."""
  return "entropy_" if metric == "entropy_plan" else metric


Series = list[dict[str, float]]


def warnings_of(config: WatchConfig, series: Series) -> list[tuple[int, str]]:
  """(step, line) for every warning in a series."""
  out, watch = [], HealthMonitor(config)
  for step, values in enumerate(series, 1):
    watch.update(step, values, lambda line, step=step: out.append((step, line)))
    watch.raise_if_stopped(step)
  return out


def test_every_rule_has_a_case_and_a_limit():
  assert set(RULES) == set(WatchConfig().limits) == {limit_of(m) for m in WRONG}
  some = WatchConfig(limits={"entropy": 0.5}).limits
  assert some == WatchConfig().limits | {"entropy": 0.5}


def test_a_healthy_run_is_left_alone():
  assert warnings_of(WatchConfig(stop=True), [HEALTHY] * 50) == []
  # Noise beyond the limits for fewer than `patience` steps in a row is no collapse.
  wrong = HEALTHY | WRONG
  series = [HEALTHY] * 5 + [wrong, wrong, wrong, wrong, HEALTHY] * 5
  assert warnings_of(WatchConfig(stop=True), series) == []


@pytest.mark.parametrize("metric", WRONG)
def test_each_collapse_is_named_once_with_its_limit_and_a_remedy(metric):
  value, limit = WRONG[metric], limit_of(metric)
  wrong = HEALTHY | {metric: value}
  config = WatchConfig(patience=3)
  series = [HEALTHY] * 4 + [wrong] * 6 + [HEALTHY] + [wrong] * 3
  first, again = warnings_of(config, series)
  assert (first[0], again[0]) == (7, 14)  # the third in a row, and again later
  assert f"warning: step 7: {metric} is {value:.4g}" in first[1]
  assert f"watch.limits.{limit}=" in first[1] and "3 steps in a row" in first[1]
  assert RULES[limit].remedy in first[1] and "\n" not in first[1]
  with pytest.raises(CollapsedError, match=rf"stopped at step 7 \(saved\).*{metric}"):
    warnings_of(dataclasses.replace(config, stop=True), series)
  off = dataclasses.replace(config, stop=True, limits={limit: 0.0})
  assert warnings_of(off, series) == []


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("name", ["grad_norm", "entropy", "entropy_plan", "value_loss"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_run_before_it_is_saved(stop, name, bad):
  """Even without `stop`: such checkpoints would replace every good one."""
  watch, lines = HealthMonitor(WatchConfig(stop=stop)), []
  watch.update(1, HEALTHY, lines.append)
  with pytest.raises(CollapsedError, match=rf"step 2 \(not saved.*{name} is {bad}"):
    watch.update(2, HEALTHY | {name: bad}, lines.append)
  (line,) = lines
  assert line.startswith(f"warning: step 2: {name} is {bad}")


def ending(watch: HealthMonitor, series: Series, first: int) -> str:
  """Watches steps from `first` on; returns the reason for its stop, or ""."""
  try:
    for step, values in enumerate(series[first:], first + 1):
      watch.update(step, values, lambda line: None)
      watch.raise_if_stopped(step)
  except CollapsedError as e:
    return str(e)
  return ""


@pytest.mark.parametrize("metric", WRONG)
@pytest.mark.parametrize("lives", [1, 2, 7])
def test_a_run_that_goes_on_ends_where_an_uninterrupted_one_does(
  tmp_path, metric, lives
):
  """Baselines and counts cover the whole run, even with frequent restarts."""
  wrong = HEALTHY | {metric: WRONG[metric], "reward": math.nan}
  series = [HEALTHY] * 6 + [wrong] * 6
  config = WatchConfig(stop=True)
  expected = ending(HealthMonitor(config), series, 0)
  assert "stopped at step 11 (saved)" in expected
  workdir = str(tmp_path)
  with Metrics(workdir, "rl", len(series)) as log:  # also for steps never saved
    for step, values in enumerate(series, 1):
      log.log(step, values)
  for first in range(0, 11, lives):  # at 0 there is nothing to replay
    watch = HealthMonitor(config)
    watch.replay(workdir, "rl", first)
    assert not watch.ends and ending(watch, series, first) == expected
  # The last step was saved: the run continues only without `stop` or without the limit.
  with pytest.raises(CollapsedError) as again:
    HealthMonitor(config).replay(workdir, "rl", 11)
  assert str(again.value) == expected
  for other in ({"stop": False}, {"limits": {limit_of(metric): 0.0}}):
    watch = HealthMonitor(dataclasses.replace(config, **other))
    watch.replay(workdir, "rl", 11)
    assert ending(watch, series, 11) == ""


def test_sampler_and_learner_are_not_compared_off_policy():
  """Older policies sampled the tokens, so a difference is not a fault."""
  wrong = HEALTHY | {"logp_diff_share": 0.9, "ratio_outlier_share": 0.9}
  assert len(warnings_of(WatchConfig(), [wrong] * 9)) == 2
  assert warnings_of(WatchConfig(stop=True), [wrong | {"staleness": 0.0}] * 9) == []


def test_a_run_without_tools_is_not_blamed_for_asking_none():
  series = [HEALTHY | {"calls_per_trajectory": 0.0}] * 20
  assert warnings_of(WatchConfig(stop=True), series) == []


def test_steps_that_lack_a_metric_or_have_no_mean_of_it_count_for_nothing():
  """Without an update a step has no entropy; without a grade it has no reward."""
  wrong = HEALTHY | {"entropy": 1e-5}
  without = {k: v for k, v in HEALTHY.items() if k != "entropy"}
  series = [wrong, without, {**without, "reward": math.nan}, wrong]
  assert [step for step, _ in warnings_of(WatchConfig(patience=2), series)] == [4]


def test_limits_that_can_not_be_meant_are_refused():
  for value in (-0.1, math.nan, math.inf):
    with pytest.raises(ValueError, match=r"limits\.removed_mass is .* at least 0"):
      WatchConfig(limits={"removed_mass": value})
  with pytest.raises(ValueError, match="no metric 'removed_mas'; did you mean"):
    WatchConfig(limits={"removed_mas": 0.1})
  with pytest.raises(ConfigError, match="'watch' has no field 'entropy'"):
    read_config({"entropy": 0.1}, WatchConfig, "watch")
