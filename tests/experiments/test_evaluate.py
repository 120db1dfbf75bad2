"""An evaluation's printed table: rows for all tasks, each source and each family."""

from __future__ import annotations

import json

import pytest

from coa_jax.cli import evaluate
from coa_jax.evaluate import EvalConfig
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.report import scores


def attempt(task: str, sample: int, right: bool, family: str) -> Trajectory:
  """A graded attempt."""
  return Trajectory(
    task_id=task,
    sample=sample,
    status=Status.ENDED,
    reward_parts={"answer": float(right), "format": 1.0},
    meta={"family": family},
  )


@pytest.fixture
def results():
  """Two sources with one family each; one sample in four solves b."""
  greedy = [attempt("a", 0, True, "easy"), attempt("b", 0, False, "hard")]
  sampled = [attempt("a", i, True, "easy") for i in range(4)]
  sampled += [attempt("b", i, i == 3, "hard") for i in range(4)]
  results = scores.summary(greedy, sampled, ks=(1, 4))
  for by in ("by_source", "by_family"):
    results[by] = scores.by_group(
      greedy,
      sampled,
      lambda t, by=by: t.task_id if by == "by_source" else t.meta["family"],
      ks=(1, 4),
    )
  return results


def test_the_table_has_all_sources_and_families(results):
  table = evaluate.table(results)
  assert [row["of"] for row in table.rows] == [
    "all", "source a", "source b", "family easy", "family hard",
  ]  # fmt: skip
  whole, _, hard = table.rows[:3]
  assert whole["pass4"] == "1.000" and hard["pass1"] == "0.250"
  assert whole["pass1_greedy"].startswith("0.500 (")
  assert {"pass@1", "pass@4", "vote of 4"} < set(table.columns.values())
  # A single group would repeat the row of all tasks.
  results["by_source"].pop("a")
  assert len(evaluate.table(results).rows) == 3
  json.dumps(results)


def test_k_is_3_unless_it_is_given():
  assert EvalConfig(samples=0).k == EvalConfig(samples=2).k == (3,)
