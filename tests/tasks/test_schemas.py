"""Data set rows become tasks or are refused; config columns; inferred kinds."""

from __future__ import annotations

import json
import pathlib

import pytest

from coa_jax.data.tasks.cells import listed
from coa_jax.data.tasks.sources import TasksConfig, describe_tasks, select_tasks
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.rewards.code.tests import read_tests

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


def cases(name: str) -> list[dict]:
  return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


ROWS = cases("task_rows.jsonl")
REFUSED = cases("task_refusals.jsonl")


@pytest.fixture
def read(write):
  """Reads one row, with a config's options, as its file's only task."""

  def read_row(row: dict, **config) -> Task:
    (task,) = select_tasks(TasksConfig(write("set.jsonl", [row]), **config))
    return task

  return read_row


@pytest.mark.parametrize("case", ROWS, ids=[case["name"] for case in ROWS])
def test_a_row_becomes_its_task(read, case):
  task = read(case["row"], **case.get("config", {}))
  assert task == Task.from_json(case["task"])
  if task.kind == Kind.CODE:
    assert read_tests(task)


@pytest.mark.parametrize(
  "case", REFUSED, ids=[case["message"][:70] for case in REFUSED]
)
def test_a_row_that_is_no_task_is_refused_by_name(read, case):
  with pytest.raises(ValueError) as e:
    read(case["row"], **case.get("config", {}))
  assert case["message"] in str(e.value)
  assert not any(word in str(e.value) for word in ("Error", "subscript", "unpack"))


@pytest.mark.parametrize("name", ["answers", "golden_answers", "gold"])
def test_gold_that_nothing_matches_is_refused_under_any_name(read, name):
  fields = {"answers": name} if name == "gold" else {}
  golds = [
    case["row"] for case in REFUSED if set(case["row"]) == {"question", "answer"}
  ]
  assert len(golds) > 20
  for row in golds:
    with pytest.raises(ValueError, match=r"set.jsonl(:1)?: .*(answer|'gold')"):
      read({"question": "q", name: row["answer"]}, fields=fields)


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("['a', 'b']", ["a", "b"]),
    ("['a' 'b']", ["a", "b"]),
    ("['a'\n 'b']", ["a", "b"]),
    ("('a', 'b')", ["a", "b"]),
    ("('a',)", ["a"]),
    ("['it\\'s', \"it's\"]", ["it's", "it's"]),
    ('["a", "b"]', ["a", "b"]),
    ('("Weird Al")', '("Weird Al")'),
    ("['a', 1]", "['a', 1]"),
    ("[1, 2]", "[1, 2]"),
    ("['a'", "['a'"),
    ("[f'a', 'b']", "[f'a', 'b']"),
    ("['a', __import__('os')]", "['a', __import__('os')]"),
    ("a, 'b'", "a, 'b'"),
  ],
)
def test_lists_that_are_text(text, value):
  assert listed(text) == value


def test_right_and_wrong_answers_are_shuffled_by_the_id(write):
  wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
  gpqa = {"Question": "Q?", "Correct Answer": "right\n", **wrong}
  rows = [{"Record ID": f"rec{n}", **gpqa} for n in range(40)]
  tasks = select_tasks(TasksConfig(write("gpqa.jsonl", rows)))
  assert {task.answers[0] for task in tasks} == set("ABCD")
  for task in tasks:
    assert f"\n{task.answers[0]}. right\n" in task.question
    assert task.answers[1] == "right" and "wrong 3" in task.question
  # Row order and file name do not change the shuffle.
  again = select_tasks(TasksConfig(write("other.jsonl", rows[::-1])))[::-1]
  assert [task.question for task in again] == [task.question for task in tasks]


def test_a_column_that_looks_like_a_field_is_named_once(write, caplog):
  plain = {"question": "q", "answer": "a"}
  rows = [
    {**plain, "famly": "f", "kidn": "math", "soruce": "s"},
    {**plain, "famly": "g", "level": 1},
    # No warning for a filled field, nor for names unlike any field's.
    {**plain, "source": "s", "kind": "qa", "family": "f", "sources": ["u"]},
    {**plain, "idx": 3, "topic": "Art", "metadata": {}, "answer_type": "x"},
  ]
  path = write("t.jsonl", rows)
  tasks = select_tasks(TasksConfig(path))
  assert tasks[0].meta == {"famly": "f", "kidn": "math", "soruce": "s"}
  said = [record.getMessage() for record in caplog.records]
  assert len(said) == 3
  fields = {"family": "famly", "kind": "kidn", "source": "soruce"}
  for field, column in fields.items():
    cure = f"--config.tasks.fields.{field}={column}"
    assert any("t.jsonl:1: " in line and cure in line for line in said)
  # With the suggested fields it is read without a warning.
  caplog.clear()
  task = select_tasks(TasksConfig(path, fields=fields))[0]
  assert (task.family, task.kind, task.source) == ("f", Kind.MATH, "s")
  assert not caplog.records


@pytest.mark.parametrize(
  ("answers", "refused"),
  [
    (["\\frac{1}{2}", "3", "$x^2$"], True),
    (["1/2", "3.0", "-1,234", "(1, 2)"], True),
    (["073", "204", "25"], True),
    (["1934", "5", "0"], False),
    (["Paris", "1934", "May 18, 2018"], False),
    (["Ann Lee", "35", "AC/DC"], False),
  ],
)
def test_mathematics_is_never_silently_judged_as_text(write, answers, refused):
  path = write("t.jsonl", [{"question": "q", "answer": answer} for answer in answers])
  if refused:
    with pytest.raises(ValueError, match=r"look like mathematics.*tasks.kind='math'"):
      select_tasks(TasksConfig(path))
  else:
    assert {t.kind for t in select_tasks(TasksConfig(path))} == {Kind.QA}
  for kind in Kind.QA, Kind.MATH:
    assert {t.kind for t in select_tasks(TasksConfig(path, kind=kind))} == {kind}


def test_a_small_set_of_mathematics_is_seen_beside_a_large_one(write):
  words = [{"question": f"q{n}", "answer": "Ann Lee"} for n in range(9)]
  few = write("aime.jsonl", [{"question": "q", "answer": r"\pi"}])
  with pytest.raises(ValueError, match="1 of 1 answers of aime"):
    select_tasks(TasksConfig(f"{write('nq.jsonl', words)},{few}"))


def test_the_schema_found_is_reported_in_one_line():
  tasks = [Task(str(n), "q", ("1",), Kind.MATH, "gsm8k") for n in range(1319)]
  tasks.append(Task("x", "q", ("a",)))
  assert describe_tasks(tasks) == "1,319 tasks of gsm8k: math; 1 task: qa"
  years = [Task(str(n), "q", (str(n),), source="years") for n in range(2)]
  assert describe_tasks(years) == (
    "2 tasks of years: qa (numbers, equal as text; tasks.kind='math': in value)"
  )
