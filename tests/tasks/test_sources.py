"""Task files: selected rows, ids and sources, tables."""

from __future__ import annotations

import logging
import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from coa_jax.data.tasks import rows
from coa_jax.data.tasks.sources import TasksConfig, load_tasks, select_tasks
from coa_jax.data.tasks.task import Kind

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
NAN = float("nan")
PLAIN = {"question": "q", "answer": "a"}


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
  tasks = load_tasks(FIXTURES / f"{name}.jsonl")
  assert len(tasks) == count and {t.kind for t in tasks} == {kind}


@pytest.mark.parametrize(
  ("uri", "error", "message"),
  [
    ("gs://b/x.jsonl", ValueError, "is not a path; only a config's"),
    ("{}/*.jsonl", FileNotFoundError, "no task file matches"),
    ("{}", FileNotFoundError, "no task file in the folder"),
    ("{}/a.jsonl,", ValueError, "a name in the list is empty"),
    ("{}/a.jsonl,{}/b.jsonl", FileNotFoundError, "no task file at .*a.jsonl"),
    ("{}/sub/a.csv", ValueError, "a.csv row 0: has . cells, the heading 2"),
    ("{}/sub/empty.jsonl", ValueError, "holds no task"),
  ],
)
def test_an_address_of_no_task_is_refused(tmp_path, uri, error, message):
  (tmp_path / "sub").mkdir()
  (tmp_path / "sub" / "a.csv").write_text("question,answer\na,b,c\n")
  (tmp_path / "sub" / "empty.jsonl").write_text("")
  with pytest.raises(error, match=message):
    load_tasks(uri.format(tmp_path, tmp_path))


def test_a_field_that_a_task_lacks_is_refused():
  with pytest.raises(ValueError, match=r"no field 'qestion'.*mean 'question'"):
    TasksConfig("t.jsonl", fields={"qestion": "q"})


# --- Ids and sources.


def test_every_task_has_a_source_and_ids_are_told_apart_by_it(write, caplog):
  uris = []
  for name in "nq", "triviaqa":
    row = {"id": "test_0", "question": name, "golden_answers": ["a"], "metadata": {}}
    uris.append(write(f"{name}/test.jsonl", [row]))
  tasks = load_tasks(",".join(uris))
  assert [(t.id, t.source) for t in tasks] == [
    ("nq-test_0", "nq"),
    ("triviaqa-test_0", "triviaqa"),
  ]
  assert "nq, triviaqa have ids in common" in caplog.text
  # A single set keeps its ids, as do sets without common ids.
  assert [t.id for t in load_tasks(uris[0])] == ["test_0"]
  # Files with one source: the file names distinguish ids.
  train = write("nq/train.jsonl", [{"id": "test_0", **PLAIN}])
  assert [t.id for t in load_tasks(f"{train},{uris[0]}")] == [
    "train-test_0",
    "test-test_0",
  ]


def test_an_id_is_one_tasks_but_copies_in_an_rl_set_count_once(write):
  with pytest.raises(ValueError, match=r"t.jsonl:2: id 'x' is already the id of .*:1"):
    load_tasks(write("t.jsonl", [{"id": "x", **PLAIN}] * 2))
  row = {"prompt": "1/2?", "reward_model": {"ground_truth": "1"}, "data_source": "demo"}
  row["extra_info"] = {"index": "7"}
  assert len(load_tasks(write("t.jsonl", [row, row]))) == 1
  other = {**row, "reward_model": {"ground_truth": "2"}}
  with pytest.raises(ValueError, match="id 'demo-7' is already"):
    load_tasks(write("t.jsonl", [row, other]))


@pytest.mark.parametrize(
  ("name", "source"),
  [
    ("bamboogle.jsonl", "bamboogle"),
    ("nq/data/train-00000-of-00001.parquet", "nq"),
    ("qa.jsonl", "qa.jsonl"),  # else a grader for kind qa would match this source
  ],
)
def test_the_source_of_a_file(write, name, source):
  path = write(name, [PLAIN])
  if name.endswith(".parquet"):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([PLAIN]), path)
  assert load_tasks(path)[0].source == source
  assert select_tasks(TasksConfig(path, source="mine"))[0].source == "mine"


def test_a_limit_for_each_source(write, caplog):
  uris = []
  for name in "ab":
    lines = [{**PLAIN, "question": f"{name}{n}"} for n in range(5)]
    uris.append(write(f"{name}.jsonl", lines))
  uri = ",".join(uris)
  tasks = select_tasks(TasksConfig(uri, limit_per_source=2))
  assert [t.question for t in tasks] == ["a0", "a1", "b0", "b1"]
  assert not caplog.records
  assert len(select_tasks(TasksConfig(uri, limit=3, limit_per_source=2))) == 3
  assert len(select_tasks(TasksConfig(uri, limit=10**30))) == 10
  select_tasks(TasksConfig(uri, limit=4))
  assert "tasks.limit=4 takes none of b; tasks.limit_per_source" in caplog.text


# --- Pictures, files and system messages, which models do not see.


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
  write, caplog, name, value
):
  empty = [{**PLAIN, name: none} for none in ("", None, [], {"bytes": None}, NAN)]
  path = write("t.jsonl", [{**PLAIN, name: value}, *empty])
  tasks = select_tasks(TasksConfig(path))
  assert [t.id for t in tasks] == [f"t-{n}" for n in range(1, 6)]
  assert f"rows left out: 1; column '{name}'" in caplog.text
  assert [record.levelno for record in caplog.records] == [logging.WARNING]
  assert len(select_tasks(TasksConfig(path, attachments=True))) == 6
  path = write("t.jsonl", [{**PLAIN, name: value}])
  with pytest.raises(ValueError, match=r"holds no task but .*tasks.attachments"):
    select_tasks(TasksConfig(path))
  assert len(load_tasks(path)) == 1  # all rows, for held-out sets


def test_system_messages_are_counted(write, caplog):
  said = [("system", "Be brief."), ("user", "one?")]
  prompt = [{"role": role, "content": content} for role, content in said]
  load_tasks(write("t.jsonl", [{"prompt": prompt, "answer": "1 x"}]))
  assert "rows with a system message: 1" in caplog.text


# --- Several files, and tables.


def test_several_files_at_once_and_tables(tmp_path, write):
  one = write("a/x.jsonl", [{"question": "q0", "answer": "a"}])
  (tmp_path / "b").mkdir()
  table = tmp_path / "b" / "x.csv"
  table.write_text('question,answers,level\n"q1, or?","[""a"", ""b""]",1\nq2,c,\n')
  tasks = load_tasks(f"{one},{table}")
  assert [(t.id, t.question, t.answers) for t in tasks] == [
    ("x-0", "q0", ("a",)),
    ("x-1", "q1, or?", ("a", "b")),
    ("x-2", "q2", ("c",)),
  ]
  assert tasks[1].family == "1"
  assert load_tasks(f"{tmp_path}/*/x.*") == tasks
  assert load_tasks(tmp_path / "a") == tasks[:1]


def test_large_cells_doubled_names_and_heads_of_tables(tmp_path, monkeypatch):
  path = tmp_path / "t.csv"
  path.write_text(f"question,answer,context\nq,a,{'x' * 200_000}\n")
  assert len(load_tasks(path)[0].meta["context"]) == 200_000
  monkeypatch.setattr(rows, "_MOST_CELL", 1000)
  with pytest.raises(ValueError, match=r"t.csv: cannot be read: field larger than"):
    load_tasks(path)
  path.write_text("question,answer, answer\nq,a,b\n")
  with pytest.raises(ValueError, match="several columns are called 'answer'"):
    load_tasks(path)
  # A byte order mark, spaces in the header, an unnamed index, tabs.
  path.write_text("\ufeff,question, answer\n0,q,a\n", encoding="utf-8")
  (task,) = load_tasks(path)
  assert (task.question, task.answers, task.meta) == ("q", ("a",), {"column 1": "0"})
  (tmp_path / "t.tsv").write_text("Question\tAnswer\nq, r\ta\n")
  assert load_tasks(tmp_path / "t.tsv")[0].question == "q, r"


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
