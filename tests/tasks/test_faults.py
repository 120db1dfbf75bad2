"""Rows that were read wrongly in silence: read rightly, or refused by name."""

from __future__ import annotations

import itertools
import logging

import pyarrow
import pyarrow.parquet
import pytest

from coa_jax.data.tasks import rows
from coa_jax.data.tasks.cells import listed
from coa_jax.data.tasks.sources import TasksConfig, load_tasks, select_tasks
from coa_jax.data.tasks.task import Kind
from tests.tasks.test_schemas import encrypted
from tests.tasks.test_verl import NAN, one, verl, write

# --- Gold answers.


@pytest.mark.parametrize(
  "answer",
  [
    NAN,
    float("inf"),
    -float("inf"),
    "",
    " ",
    "\u200b",
    "nan",
    "NaN",
    None,
    [],
    {},
    [None],
    ["a", NAN],
    ["a", ""],
    [["a"]],
    "[]",
    "['a', nan]",
    "['a'",
    "array(['a'], dtype=object)",
  ],
)
@pytest.mark.parametrize("name", ["answer", "answers", "golden_answers", "gold"])
def test_gold_that_nothing_matches_is_refused(tmp_path, answer, name):
  fields = {"answers": name} if name == "gold" else {}
  with pytest.raises(ValueError, match=r"set.jsonl:1: .*(answer|'gold')"):
    one(tmp_path, {"question": "q", name: answer}, fields=fields)


@pytest.mark.parametrize(
  ("answer", "text"),
  [
    (1934.0, "1934"),
    (0, "0"),
    (2.5, "2.5"),
    (1e22, "1e+22"),
    (True, "True"),
    ("Infinity", "Infinity"),
    ("Nan", "Nan"),
    ("[0, 1]", "[0, 1]"),
  ],
)
def test_gold_that_is_unusual_is_kept(tmp_path, answer, text):
  task = one(tmp_path, {"question": "q", "answer": answer}, kind="qa")
  assert task.answers == (text,)


def test_nan_in_a_column_of_floats_is_refused_by_its_row(tmp_path):
  path = tmp_path / "t.parquet"
  table = {"question": ["a", "b"], "answer": [1934.0, NAN]}
  pyarrow.parquet.write_table(pyarrow.table(table), path)
  with pytest.raises(
    ValueError, match=r"t.parquet row 1: no field 'answers'.*'answer'"
  ):
    load_tasks(path)
  table = {"question": ["a", "b"], "answer": [1934.0, 2.0], "id": [0.0, NAN]}
  pyarrow.parquet.write_table(pyarrow.table(table), path)
  assert [t.id for t in load_tasks(path)] == ["0.0", "t-1"]


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


# --- Kinds.


@pytest.mark.parametrize(
  "answer",
  [r"\frac{1}{2}", r"\frac{1}{2} cm", r"The set $\{1, 2\}$", "x^2 + 1", "x = 2"],
)
def test_latex_anywhere_in_an_answer_is_mathematics(tmp_path, answer):
  row = {"question": "q", "answer": answer}
  with pytest.raises(ValueError, match=r"answers of set .*look like mathematics"):
    one(tmp_path, row)
  for kind in Kind.QA, Kind.MATH:
    assert one(tmp_path, row, kind=kind).kind == kind


def test_a_small_set_of_mathematics_is_seen_beside_a_large_one(tmp_path):
  words = [{"question": f"q{n}", "answer": "Ann Lee"} for n in range(9)]
  many = write(tmp_path / "nq.jsonl", words)
  few = write(tmp_path / "aime.jsonl", [{"question": "q", "answer": r"\pi"}])
  with pytest.raises(ValueError, match="1 of 1 answers of aime"):
    select_tasks(TasksConfig(f"{many},{few}"))


def test_an_explicit_kind_wins_over_a_guess(tmp_path):
  simpleqa = {"problem": "Who?", "answer": "Ann Lee", "metadata": "{}"}
  text = {**verl(), "reward_model": {"ground_truth": "Ann Lee"}}
  for row in simpleqa, text:
    assert one(tmp_path, row, kind="qa").kind == Kind.QA
    with pytest.raises(ValueError, match=r"look like words.*tasks.kind='qa'"):
      one(tmp_path, row)
  assert one(tmp_path, {"problem": "1 + 1?", "answer": "2"}).kind == Kind.MATH
  assert one(tmp_path, {"problem": "1?", "answer": "2", "kind": "qa"}).kind == Kind.QA


# --- Pictures and files.


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("file_name", "a.xlsx"),
    ("image", "data:image/png;base64,AA"),
    ("images", [{"bytes": "x", "path": None}]),
    ("image_1", {"bytes": "x"}),
    ("video", "a.mp4"),
  ],
)
def test_rows_with_pictures_and_files_are_left_out_and_counted(
  tmp_path, caplog, name, value
):
  plain = {"question": "q", "answer": "a"}
  empty = [{**plain, name: none} for none in ("", None, [], {"bytes": None}, NAN)]
  path = write(tmp_path / "t.jsonl", [{**plain, name: value}, *empty])
  tasks = select_tasks(TasksConfig(path))
  assert [t.id for t in tasks] == [f"t-{n}" for n in range(1, 6)]
  assert f"rows left out: 1; column '{name}'" in caplog.text
  assert len(select_tasks(TasksConfig(path, attachments=True))) == 6
  path = write(tmp_path / "t.jsonl", [{**plain, name: value}])
  with pytest.raises(ValueError, match=r"holds no task but .*tasks.attachments"):
    select_tasks(TasksConfig(path))
  assert len(load_tasks(path)) == 1  # what is held out of training is all of a file


# --- Ciphertext.


@pytest.mark.parametrize("fields", [{}, {"question": "query", "answers": "answer"}])
def test_ciphertext_is_opened_by_the_canary(tmp_path, fields):
  row = {"query_id": "5", "canary": "a canary"}
  row["query"] = encrypted("Who was it, then?", "a canary").decode()
  row["answer"] = encrypted("Ann", "a canary").decode()
  task = one(tmp_path, row, fields=fields)
  assert (task.question, task.answers) == ("Who was it, then?", ("Ann",))
  # Lists of answers, and what no canary opens.
  listed_row = {**row, "answer": [row["answer"]]}
  assert one(tmp_path, listed_row, fields=fields).answers == ("Ann",)
  with pytest.raises(ValueError, match=r"set.jsonl:1: field 'query' is encrypted"):
    one(tmp_path, {**row, "canary": "another"}, fields=fields)
  del row["canary"]
  row["query"] = encrypted("Who was it, then? " * 3, "a canary").decode()
  with pytest.raises(ValueError, match=r"the question is encrypted.*'canary'"):
    one(tmp_path, row, fields=fields)


def test_xbench_is_opened_by_the_canary_itself(tmp_path):
  import base64

  def hide(text: str) -> str:
    pairs = zip(text.encode(), itertools.cycle(b"canary-1"), strict=False)
    return base64.b64encode(bytes(a ^ b for a, b in pairs)).decode()

  row = {"id": "1", "prompt": hide("Wer war es? \u8c01\u662f"), "answer": hide("1988")}
  task = one(tmp_path, {**row, "canary": "canary-1"})
  assert (task.question, task.answers) == ("Wer war es? \u8c01\u662f", ("1988",))
  for canary in "zzz", "another", "":
    with pytest.raises(ValueError, match="field 'prompt' is encrypted"):
      one(tmp_path, {**row, "canary": canary})


# --- Sources and ids.


def test_every_task_has_a_source_and_ids_are_told_apart_by_it(tmp_path, caplog):
  uris = []
  for name in "nq", "triviaqa":
    (tmp_path / name).mkdir()
    row = {"id": "test_0", "question": name, "golden_answers": ["a"], "metadata": {}}
    uris.append(write(tmp_path / name / "test.jsonl", [row]))
  tasks = load_tasks(",".join(uris))
  assert [(t.id, t.source) for t in tasks] == [
    ("nq-test_0", "nq"),
    ("triviaqa-test_0", "triviaqa"),
  ]
  assert "nq, triviaqa have ids in common" in caplog.text
  # One alone keeps its ids, as do sets that have none in common.
  assert [t.id for t in load_tasks(uris[0])] == ["test_0"]
  # Files of one source: by the file's name.
  train = write(tmp_path / "nq" / "train.jsonl", [{"id": "test_0", **PLAIN}])
  assert [t.id for t in load_tasks(f"{train},{uris[0]}")] == [
    "train-test_0",
    "test-test_0",
  ]
  with pytest.raises(ValueError, match="id 'x' is already the id of"):
    load_tasks(write(tmp_path / "t.jsonl", [{"id": "x", **PLAIN}] * 2))


PLAIN = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
  ("name", "source"),
  [
    ("bamboogle.jsonl", "bamboogle"),
    ("nq/data/train-00000-of-00001.parquet", "nq"),
    ("qa.jsonl", "qa.jsonl"),  # a grader of kind qa is none of this source
  ],
)
def test_the_source_of_a_file(tmp_path, name, source):
  path = tmp_path / name
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == ".parquet":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PLAIN]), path)
  else:
    write(path, [PLAIN])
  assert load_tasks(path)[0].source == source
  assert select_tasks(TasksConfig(str(path), source="mine"))[0].source == "mine"


def test_a_limit_for_each_source(tmp_path, caplog):
  uris = []
  for name in "ab":
    lines = [{**PLAIN, "question": f"{name}{n}"} for n in range(5)]
    uris.append(write(tmp_path / f"{name}.jsonl", lines))
  uri = ",".join(uris)
  tasks = select_tasks(TasksConfig(uri, limit_per_source=2))
  assert [t.question for t in tasks] == ["a0", "a1", "b0", "b1"]
  assert not caplog.records
  assert len(select_tasks(TasksConfig(uri, limit=3, limit_per_source=2))) == 3
  assert len(select_tasks(TasksConfig(uri, limit=10**30))) == 10
  select_tasks(TasksConfig(uri, limit=4))
  assert "tasks.limit=4 takes none of b; tasks.limit_per_source" in caplog.text
  with pytest.raises(ValueError, match="limit_per_source is -1; it must be at least 0"):
    TasksConfig(uri, limit_per_source=-1)


# --- Shapes.

WIKI = {
  "_id": "x1",
  "type": "comparison",
  "question": "Who?",
  "context": '[["A", ["a"]]]',
  "supporting_facts": '[["A", 0]]',
  "evidences": '[["A", "is", "B"]]',
  "answer": "Ann",
}
DAPO = {
  "prompt": "What is 1 + 1?",
  "solution": "2",
  "source_prompt": [],
  "reward_model": {"ground_truth": "2", "style": "rule"},
  "data_source": "math_dapo",
  "extra_info": {"index": "ab"},
}


def test_ids_that_are_0_or_empty(tmp_path):
  assert one(tmp_path, {**PLAIN, "id": 0}).id == "0"
  hotpotqa = {**WIKI, "_id": 0}
  assert one(tmp_path, hotpotqa).id == "0"
  assert one(tmp_path, {**hotpotqa, "_id": None, "id": None}).id == "set-0"
  gsm8k = {"question": "q", "answer": "x\n#### 4"}
  for none in None, "", NAN:
    task = one(tmp_path, {**gsm8k, "id": none, "source": none})
    assert (task.id, task.source) == ("set-0", "gsm8k")


def test_2wiki_and_dapo_as_on_the_hub(tmp_path):
  task = one(tmp_path, WIKI)
  assert (task.source, task.meta["supporting_titles"]) == ("2wikimultihopqa", ["A"])
  task = one(tmp_path, DAPO)
  assert (task.id, task.question, task.answers) == (
    "math_dapo-ab",
    "What is 1 + 1?",
    ("2",),
  )


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({**WIKI, "supporting_facts": "zz"}, "field 'supporting_facts': not JSON"),
    ({**WIKI, "supporting_facts": [5]}, "has the columns of HotpotQA.*facts: .5."),
    ({**WIKI, "supporting_facts": 7}, "has the columns of HotpotQA"),
    ({**DAPO, "extra_info": "x"}, "field 'extra_info' is 'x', not an object"),
    ({**DAPO, "reward_model": [1]}, "'reward_model.ground_truth' is missing"),
    ({"question_content": "q", "x": 1}, "nearest is LiveCodeBench, which has 'public"),
    ({"code": "x", "text": "y"}, "nearest is MBPP, which has 'test_list', too"),
    ({"title": "t"}, r"the row has 'title'\. Name its columns"),
    (
      {"question": "q", "answer": 5, "question_id": 1, "question_source": "x"},
      "has the columns of TriviaQA",
    ),
  ],
)
def test_rows_of_no_known_shape_name_the_nearest(tmp_path, row, message):
  with pytest.raises(ValueError, match=rf"set.jsonl:1: .*{message}") as e:
    one(tmp_path, row)
  assert not any(word in str(e.value) for word in ("Error", "subscript", "unpack"))


# --- Tables.


def test_large_cells_doubled_names_and_heads_of_tables(tmp_path, monkeypatch):
  path = tmp_path / "t.csv"
  path.write_text(f"question,answer,context\nq,a,{'x' * 200_000}\n")
  assert len(load_tasks(path)[0].meta["context"]) == 200_000
  monkeypatch.setattr(rows, "_MOST_CELL", 1000)
  with pytest.raises(ValueError, match=r"t.csv: cannot be read: field larger than"):
    load_tasks(path)
  path.write_text("question,answer, answer\nq,a,b\n")
  with pytest.raises(ValueError, match="2 columns are called 'answer'; accepted: each"):
    load_tasks(path)
  column = pyarrow.array(["q"])
  table = pyarrow.Table.from_arrays(
    [column] * 3, names=["question", "answer", "answer"]
  )
  pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
  with pytest.raises(ValueError, match="2 columns are called 'answer'"):
    load_tasks(tmp_path / "t.parquet")
  # A mark of byte order, spaces in the heading, an index without a name, tabs.
  path.write_text("\ufeff,question, answer\n0,q,a\n", encoding="utf-8")
  (task,) = load_tasks(path)
  assert (task.question, task.answers, task.meta) == ("q", ("a",), {"column 1": "0"})
  (tmp_path / "t.tsv").write_text("question\tanswer\nq, r\ta\n")
  assert load_tasks(tmp_path / "t.tsv")[0].question == "q, r"


def test_what_is_left_out_is_said_at_the_level_that_programs_show(caplog, tmp_path):
  path = write(tmp_path / "t.jsonl", [{**PLAIN, "image": "x"}, PLAIN])
  select_tasks(TasksConfig(path))
  assert [record.levelno for record in caplog.records] == [logging.WARNING]
