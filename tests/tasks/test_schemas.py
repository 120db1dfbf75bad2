"""Rows as data sets of the hub have them, the config's mapping, and kinds unsaid."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import zlib

import pytest

from coa_jax.data.tasks.sources import (
  TasksConfig,
  describe_tasks,
  load_tasks,
  select_tasks,
)
from coa_jax.data.tasks.task import Kind, Task
from coa_jax.rewards.code.tests import read_tests


def write(path, rows) -> str:
  path.write_text("".join(json.dumps(r) + "\n" for r in rows))
  return str(path)


def verl(truth, prompt="What is 1/2 + 1/2?", source="demo", **more):
  return {
    "data_source": source,
    "prompt": [{"role": "user", "content": prompt}],
    "reward_model": {"ground_truth": truth, "style": "rule"},
    "extra_info": {"index": "7"},
    **more,
  }


DAPO = (
  "Solve the following math problem step by step. The last line of your response "
  "should be of the form Answer: $Answer (without quotes) where $Answer is the answer "
  "to the problem.\n\nWhat is\n\n1 + 1?\n\nRemember to put your answer on its own line "
  'after "Answer:".'
)
LINES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
CALLS = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(LINES)))).decode()
LCB = {
  "question_content": "Add one.",
  "question_id": "1873_A",
  "difficulty": "easy",
  "starter_code": "",
  "public_test_cases": json.dumps(LINES),
  "private_test_cases": PACKED,
  "metadata": "{}",
}
APPS = {
  "problem_id": 3,
  "question": "Add one.",
  "solutions": "[]",
  "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}),
  "difficulty": "interview",
  "starter_code": "",
}
WIKI = {
  "_id": "x1",
  "type": "comparison",
  "question": "Who?",
  "context": [["A", ["a"]]],
  "supporting_facts": [["A", 0]],
  "evidences": [["A", "is", "B"]],
  "answer": "Ann",
}
TRIVIA = {
  "question": "Who?",
  "question_id": "tc_1",
  "question_source": "http://a.org",
  "search_results": {"rank": [1]},
  "answer": {"value": "Ann", "aliases": ["Ann", "Anna"]},
}
GAIA = {
  "task_id": "c1",
  "question": "Who?",
  "Level": 2,
  "answer": "Ann",
  "Annotator_Metadata": {"Steps": "1"},
}
HLE = {
  "id": "h1",
  "question": "Who?",
  "answer": "Ann",
  "answer_type": "exactMatch",
  "category": "Math",
  "canary": "x",
}
MATH = {"problem": "1/2?", "answer": "\\frac{1}{2}", "level": 3, "unique_id": "a/1"}


@pytest.mark.parametrize(
  ("row", "expected"),
  [
    (GAIA, ("c1", "Who?", ("Ann",), "qa", "set", "2")),
    (HLE, ("h1", "Who?", ("Ann",), "qa", "set", "Math")),
    (
      {"question": "Who?", "answer": "Ann", "topic": "Art"},
      ("set-0", "Who?", ("Ann",), "qa", "set", "Art"),
    ),
    (
      {"id": "q", "question": "Who?", "golden_answers": ["A", "B"], "metadata": {}},
      ("q", "Who?", ("A", "B"), "qa", "set", ""),
    ),
    (
      {"Question": "Who?", "Answer": "Ann"},
      ("set-0", "Who?", ("Ann",), "qa", "set", ""),
    ),
    (
      {
        "id": 4,
        "question": "Who?",
        "possible_answers": '["A", "B"]',
        "prop": "job",
        "subj": "x",
      },
      ("4", "Who?", ("A", "B"), "qa", "popqa", "job"),
    ),
    (TRIVIA, ("tc_1", "Who?", ("Ann", "Anna"), "qa", "triviaqa", "")),
    (WIKI, ("x1", "Who?", ("Ann",), "qa", "2wikimultihopqa", "comparison")),
    (MATH, ("a/1", "1/2?", ("\\frac{1}{2}",), "math", "set", "3")),
    (
      {"ID": "2024-I-1", "Problem": "1?", "Solution": "s", "Answer": 33},
      ("2024-I-1", "1?", ("33",), "math", "set", ""),
    ),
    (
      {"id": "g1", "question": "1+3?", "answer": "It is 4.\n#### 4"},
      ("g1", "1+3?", ("4",), "math", "gsm8k", ""),
    ),
    (
      verl("2", DAPO, "math_dapo"),
      ("math_dapo-7", "What is\n\n1 + 1?", ("2",), "math", "math_dapo", ""),
    ),
    (
      verl('["2"]', "1 + 1?", "train-math-numina"),
      ("train-math-numina-7", "1 + 1?", ("2",), "math", "train-math-numina", ""),
    ),
    (
      verl(
        {"target": ["A"]},
        "Answer. Question: Who?\n",
        "nq",
        question="Who?",
        golden_answers=["A"],
      ),
      ("nq-7", "Who?", ("A",), "qa", "nq", ""),
    ),
    (
      LCB,
      (
        "1873_A",
        "Add one.",
        ("a program that passes 2 tests",),
        "code",
        "livecodebench",
        "easy",
      ),
    ),
    (
      APPS,
      (
        "apps-3",
        "Add one.",
        ("a program that passes 1 tests",),
        "code",
        "apps",
        "interview",
      ),
    ),
  ],
)
def test_rows_of_the_hub(tmp_path, row, expected):
  (task,) = select_tasks(TasksConfig(write(tmp_path / "set.jsonl", [row])))
  found = (task.id, task.question, task.answers, task.kind, task.source, task.family)
  assert found == expected
  if task.kind == Kind.CODE:
    assert read_tests(task).inputs[0] == "1\n"


@pytest.mark.parametrize("of_apps", [True, False])
def test_a_list_of_one_is_the_value_in_apps_alone(tmp_path, of_apps):
  tests = {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}
  row = {**APPS, "input_output": json.dumps(tests)}
  if not of_apps:  # as TACO
    del row["problem_id"]
  (task,) = select_tasks(TasksConfig(write(tmp_path / "set.jsonl", [row])))
  assert read_tests(task).wrapped == of_apps


def test_extras_go_into_meta_and_our_own_rows_stay_as_they_were(tmp_path):
  own = {"question": "q", "answers": ["a"], "meta": {"n": 1}}
  extra = {**own, "rating": 4, "note": None}
  tasks = load_tasks(write(tmp_path / "t.jsonl", [own, extra]))
  assert tasks == [
    Task("t-0", "q", ("a",), source="t", meta={"n": 1}),
    Task("t-1", "q", ("a",), source="t", meta={"rating": 4, "n": 1}),
  ]


def test_functions_of_livecodebench_and_a_pickle_that_does_more(tmp_path):
  row = {**LCB, "public_test_cases": CALLS, "private_test_cases": None}
  row["metadata"] = '{"func_name": "add"}'
  (task,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
  tests = read_tests(task)
  assert (tests.function, tests.inputs, tests.expected) == ("add", ([1, 2],), (3,))

  class Hostile:
    def __reduce__(self):
      return print, ("run",)

  packed = base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()
  for bad, message in ((packed, "never run"), ("x!", "no list of tests")):
    with pytest.raises(ValueError, match=rf"row|:1.*private_test_cases.*{message}"):
      load_tasks(write(tmp_path / "t.jsonl", [{**LCB, "private_test_cases": bad}]))


def test_copies_of_a_row_of_an_rl_set_count_once(tmp_path):
  path = write(tmp_path / "t.jsonl", [verl("1"), verl("1")])
  assert len(load_tasks(path)) == 1
  with pytest.raises(ValueError, match="id 'demo-7' is already"):
    load_tasks(write(tmp_path / "t.jsonl", [verl("1"), verl("2")]))


def test_fields_kind_and_source_of_the_config(tmp_path):
  row = {"query": "q?", "gold": {"all": ["1", "2"]}, "hard": "yes"}
  path = write(tmp_path / "t.jsonl", [row, {"question": "own", "answers": ["3"]}])
  fields = {"question": "query", "answers": "gold.all", "family": "hard"}
  config = TasksConfig(path, fields=fields, kind="math", source="mine")
  mapped, own = select_tasks(config)
  assert (mapped.question, mapped.answers) == ("q?", ("1", "2"))
  assert (mapped.kind, mapped.source, mapped.family) == (Kind.MATH, "mine", "yes")
  assert (own.question, own.kind, own.source) == ("own", Kind.MATH, "mine")
  # A family alone leaves the data set's reader in place; a row that says its kind wins.
  path = write(tmp_path / "w.jsonl", [WIKI])
  (task,) = select_tasks(TasksConfig(path, fields={"family": "_id"}, kind="math"))
  assert (task.source, task.family, task.kind) == ("2wikimultihopqa", "x1", Kind.QA)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"qestion": "q"},
      "fields: a task has no field 'qestion'.*did you mean 'question'",
    ),
    (
      {"question": "qery", "answers": "glod"},
      r"t.jsonl:1: .*question='qery'; did you mean 'query'.*answers='glod'",
    ),
  ],
)
def test_a_wrong_mapping_is_named(tmp_path, fields, message):
  path = write(tmp_path / "t.jsonl", [{"query": "q", "gold": "a"}])
  with pytest.raises(ValueError, match=message):
    select_tasks(TasksConfig(path, fields=fields))


def test_a_column_that_looks_like_a_field_is_named_once(tmp_path, caplog):
  plain = {"question": "q", "answer": "a"}
  rows = [
    {**plain, "famly": "f", "kidn": "math", "soruce": "s"},
    {**plain, "famly": "g", "level": 1},
    # Nothing is missed where the field is filled, and these are no field's name.
    {**plain, "source": "s", "kind": "qa", "family": "f", "sources": ["u"]},
    {**plain, "idx": 3, "topic": "Art", "metadata": {}, "answer_type": "x"},
  ]
  path = write(tmp_path / "t.jsonl", rows)
  tasks = select_tasks(TasksConfig(path))
  assert tasks[0].meta == {"famly": "f", "kidn": "math", "soruce": "s"}
  said = [record.getMessage() for record in caplog.records]
  assert len(said) == 3
  for column, field in (("famly", "family"), ("kidn", "kind"), ("soruce", "source")):
    cure = f"tasks.fields=dict({field}='{column}')"
    assert any("t.jsonl:1: " in line and cure in line for line in said)
  # With that cure it is read, and nothing is said.
  caplog.clear()
  fields = {"family": "famly", "kind": "kidn", "source": "soruce"}
  task = select_tasks(TasksConfig(path, fields=fields))[0]
  assert (task.family, task.kind, task.source) == ("f", Kind.MATH, "s")
  assert not caplog.records


def encrypted(text: str, canary: str) -> bytes:
  """As BrowseComp's authors describe it."""
  secret = text.encode()
  key = hashlib.sha256(canary.encode()).digest()
  key *= len(secret) // len(key) + 1
  return base64.b64encode(bytes(a ^ b for a, b in zip(secret, key, strict=False)))


@pytest.mark.parametrize("question", ["Who?", "Wh\u00f6 was it, then? " * 20])
def test_browsecomp_is_decrypted(tmp_path, question):
  canary = "BENCHMARK DATA: browsecomp-guid"
  row = {"canary": canary, "problem_topic": "Art"}
  for field, text in (("problem", question), ("answer", "1988")):
    row[field] = encrypted(text, canary).decode()
  clear = {**row, "problem": question.strip() + " (in clear)", "answer": "1988"}
  tasks = select_tasks(TasksConfig(write(tmp_path / "test.jsonl", [row, clear])))
  assert [t.question for t in tasks] == [question, clear["problem"]]
  for task in tasks:
    assert (task.answers, task.source, task.family) == (("1988",), "browsecomp", "Art")
    assert task.kind == Kind.QA
  # The worked example: "a" ^ 0xba, the first byte of SHA-256 of "abc".
  row = {"problem": "2w==", "answer": "2w==", "canary": "abc"}
  (task,) = load_tasks(write(tmp_path / "t.jsonl", [row]))
  assert (task.question, task.answers) == ("a", ("a",))


@pytest.mark.parametrize(
  ("wrong", "field"),
  [
    ({"canary": "another"}, "problem"),
    ({"answer": "in clear"}, "answer"),
    ({"canary": 7}, "problem"),
  ],
)
def test_browsecomp_that_its_canary_does_not_open_is_refused(tmp_path, wrong, field):
  row = {"canary": "c", "answer": encrypted("a", "c").decode()}
  row["problem"] = encrypted("Who was it?" * 9, "c").decode()
  path = write(tmp_path / "t.jsonl", [{**row, **wrong}])
  message = rf"t.jsonl:1: field '{field}' is encrypted and not opened by its 'canary'"
  with pytest.raises(ValueError, match=message):
    load_tasks(path)


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
def test_mathematics_is_never_silently_judged_as_text(tmp_path, answers, refused):
  rows = [{"question": "q", "answer": answer} for answer in answers]
  path = write(tmp_path / "t.jsonl", rows)
  if refused:
    with pytest.raises(ValueError, match=r"look like mathematics.*tasks.kind='math'"):
      select_tasks(TasksConfig(path))
  else:
    assert {t.kind for t in select_tasks(TasksConfig(path))} == {Kind.QA}
  for kind in Kind.QA, Kind.MATH:
    assert {t.kind for t in select_tasks(TasksConfig(path, kind=kind))} == {kind}


def test_what_was_found_is_said_in_a_line():
  tasks = [Task(str(n), "q", ("1",), Kind.MATH, "gsm8k") for n in range(1319)]
  tasks.append(Task("x", "q", ("a",)))
  assert describe_tasks(tasks) == "1,319 tasks of gsm8k: math; 1 task: qa"
  years = [Task(str(n), "q", (str(n),), source="years") for n in range(2)]
  assert describe_tasks(years) == (
    "2 tasks of years: qa (numbers, equal as text; tasks.kind='math': in value)"
  )


def test_several_files_at_once_and_tables(tmp_path):
  (tmp_path / "a").mkdir()
  one = write(tmp_path / "a" / "x.jsonl", [{"question": "q0", "answer": "a"}])
  (tmp_path / "b").mkdir()
  table = tmp_path / "b" / "x.csv"
  table.write_text('question,answers,level\n"q1, or?","[""a"", ""b""]",1\nq2,c,\n')
  both = f"{one},{table}"
  tasks = load_tasks(both)
  assert [(t.id, t.question, t.answers) for t in tasks] == [
    ("x-0", "q0", ("a",)),
    ("x-1", "q1, or?", ("a", "b")),
    ("x-2", "q2", ("c",)),
  ]
  assert tasks[1].family == "1"
  assert load_tasks(f"{tmp_path}/*/x.*") == tasks
  assert load_tasks(tmp_path / "a") == tasks[:1]
  (tmp_path / "t.tsv").write_text("Question\tAnswer\nq\ta\n")
  assert load_tasks(tmp_path / "t.tsv")[0].question == "q"


@pytest.mark.parametrize(
  ("uri", "error", "message"),
  [
    ("gs://b/x.jsonl", ValueError, "is no path; a config's are fetched"),
    ("{}/*.jsonl", FileNotFoundError, "no task file matches"),
    ("{}", FileNotFoundError, "no task file in the folder"),
    ("{}/a.jsonl,", ValueError, "a name in the list is empty"),
    ("{}/a.jsonl,{}/b.jsonl", FileNotFoundError, "no task file at .*a.jsonl"),
    ("{}/sub/a.csv", ValueError, "a.csv row 0: has not the 2 columns"),
  ],
)
def test_what_names_no_file_is_refused(tmp_path, uri, error, message):
  (tmp_path / "sub").mkdir()
  (tmp_path / "sub" / "a.csv").write_text("question,answer\na,b,c\n")
  with pytest.raises(error, match=message):
    load_tasks(uri.format(tmp_path, tmp_path))
