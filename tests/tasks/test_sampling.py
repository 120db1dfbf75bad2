"""Task samplers: uniform, by learnability, or from easy to hard."""

from __future__ import annotations

import collections
import json
import math

import pytest

from coa_jax.data.tasks.sampling import (
  Curriculum,
  Learnability,
  TaskSampler,
  make_task_sampler,
)
from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Trajectory

TASKS = [Task(str(n), str(n), ("x",)) for n in range(5)]


def rated(*rates: float) -> list[Task]:
  return [
    Task(str(n), str(n), ("x",), meta={"pass_rate": r, "attempts": 8})
    for n, r in enumerate(rates)
  ]


def group(task_id: str, *rewards: float | None) -> list[Trajectory]:
  return [Trajectory(task_id, reward=r) for r in rewards]


def drawn(sampler: TaskSampler, n: int, step: int = 0) -> list[str]:
  return [sampler.task(i, step).id for i in range(n)]


def test_tasks_are_drawn_in_epochs():
  ids = drawn(TaskSampler(TASKS, 7), 15)
  for epoch in range(3):
    assert sorted(ids[5 * epoch : 5 * epoch + 5]) == list("01234")
  assert ids[:5] != ids[5:10]
  assert drawn(make_task_sampler("uniform", TASKS, 7, 0), 15) == ids
  assert drawn(TaskSampler(TASKS, 8), 15) != ids
  again = TaskSampler(TASKS, 7)  # in any order
  assert [again.task(i, 0).id for i in reversed(range(15))] == ids[::-1]


def test_tasks_of_which_nothing_is_known_are_drawn_as_in_epochs():
  assert drawn(Learnability(TASKS, 7), 15) == drawn(TaskSampler(TASKS, 7), 15)


def test_a_task_is_drawn_by_the_variance_of_its_reward():
  """Chances match the formula, and counts match them; no task is left out for good."""
  sampler = Learnability(TASKS, 0)
  for _ in range(9):
    sampler.learn(group("0", *[0.0] * 8))
    sampler.learn(group("1", *[1.0] * 8))
    sampler.learn(group("2", *[1.0] * 2, *[0.0] * 6))
    sampler.learn(group("3", *[1.0] * 4, *[0.0] * 4))
  # Attempts decay by half: 8 (1 + 1/2 + ...) count.
  graded = 8 * (2 - 0.5**8)
  p = (graded / 4 + 1) / (graded + 2)
  chances = [sampler.chance(task, 0) for task in TASKS]
  one = (graded + 1) / (graded + 2)
  assert chances == pytest.approx(
    [4 * one * (1 - one), 4 * one * (1 - one), 4 * p * (1 - p), 1.0, 1.0]
  )
  counts = collections.Counter(drawn(sampler, 4000))
  for task, chance in zip(TASKS, chances, strict=True):
    share = chance / sum(chances)
    assert counts[task.id] / 4000 == pytest.approx(share, abs=0.03)
  never = Learnability(rated(0.0, 0.5), 0)
  never.learn(group("0", *[0.0] * 4000))
  assert never.chance(never.tasks[0], 0) == 0.1
  assert 0 < collections.Counter(drawn(never, 500))["0"] < 100


def test_attempts_on_record_count_and_failures_of_infrastructure_do_not():
  sampler = Learnability(rated(1.0, 0.5), 0)
  easy = 9 / 10
  assert sampler.chance(sampler.tasks[0], 0) == pytest.approx(4 * easy * (1 - easy))
  before = sampler.state
  sampler.learn(group("0", None, None))
  assert sampler.state == before
  # Only the answer part counts, whatever else the reward contains.
  shaped = group("1", 0.3, 0.3)
  for t in shaped:
    t.reward_parts["answer"] = 1.0
  sampler.learn(shaped)
  assert sampler.state["counts"]["1"] == [4 / 2 + 2, 8 / 2 + 2]


@pytest.mark.parametrize("how", ["learnability", "curriculum"])
def test_a_draw_goes_on_from_its_state(how):
  tasks = rated(0.1, 0.4, 0.5, 0.9, 1.0)
  sampler = make_task_sampler(how, tasks, 3, 20)
  drawn(sampler, 7, step=10)
  sampler.learn(group("2", 1.0, 0.0))
  state = json.loads(json.dumps(sampler.state))
  rest = drawn(sampler, 20, step=10)
  other = make_task_sampler(how, tasks, 3, 20)
  other.restore(state)
  assert drawn(other, 20, step=10) == rest
  assert drawn(make_task_sampler(how, tasks, 4, 20), 20, step=10) != rest


def test_a_curriculum_goes_from_easy_to_all_by_square_root_competence():
  rates = [n / 100 for n in range(100)]
  sampler = Curriculum(rated(*rates), 0, 50)
  for step in (0, 5, 20, 49):
    share = math.sqrt(step * (1 - 0.1**2) / 50 + 0.1**2)
    ids = set(map(int, drawn(sampler, 2000, step)))
    # The easiest tasks have the highest rates, and so the highest numbers.
    assert min(ids) == 100 - math.ceil(share * 100 - 1e-9)
    assert max(ids) == 99
  assert set(map(int, drawn(sampler, 2000, 50))) == set(range(100))
  assert sampler.chance(sampler.tasks[0], 1000) == 1
  assert Curriculum(rated(0.2, 0.1), 0, 0).chance(rated(0.2, 0.1)[1], 0) == 1


def test_an_impossible_draw_is_refused():
  with pytest.raises(ValueError, match=r"task '0' has no meta.pass_rate"):
    make_task_sampler("curriculum", TASKS, 0, 10)
  with pytest.raises(ValueError, match="task sampler 'x'; accepted: uniform"):
    make_task_sampler("x", TASKS, 0, 10)
