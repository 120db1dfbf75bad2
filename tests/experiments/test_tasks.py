"""The program `tasks`: its table, its samples, its exit status."""

from __future__ import annotations

import json

import ml_collections
import pytest
from absl import flags

from coa_jax.cli import tasks as program
from coa_jax.data.tasks.sources import TasksConfig
from coa_jax.rewards.graded import Ungradable
from coa_jax.rewards.grader import RewardConfig

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


def test_tasks_of_dev_are_looked_at_too(tmp_path, capsys, monkeypatch):
  monkeypatch.syspath_prepend(str(__file__).rpartition("/")[0])
  path = tmp_path / "t.json"
  path.write_text(json.dumps(ROWS))
  bad = {"id": "c", "question": "Which?", "answers": ["x"], "source": "other"}
  (tmp_path / "dev.json").write_text(json.dumps([*ROWS[:1], bad]))
  config = ml_collections.ConfigDict()
  config.tasks = dict(uri=str(path))
  config.reward = dict(graders=dict(other="test_tasks:never"))
  config.dev = dict(uri=str(tmp_path / "dev.json"), every=1)
  flags.FLAGS(["tasks"])  # no flags
  with pytest.raises(SystemExit) as e:
    program.work(config)
  assert e.value.code == 1
  out = " ".join(capsys.readouterr().out.split())
  for words in ("1 task of other: qa", "c: 'x' earns 0", "1 accepted answers do"):
    assert words in out
  # Without the bad task nothing fails.
  config.dev.limit = 1
  config.reward = dict()
  program.work(config)
  assert "every accepted answer of 3 tasks earns 1" in capsys.readouterr().out


def never(task, answer, trajectory):
  """Accepts no answer."""
  return 0.0


def unsure(task, answer, trajectory):
  """Can grade no answer."""
  raise Ungradable("no idea")
