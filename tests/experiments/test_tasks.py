"""The program that looks at tasks: its table, its samples, its exit status."""

from __future__ import annotations

import json

import pytest

from coa_jax.rewards.graded import Ungradable
from coa_jax.rewards.grader import RewardConfig
from coa_jax.tasks.sources import TasksConfig
from experiments import tasks as program

ROWS = [
  {"id": "a", "question": "Who?", "answers": ["Ann", "Anna"], "source": "s"},
  {"id": "b", "question": "1/2?", "answers": ["1/2"], "kind": "math", "source": "s"},
]


@pytest.mark.parametrize(
  ("graders", "status", "said"),
  [
    ({}, 0, ["every accepted answer of 2 tasks earns 1", "1 task of s: math"]),
    ({"qa": "test_tasks:never"}, 1, ["a: 'Ann' earns 0", "2 accepted answers do not"]),
    ({"qa": "test_tasks:unsure"}, 1, ["a: 'Anna' cannot be graded: no idea"]),
  ],
)
def test_gold_answers_are_graded_by_the_runs_grader(
  tmp_path, capsys, monkeypatch, graders, status, said
):
  monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
  path = tmp_path / "t.json"
  path.write_text(json.dumps(ROWS))
  settings = program.TasksCheckConfig(
    TasksConfig(str(path)), RewardConfig(graders=graders)
  )
  if status:
    with pytest.raises(SystemExit) as e:
      program.check(settings)
    assert e.value.code == status
  else:
    program.check(settings)
  out = " ".join(capsys.readouterr().out.split())
  for words in ["Who?", "Ann | Anna", *said]:
    assert words in out


def never(task, answer, trajectory):
  """A grader that nothing pleases."""
  return 0.0


def unsure(task, answer, trajectory):
  """A grader that has no opinion."""
  raise Ungradable("no idea")
