"""The cost comparison, with figures computed by hand."""

from __future__ import annotations

import pytest
from samples import MULTI, SINGLE, attempt

from coa_jax.protocol.trajectory import Status
from coa_jax.report import cost, scores, tables


def test_by_hand():
  out = cost.cost(MULTI, SINGLE)
  multi, single = out["multi_agent"], out["single"]
  assert multi["per_task"] == {
    "prompt": 1200,
    "prompt_cached_credit": 450,
    "completion": 300,
    "total": 1500,
    "total_cached_credit": 750,
    "tool_calls": 1,
    "model_calls": 4.5,
    "seconds": 1.5,
    "solved": 1,
  }
  assert single["per_task"]["prompt"] == 75  # prompt and observations, once each
  assert single["per_task"]["total"] == 150
  assert single["per_solved"]["total"] == 300
  assert out["reduction_no_cache"] == pytest.approx(0.9)
  assert out["reduction_cache"] == pytest.approx(0.8)
  assert out["reduction_per_solved"] == pytest.approx(1 - 300 / 1500)
  assert out["reduction_per_solved_cache"] == pytest.approx(1 - 300 / 750)
  assert (out["tasks"], out["left_out"]) == (2, 0)
  # Accuracy: the team's 1, the model's 0.5; a resample has one task twice, or both.
  assert multi["ci95"]["solved"] == scores.wilson(2, 2)
  assert single["ci95"]["solved"] == scores.wilson(1, 2)
  assert multi["ci95"]["total"] == [1000, 2000]
  assert (out["accuracy_gain"], out["ci95"]["accuracy_gain"]) == (-0.5, [-1, 0])
  low, high = out["ci95"]["reduction_no_cache"]
  # task a alone saves 80 %, task b alone 95 %
  assert low == pytest.approx(0.8)
  assert high == pytest.approx(0.95)


def test_instructions_count_once_a_task_on_the_models_side():
  out = cost.cost(MULTI, SINGLE, instructions=300)
  assert out["reduction_no_cache"] == pytest.approx(0.9)
  assert out["reduction_instructed"] == pytest.approx(1 - (150 + 300) / 1500)
  # 2 tasks with 450 tokens each, 1 of them solved.
  assert out["reduction_per_solved_instructed"] == pytest.approx(1 - 900 / 1500)
  # task a alone: 1 - 500 / 1000; task b alone: 1 - 400 / 2000
  assert out["ci95"]["reduction_instructed"] == pytest.approx([0.5, 0.8])
  unknown = cost.cost(MULTI, SINGLE)
  assert unknown["reduction_instructed"] is unknown["instructions"] is None
  assert unknown["ci95"]["reduction_instructed"] is None
  in_it = cost.cost(MULTI, SINGLE, instructions=0)
  assert in_it["reduction_instructed"] == in_it["reduction_no_cache"]


def test_only_tasks_of_both_count_and_infrastructure_does_not():
  extra = attempt("c", True, prompt=9**9)
  broken = attempt("b", False, Status.INFRASTRUCTURE, prompt=9**9)
  out = cost.cost([*MULTI, extra], [SINGLE[0], broken])
  assert (out["tasks"], out["left_out"]) == (1, 2)
  assert out["multi_agent"]["per_task"]["total"] == 1000
  with pytest.raises(ValueError, match=r"no task in common: 2 .* 0 of the single"):
    cost.cost(MULTI, [broken])


def test_samples_of_a_task_are_averaged():
  twice = [SINGLE[0], attempt("a", False, prompt=150, generated=250)]
  out = cost.cost(MULTI[:1], twice)
  assert out["single"]["per_task"]["total"] == 300
  assert out["single"]["per_task"]["solved"] == 0.5


def test_nothing_solved_has_no_cost_per_solved_task():
  out = cost.cost(MULTI, [attempt("a", False, prompt=5), attempt("b", False, prompt=5)])
  assert out["single"]["per_solved"]["total"] is None
  assert out["reduction_per_solved"] is None
  assert out["ci95"]["reduction_per_solved"] == [None, None]


def test_tables_show_every_figure():
  figures, saved = cost.cost_tables(cost.cost(MULTI, SINGLE))
  text = tables.markdown_table(figures.rows, figures.columns)
  row = (
    "| total tokens | 1,500 (1,000 to 2,000) | 150.0 (100.0 to 200.0) | 1,500 | 300.0 |"
  )
  assert row in text
  assert text.count("\n") == 2 + len(cost.FIGURES)
  assert "| tokens per task, as played | 0.900 | 0.800 to 0.950 |" in (
    tables.markdown_table(saved.rows, saved.columns)
  )
  assert saved.rows[-2]["reduction"] == 0.846
