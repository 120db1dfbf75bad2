"""Pass rates, difficulty bands and balanced limits."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.data.tasks.difficulty import Attempts, SelectConfig, keep_tasks, pass_rates
from coa_jax.data.tasks.task import Task


def tasks_of(counts: dict[str, int]) -> list[Task]:
  """N tasks per family."""
  return [
    Task(f"{family}{i}", f"{family} {i}?", ("x",), source="s", family=family)
    for family, n in counts.items()
    for i in range(n)
  ]


def test_pass_rates_by_hand():
  found = pass_rates([("a", True), ("b", False), ("a", False), ("a", True)])
  assert found == {"a": Attempts(2, 3), "b": Attempts(0, 1)}
  assert found["a"].rate == pytest.approx(2 / 3)


@settings(deadline=None)
@given(
  right=st.lists(st.integers(0, 8), min_size=1, max_size=30),
  low=st.integers(0, 8),
  high=st.integers(0, 8),
  all_wrong=st.booleans(),
  all_right=st.booleans(),
)
def test_every_task_is_kept_or_left_out_for_the_reason_that_holds(
  right, low, high, all_wrong, all_right
):
  low, high = sorted((low, high))
  tasks = tasks_of({"f": len(right)})
  attempts = {t.id: Attempts(n, 8) for t, n in zip(tasks, right, strict=True)}
  config = SelectConfig(low / 8, high / 8, all_wrong, all_right)
  chosen, funnel = keep_tasks(tasks, attempts, config)
  expected = [
    t.id
    for t, n in zip(tasks, right, strict=True)
    if low <= n <= high and (n or all_wrong) and (n < 8 or all_right)
  ]
  assert [t.id for t in chosen] == expected
  reasons = ("all_wrong", "all_right", "too_hard", "too_easy")
  assert funnel["out"] + sum(funnel.get(r, 0) for r in reasons) == funnel["in"]
  assert sum(funnel["rates"].values()) == len(right)
  for task in chosen:
    assert task.meta == {"pass_rate": attempts[task.id].rate, "attempts": 8}


@settings(deadline=None)
@given(
  counts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
  limit=st.integers(1, 40),
  seed=st.integers(0, 3),
)
def test_a_limit_is_shared_as_evenly_as_the_strata_allow(counts, limit, seed):
  tasks = tasks_of({f"f{i}": n for i, n in enumerate(counts)})
  attempts = {t.id: Attempts(1, 2) for t in tasks}
  config = SelectConfig(limit=limit, seed=seed)
  chosen, funnel = keep_tasks(tasks, attempts, config)
  ids = [t.id for t in tasks]
  assert len(chosen) == min(limit, len(tasks)) == funnel["out"]
  assert [t.id for t in chosen] == [i for i in ids if i in {t.id for t in chosen}]
  got = collections.Counter(t.family for t in chosen)
  most = max(got.values())
  for i, n in enumerate(counts):  # two below the largest: none is left
    assert got[f"f{i}"] >= most - 1 or got[f"f{i}"] == n
  assert [t.id for t in keep_tasks(tasks, attempts, config)[0]] == [
    t.id for t in chosen
  ]


def test_strata_may_be_rates_and_what_was_used_or_hardly_tried_is_left_out():
  tasks = tasks_of({"f": 20})
  attempts = {t.id: Attempts(1 if i < 16 else 3, 4) for i, t in enumerate(tasks)}
  config = SelectConfig(limit=8, strata=("rate",))
  _, funnel = keep_tasks(tasks, attempts, config)
  assert funnel["kept_rates"] == {"1/4": 4, "3/4": 4} and funnel["limit"] == 12
  chosen, funnel = keep_tasks(tasks, attempts, SelectConfig(), used={"f0", "f 1?"})
  assert funnel["used"] == 2 and {"f0", "f1"}.isdisjoint(t.id for t in chosen)
  few = {"f0": Attempts(1, 2), "f1": Attempts(2, 4)}
  chosen, funnel = keep_tasks(tasks, few, SelectConfig(min_attempts=3))
  assert [t.id for t in chosen] == ["f1"] and funnel["attempts"] == 19


@pytest.mark.parametrize(
  "values, words",
  [
    (dict(at_least=0.5, at_most=0.2), "no pass rate is in the band"),
    (dict(strata=("topic",)), "accepted: source, family, rate"),
  ],
)
def test_refusals(values, words):
  with pytest.raises(ValueError, match=words):
    SelectConfig(**values)
