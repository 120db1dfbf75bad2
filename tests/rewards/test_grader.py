"""Graders by source, by kind, by import path; and the handling of failures."""

from __future__ import annotations

import re

import ml_collections
import pytest

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.rewards import math
from coa_jax.rewards.grader import Grader, RewardConfig
from coa_jax.rewards.shaping import OverlongConfig, ShapingConfig
from coa_jax.runtime.config import ConfigError, read_config

MHQA = roles.get_variant("mhqa")
TASK = Task("1", "Capital of France?", ("Paris", "Lutetia"), source="atlas")


def graded(grader: Grader, answer: str, task: Task = TASK, **how) -> Trajectory:
  text = f"<think>a</think><plan>b</plan><think>c</think><answer>{answer}</answer>"
  trajectory = Trajectory("1", [Segment(Author.POLICY, "", text)], status=Status.ENDED)
  grader.grade(task, trajectory, MHQA, **how)
  return trajectory


def config(**fields) -> RewardConfig:
  return read_config(ml_collections.ConfigDict(fields), RewardConfig, "reward")


def test_training_and_evaluation_read_answers_in_their_own_way():
  with Grader() as grader:
    for answer, reward in (("the paris | Lutetia", 1), ("Paris|Rome", 0)):
      t = graded(grader, answer)
      assert (t.reward, t.reward_parts) == (reward, {"answer": reward, "format": 1.0})
      t = graded(grader, answer, evaluation=True)
      assert t.reward == t.reward_parts["answer"] == 1
      assert set(t.reward_parts) == {"answer", "format", "f1"}


def test_f1_can_be_trained_on():
  with Grader(config(match="f1")) as grader:
    assert graded(grader, "Paris, France").reward == pytest.approx(2 / 3)
    t = graded(grader, "Paris, France", evaluation=True)
    assert t.reward == 0.0 and t.reward_parts["f1"] == pytest.approx(2 / 3)
    # Training reads every part, evaluation only the first.
    assert graded(grader, "Paris|Rome").reward == 0.5
    t = graded(grader, "Paris|Rome", evaluation=True)
    assert t.reward == t.reward_parts["f1"] == 1.0


def test_a_source_goes_before_a_kind_and_a_kind_before_its_own_grader():
  number = Task("2", "half of 1", ("0.5",), Kind.MATH)
  with Grader() as grader:
    assert graded(grader, "1/2", number).reward == 1.0
  with Grader(config(graders={"math": "qa", "atlas": "math"})) as grader:
    assert graded(grader, "1/2", number).reward == 0.0
    assert grader.grader_of(TASK) == "math"
    assert graded(grader, "\\text{Paris}").reward == 1.0


@pytest.mark.slow
def test_math_verify_bare_is_a_grader():
  pair = Task("2", "q", ("10^{-20}",), Kind.MATH)
  for name, reward in (("math", 0.0), ("math_verify", 1.0)):
    with Grader(config(graders={"math": name})) as grader:
      grader.check([pair], 100)
      assert graded(grader, "10^{-20}\\pi", pair).reward == reward


@pytest.mark.parametrize(
  ("function", "reward", "parts"),
  [
    ("plain", 1.0, {}),
    ("length", 1.0, {"part_calls": 0}),  # it reads the trajectory
    ("numpys", 1.0, {"part_share": 0.5, "part_n": 2}),
    # The prefix keeps its parts apart from other logged numbers.
    ("collides", 1.0, {"part_format": 0, "part_loss": 3}),
  ],
)
def test_a_function_of_the_users_own(function, reward, parts):
  with Grader(config(graders={"atlas": f"my_rewards:{function}"})) as grader:
    grader.check([TASK], 100)
    t = graded(grader, "Paris")
  assert t.reward == reward
  assert t.reward_parts == {"answer": reward, "format": 1, **parts}
  assert {type(v) for v in (t.reward, *t.reward_parts.values())} == {float}


@pytest.mark.parametrize(
  ("key", "meant"),
  [("altas", "atlas"), ("Math", "math"), ("code", ""), ("gsm8k", ""), ("", "")],
)
def test_a_grader_that_judges_no_task_is_named(key, meant, caplog):
  """An unused key only warns: its tasks may be absent. A misspelt one is refused."""
  tasks = [TASK, Task("2", "q", ("7",), Kind.MATH, source="sums")]
  with Grader(config(graders={"qa": "math", "sums": "qa", "atlas": "qa"})) as grader:
    grader.check(tasks, 100)
  assert not caplog.messages
  message = f"graders: '{key}' is neither .* nor a source of these tasks .atlas, sums"
  with Grader(config(graders={key: "math"})) as grader:
    if meant:
      with pytest.raises(ValueError, match=f"{message}.*did you mean '{meant}'"):
        grader.check(tasks, 100)
    else:
      grader.check(tasks, 100)
      assert re.search(message, caplog.text) and len(caplog.messages) == 1


@pytest.mark.parametrize(
  ("path", "message"),
  [
    ("my_rewards:fails", "my_rewards:fails on task '1' raised AttributeError"),
    ("my_rewards:nonsense", "gave 'answer' 3.0; it must be from 0 to 1"),
    ("my_rewards:unnumbered", "gave 'why': 'because'; it must be a finite number"),
    ("my_rewards:nowhere", "'my_rewards:nowhere' cannot be imported"),
    (
      "no_module:x",
      "cannot be imported: ModuleNotFoundError: No module named 'no_module'",
    ),
    ("my_rewards:__doc__", "is no function"),
  ],
)
def test_a_function_that_does_not_work_stops_the_run(path, message):
  own = config(graders={"qa": path})
  with Grader(own) as grader, pytest.raises(ValueError, match=message):
    grader.check([TASK], 100)
    graded(grader, "Paris")


def test_what_cannot_be_graded_leaves_its_group_and_at_last_stops_the_run(monkeypatch):
  monkeypatch.setattr("coa_jax.rewards.grader._MAX_FAILURES", 3)
  with Grader(config(graders={"qa": "my_rewards:down"})) as grader:
    for _ in range(2):
      t = graded(grader, "Paris")
      assert t.status == Status.INFRASTRUCTURE
      assert t.reward is None and not t.reward_parts
      assert t.meta["ungraded"] == "my service is down"
    with pytest.raises(ValueError, match=r"3 trajectories in a row .* service is down"):
      graded(grader, "Paris")


def test_a_math_process_that_cannot_start_is_no_wrong_answer(monkeypatch):
  def broken(*_):
    raise RuntimeError("no CPU time")

  monkeypatch.setattr(math, "equivalent", broken)
  with Grader() as grader:
    t = graded(grader, "1/2", Task("2", "q", ("0.5",), Kind.MATH))
  assert t.status == Status.INFRASTRUCTURE and t.reward is None


def test_a_task_without_answers_and_a_failed_trajectory_stay_as_they_are():
  with Grader() as grader:
    t = graded(grader, "x", Task("1", "q", ()))
    assert t.reward is None and t.status == Status.ENDED
    lost = Trajectory("1", [], status=Status.INFRASTRUCTURE)
    grader.grade(TASK, lost, MHQA)
    assert lost.reward is None and not lost.meta


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"graders": {"qa": "exact"}}, r"graders\['qa'\] is 'exact'; accepted: qa, gaia"),
    ({"graders": {"qa": "judge"}}, "'qa' needs reward.judge, an endpoint"),
    (
      {"judge": {"chat": {"base_url": "http://x", "model": "m"}}},
      "no entry of graders asks it",
    ),
    ({"shaping": {"overlong": {"limit": 8}}}, "lacks field 'buffer'"),
    ({"shaping": {"overlnog": {}}}, "did you mean 'overlong'"),
  ],
)
def test_config_refusals(fields, message):
  with pytest.raises(ConfigError, match=message):
    config(**fields)


PROGRAM = Task("p", "q", ("-",), Kind.CODE)
LONG = ShapingConfig(overlong=OverlongConfig(200, 10))


@pytest.mark.parametrize(
  ("own", "message"),
  [
    (RewardConfig(), r"task 'p': meta\.tests is NoneType"),
    (RewardConfig({"code": "qa"}), "task 'p': code tasks need hidden tests"),
    (RewardConfig(shaping=LONG), r"limit=200 is above rollout\.max_len=100"),
  ],
)
def test_tasks_are_refused_before_any_work(own, message):
  with Grader(own) as grader, pytest.raises(ValueError, match=message):
    grader.check([TASK, PROGRAM], 100)
