"""Every accepted schema, and what the errors for the rest say."""

from __future__ import annotations

import json
import pathlib

import pytest

from coa_jax.data.tasks import sources
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rewards.code.tests import read_tests
from coa_jax.rewards.grader import Grader
from tools_sandbox.jail import keeper as jail

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


def released(truth, question="How many?", **extra):
  """A row as the released RL parquet files have it."""
  return {
    "data_source": "demo",
    "prompt": [{"role": "user", "content": "Rules.\n\nTask:\n" + question}],
    "reward_model": {"ground_truth": truth, "style": "rule"},
    "extra_info": {"index": "7", **extra},
  }


def write(path: pathlib.Path, rows: list) -> str:
  """Rows as a file of the kind that the path's suffix names."""
  if path.suffix == ".json":
    path.write_text(json.dumps(rows, indent=1))
  else:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return str(path)


def test_our_own_schema(tmp_path):
  rows = [
    {"question": "q0", "answers": ["a", "b"], "kind": "math", "family": "f"},
    {"question": "q1", "answers": ["c"], "kind": "qa", "family": ""},
  ]
  tasks = sources.load_tasks(write(tmp_path / "mine.jsonl", rows))
  assert tasks == [
    Task("mine-0", "q0", ("a", "b"), Kind.MATH, "mine", "f"),
    Task("mine-1", "q1", ("c",), source="mine"),
  ]


def test_raw_released_rows_and_gsm8k(tmp_path):
  rows = [
    {"question": "q", "answer": ["x", "y"], "data_source": "nq", "file_name": ""},
    {"question": "q", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,234"},
    {"question": "q", "answer": "#### is how a heading starts"},
  ]
  raw, gsm8k, plain = sources.load_tasks(write(tmp_path / "t.jsonl", rows))
  assert (raw.source, raw.answers) == ("nq", ("x", "y"))
  assert raw.meta == {"file_name": ""}
  assert (gsm8k.kind, gsm8k.answers, gsm8k.source) == (Kind.MATH, ("1234",), "gsm8k")
  assert (gsm8k.question, gsm8k.meta["solution"]) == ("q", rows[1]["answer"])
  assert (plain.kind, plain.source) == (Kind.QA, "t")


@pytest.mark.parametrize(
  ("truth", "kind", "answers"),
  [
    ("204", Kind.MATH, ("204",)),
    ("27.0", Kind.MATH, ("27.0",)),
    ("[0,1]", Kind.MATH, ("[0,1]",)),
    ('["1", "2"]', Kind.MATH, ("1", "2")),
    ("\\frac{1}{2}", Kind.MATH, ("\\frac{1}{2}",)),
    ('{"target": ["Paris"], "question": "q"}', Kind.QA, ("Paris",)),
    ({"target": ["Paris"], "question": "q"}, Kind.QA, ("Paris",)),
    (
      '{"stdin": ["1", "2"], "expected_output": ["1", "2"], "question_id": "x"}',
      Kind.CODE,
      ("a program that passes 2 tests",),
    ),
    (
      {"import_prefix": "", "test_code": "assert f() == 1", "entry_point": "f"},
      Kind.CODE,
      ("a program that passes 1 tests",),
    ),
  ],
)
def test_the_ground_truth_decides_the_kind(tmp_path, truth, kind, answers):
  path = write(tmp_path / "t.jsonl", [released(truth, starter_code="def f():")])
  (task,) = sources.load_tasks(path)
  assert (task.id, task.source, task.question) == ("demo-7", "demo", "How many?")
  assert (task.kind, task.answers) == (kind, answers)
  assert ("tests" in task.meta) == (kind == Kind.CODE)


def test_the_question_is_taken_from_extra_info_or_below_the_head(tmp_path):
  rows = [released("1", question="q\n\nTask: is a word here", index="0")]
  rows.append(released("1", question="", index="1"))
  rows[1]["extra_info"]["question"] = "from extra"
  below, extra = sources.load_tasks(write(tmp_path / "t.jsonl", rows))
  assert below.question == "q\n\nTask: is a word here"
  assert extra.question == "from extra"


HUMANEVAL = {
  "task_id": "HumanEval/9",
  "prompt": "import math\n\ndef helper(x):\n  return x\n\ndef twice(x):\n"
  '  """ Twice x. """\n',
  "entry_point": "twice",
  "canonical_solution": "  return 2 * x\n",
  "test": "def check(candidate):\n  assert candidate(math.floor(helper(2.5))) == 4\n",
}
MBPP = {
  "task_id": 7,
  "text": "Write a function to double a number.",
  "code": "def twice(x):\n  return 2 * x",
  "test_list": ["assert twice(1) == 2", "assert twice(two) == 4"],
  "test_setup_code": "two = 2",
  "challenge_test_list": [],
}
SANITIZED = {
  "source_file": "x.ipynb",
  "task_id": 7,
  "prompt": "Write a function to double a number.",
  "code": MBPP["code"],
  "test_imports": ["import math"],
  "test_list": ["assert math.floor(twice(1.5)) == 3"],
}
PLUS = {**SANITIZED, "test": "for x in range(50):\n  assert twice(x) == 2 * x\n"}
CODE = [
  (HUMANEVAL, "HumanEval/9", "humaneval", "def twice(x):\n  return 2 * x"),
  (MBPP, "Mbpp/7", "mbpp", MBPP["code"]),
  (SANITIZED, "Mbpp/7", "mbpp", MBPP["code"]),
  (PLUS, "Mbpp/7", "mbppplus", MBPP["code"]),
]


@pytest.mark.parametrize(("row", "name", "source", "solution"), CODE)
def test_programs_by_asserts(tmp_path, row, name, source, solution):
  (task,) = sources.load_tasks(write(tmp_path / "t.jsonl", [row]))
  assert (task.id, task.kind, task.source) == (name, Kind.CODE, source)
  question = task.question
  words = "Twice x" if source == "humaneval" else "double a number"
  assert words in question
  assert row.get("canonical_solution", row.get("code")) not in question
  shown = [a for a in row.get("test_list", ()) if a in question]
  assert shown == row.get("test_list", [])[:1]
  assert read_tests(task)
  if jail.check():
    pytest.skip("; ".join(jail.check()))
  with Grader() as grader:
    for program, reward in ((solution, 1.0), ("def twice(x):\n  return x", 0.0)):
      graded = grader.answer(task, program, Trajectory(task.id))
      assert graded.answer == reward, graded


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({**HUMANEVAL, "entry_point": "thrice"}, r"row 0: .*defines no function 'thrice'"),
    ({**HUMANEVAL, "test": ""}, r"row 0: field 'test' must be a non-empty string"),
    ({**MBPP, "test_list": "assert"}, r"row 0: field 'test_list' must be a list"),
    ({**MBPP, "test_list": []}, r"row 0: there is no test"),
    ({k: v for k, v in MBPP.items() if k != "text"}, r"row 0: field 'text' must be"),
    ({"title": "t", "text": "x"}, r"t.json row 0: no field 'question' .*'title'"),
    ({"question": "q"}, r"row 0: no field 'answers'; the row has 'question'"),
    ({"question": "q", "anwser": "a"}, r"no field 'answers'; .*did you mean 'anwser'"),
    ({"question": "q", "answers": []}, r"row 0: field 'answers' must be"),
    ({"question": "q", "answer": "a", "kind": "z"}, r"row 0: .*accepted: qa, math"),
    (released({"foo": 1}), r"ground_truth' has 'foo'; accepted: .*stdin"),
    (released(None), r"ground_truth' is missing"),
    (
      {**released("1"), "prompt": [{"role": "system", "content": "how?"}]},
      r"row 0: no question; accepted: 'extra_info.question'",
    ),
    ({**released("1"), "prompt": 5}, r"row 0: field 'prompt\[0\]' is .*accepted: a"),
    ("text", r"row 0: expected a JSON object, got str"),
    ({"question": "q", "answer": "a", "family": 3}, r"row 0: field 'family' must "),
    ({"question": "q", "answers": [None]}, r"row 0: field 'answers' must "),
  ],
)
def test_an_error_names_the_row_and_what_would_be_accepted(tmp_path, row, message):
  path = write(tmp_path / "t.json", [row])
  with pytest.raises(ValueError, match=message):
    sources.load_tasks(path)


def test_a_file_without_tasks_or_with_one_twice_is_refused(tmp_path):
  with pytest.raises(ValueError, match="holds no task"):
    sources.load_tasks(write(tmp_path / "t.jsonl", []))
  twice = [{"id": "x", "question": "q", "answer": "a"}] * 2
  with pytest.raises(ValueError, match=r"row 1: id 'x' is already the id of .*row 0"):
    sources.load_tasks(write(tmp_path / "t.json", twice))


def test_what_a_table_leaves_empty_counts_as_left_out(tmp_path):
  row = {"question": "q", "answer": 1934.0, "source": None, "family": None}
  (task,) = sources.load_tasks(write(tmp_path / "t.jsonl", [{**row, "meta": None}]))
  assert task == Task("t-0", "q", ("1934",), source="t")


HOTPOTQA = {
  "id": "5a7a",
  "question": "Who?",
  "answer": "Ann",
  "type": "bridge",
  "level": "hard",
  "supporting_facts": {"title": ["A", "B", "A"], "sent_id": [0, 1, 2]},
  "context": {"title": ["A"], "sentences": [["a"]]},
}
MUSIQUE = {
  "id": "2hop__1",
  "question": "Who?",
  "answer": "Ann",
  "answer_aliases": ["Anna"],
  "question_decomposition": [{}, {}],
  "paragraphs": [
    {"title": "A", "is_supporting": True},
    {"title": "B", "is_supporting": True},
    {"title": "C", "is_supporting": False},
  ],
}
WEBWALKER = {
  "question": "Who?",
  "answer": "Ann",
  "root_url": "http://a.org",
  "info": {"type": "multi_source", "supporting_titles": ["A", "B"]},
}


@pytest.mark.parametrize(
  ("row", "source", "family", "answers"),
  [
    (HOTPOTQA, "hotpotqa", "bridge", ("Ann",)),
    (
      {**HOTPOTQA, "supporting_facts": [["A", 0], ["B", 1]]},
      "hotpotqa",
      "bridge",
      ("Ann",),
    ),
    (MUSIQUE, "musique", "2_hop", ("Ann", "Anna")),
    (WEBWALKER, "webwalker", "multi_source", ("Ann",)),
  ],
)
def test_questions_of_public_data_sets(tmp_path, row, source, family, answers):
  (task,) = sources.load_tasks(write(tmp_path / "t.json", [row]))
  assert (task.source, task.family, task.answers) == (source, family, answers)
  assert task.id == row.get("id", "t-0") and task.kind == Kind.QA
  assert task.meta["supporting_titles"] == ["A", "B"]


@pytest.mark.parametrize(
  ("name", "count", "kind"),
  [
    ("gsm8k", 20, Kind.MATH),
    ("humaneval", 4, Kind.CODE),
    ("mbpp", 4, Kind.CODE),
    ("livecodebench", 4, Kind.CODE),
  ],
)
def test_files_of_public_data_sets(name, count, kind):
  tasks = sources.load_tasks(FIXTURES / f"{name}.jsonl")
  assert len(tasks) == count and {t.kind for t in tasks} == {kind}
