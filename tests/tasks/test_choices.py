"""Multiple choice: the options are in the question, the right one is the answer."""

from __future__ import annotations

import json

import pytest

from coa_jax.data.tasks.sources import TasksConfig, load_tasks, select_tasks
from coa_jax.data.tasks.task import Kind
from coa_jax.rewards.qa import exact_match

LIST = {"question": "2 + 2?", "choices": ["3", "four", "5"], "answer": 1}
ROWS = {
  "MMLU": LIST,
  "MMLU-Pro": {
    "question_id": 70,
    "question": "2 + 2?",
    "options": ["3", "four", "A"],
    "answer": "B",
    "answer_index": 1,
    "category": "math",
  },
  "ARC": {
    "id": "M1",
    "question": "2 + 2?",
    "choices": {"text": ["3", "four", "5"], "label": ["1", "2", "3"]},
    "answerKey": "2",
  },
  "OpenBookQA": {
    "question_stem": "2 + 2?",
    "choices": {"text": ["3", "four", "5"], "label": ["A", "B", "C"]},
    "answerKey": "B",
  },
  "MedQA": {
    "question": "2 + 2?",
    "options": {"A": "3", "B": "four", "C": None},
    "answer": "Four",
    "answer_idx": "B",
  },
  "MedMCQA": {"question": "2 + 2?", "opa": "3", "opb": "four", "opc": "5", "cop": 1},
  "C-Eval": {"question": "2 + 2?", "A": "3", "B": "four", "C": "5", "answer": "B"},
  "AQuA": {"question": "2 + 2?", "options": ["A)3", "B)four"], "correct": "B"},
  "labelled": {
    "question": "2 + 2?",
    "options": [{"key": "A", "value": "3"}, {"key": "B", "value": "four"}],
    "answer": "B. four",
  },
}


def write(path, rows) -> str:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


@pytest.mark.parametrize("name", ROWS)
def test_options_are_asked_and_the_letter_is_gold(tmp_path, name):
  (task,) = select_tasks(TasksConfig(write(tmp_path / "t.jsonl", [ROWS[name]])))
  assert task.question.startswith("2 + 2?\n\nA. 3\nB. four\n")
  assert "letter" in task.question.splitlines()[-1]
  assert (task.answers, task.kind) == (("B", "four"), Kind.QA)


def gpqa(name: str) -> dict:
  wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
  return {"Record ID": name, "Question": "Q?", "Correct Answer": "right\n", **wrong}


def test_right_and_wrong_answers_are_shuffled_by_the_id(tmp_path):
  rows = [gpqa(f"rec{n}") for n in range(40)]
  tasks = load_tasks(write(tmp_path / "gpqa.jsonl", rows))
  letters = [task.answers[0] for task in tasks]
  assert set(letters) == set("ABCD")
  for task in tasks:
    assert f"\n{task.answers[0]}. right\n" in task.question
    assert task.answers[1] == "right" and "wrong 3" in task.question
  # Neither the place in a file nor its name moves them.
  again = load_tasks(write(tmp_path / "other.jsonl", rows[::-1]))[::-1]
  assert [task.question for task in again] == [task.question for task in tasks]
  sciq = {"question": "Q?", "correct_answer": "x", "distractor1": "y", "support": ""}
  opentdb = {"question": "Q?", "correct_answer": "x", "incorrect_answers": ["y", "z"]}
  for row in sciq, opentdb:
    (task,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
    assert task.answers[1:] == ("x",) or task.answers[0] == "x"
    assert f"{task.answers[0]}. x" in task.question and ". y" in task.question


def test_no_wrong_option_is_right(tmp_path):
  """The text of the right option may be the letter of another."""
  row = {"question": "Which?", "options": ["B", "C", "D"], "answer_index": 0}
  (task,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
  assert task.answers == ("A",)
  assert exact_match("(A)", task.answers) and not exact_match("B", task.answers)


def test_columns_named_by_the_config_a_passage_and_options_that_are_shown(tmp_path):
  row = {"ask": "Who?", "options": ["Al", "Bo"], "gold": "B", "article": "Bo did."}
  fields = {"question": "ask", "answers": "gold"}
  path = write(tmp_path / "t.jsonl", [row])
  (task,) = select_tasks(TasksConfig(path, fields=fields))
  assert task.question.startswith("Bo did.\n\nWho?\n\nA. Al\nB. Bo\n")
  assert task.answers == ("B", "Bo")
  shown = {"question": "Who?\n(A) Al\n(B) Bo", "options": ["Al", "Bo"], "answer": "B"}
  (task,) = load_tasks(write(tmp_path / "t.jsonl", [shown]))
  assert task.question.count("Bo") == 1
  # A table holds the list as text, and Python's and numpy's are lists, too.
  for cell in '["Al", "Bo"]', "['Al', 'Bo']", "['Al' 'Bo']":
    text = cell.replace('"', '""')
    (tmp_path / "t.csv").write_text(f'question,choices,answer\nWho?,"{text}",1\n')
    (task,) = load_tasks(tmp_path / "t.csv")
    assert task.answers == ("B", "Bo")
  for none in [], None, "", {"text": [], "label": []}, {"A": None, "B": None}:
    row = {"question": "Who?", "options": none, "answer": "Bo"}
    (task,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
    assert (task.question, task.answers) == ("Who?", ("Bo",))


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"answer": "six"}, "none of the 3 options fit answer='six'; accepted: a letter"),
    ({"answer": -1}, "none of the 3 options fit answer=-1"),
    ({"answer": 7}, "none of the 3 options fit answer=7"),
    ({"answer": ["A", "B"]}, r"none of the 3 options fit answer=\['A', 'B'\]"),
    ({"answer": None}, "none of the 3 options fit no answer"),
    ({"answer": "A", "answer_index": 2}, "none of the 3 options fit"),
    ({"choices": ["1", "2", "3"], "answer": "2"}, "several of the 3 options fit"),
    ({"choices": [1, 2, 3], "answer": 2}, "several of the 3 options fit"),
    ({"choices": ["x", "x"], "answer": "x"}, "several of the 2 options fit"),
    ({"choices": "x or y"}, "field 'choices' is 'x or y'; accepted: a list of texts"),
    ({"choices": [["x"], ["y"]]}, "field 'choices' is .*accepted: a list of texts"),
    ({"choices": ["x"], "answer": 0}, "1 options; accepted: from 2 to 26"),
  ],
)
def test_options_without_one_answer_are_refused(tmp_path, wrong, message):
  path = write(tmp_path / "t.jsonl", [{**LIST, **wrong}])
  with pytest.raises(ValueError, match=rf"t.jsonl:1: {message}"):
    load_tasks(path)
