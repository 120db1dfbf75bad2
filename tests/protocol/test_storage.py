"""Trajectories in files: written rows are read back unchanged."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.protocol.storage import (
  count_rows,
  read_array_record,
  read_parquet,
  write_lines,
)
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  Status,
  ToolCall,
  Trajectory,
  Usage,
  read_trajectories,
  write_jsonl,
)

_NEEDS = pytest.mark.skipif(
  importlib.util.find_spec("array_record") is None, reason="no array_record"
)
KINDS = pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
REAL = st.floats(allow_nan=False, allow_infinity=False)
SEGMENT = st.builds(
  Segment, st.sampled_from(Author), TEXT, TEXT, IDS, st.lists(REAL, max_size=3), IDS
)
CALL = st.builds(ToolCall, TEXT, TEXT, TEXT, st.sampled_from(CallStatus), REAL)
TRAJECTORY = st.builds(
  Trajectory,
  TEXT,
  st.lists(SEGMENT, max_size=3),
  st.lists(CALL, max_size=2),
  st.sampled_from(Status),
  st.none() | REAL,
  st.dictionaries(TEXT, REAL, max_size=2),
  st.builds(
    Usage,
    **{
      field.name: REAL if field.name == "seconds" else st.integers(0, 10**12)
      for field in dataclasses.fields(Usage)
    },
  ),
  st.integers(0, 9),
  st.dictionaries(TEXT, st.none() | TEXT | st.lists(st.integers()), max_size=3),
)


@KINDS
@settings(max_examples=40, deadline=None)
@given(written=st.lists(TRAJECTORY, min_size=1, max_size=4))
def test_written_bytes_are_read_back(tmp_path_factory, suffix, written):
  path = tmp_path_factory.mktemp("storage") / "deep" / f"t.{suffix}"
  lines = (json.dumps(t.to_json()) for t in written)
  assert write_lines(path, lines) == len(written)
  read = read_trajectories(path)
  assert read == written and repr(read) == repr(written)  # enums are restored
  if suffix == "jsonl":
    assert write_jsonl(path, written) == len(written)
    assert read_trajectories(path) == written
    assert path.read_bytes().isascii()


def test_more_rows_than_a_group(tmp_path):
  rows = [Trajectory(f"t{n}").to_json() for n in range(600)]
  path = tmp_path / "t.parquet"
  assert write_lines(path, iter(rows)) == 600
  assert [(where, row["task_id"]) for where, row in read_parquet(path)] == [
    (f"{path} row {n}", f"t{n}") for n in range(600)
  ]


def write_array_record(path, rows) -> None:
  """Writes an ArrayRecord file as TensorFlow Datasets and others do."""
  from array_record.python.array_record_module import ArrayRecordWriter

  writer = ArrayRecordWriter(str(path), "group_size:1")
  for row in rows:
    writer.write(json.dumps(row).encode())
  writer.close()


@_NEEDS
def test_array_record_is_read(tmp_path):
  rows = [Trajectory(f"t{n}").to_json() for n in range(600)]
  path = tmp_path / "t.array_record"
  write_array_record(path, rows)
  assert [t.task_id for t in read_trajectories(path)] == [f"t{n}" for n in range(600)]
  assert next(read_array_record(path))[0] == f"{path} row 0"
  assert count_rows(path) == 600
  path.write_text("no")
  with pytest.raises(ValueError, match=r"t\.array_record"):
    count_rows(path)


@_NEEDS
def test_a_broken_array_record_is_named(tmp_path):
  from array_record.python.array_record_module import ArrayRecordWriter

  path = tmp_path / "t.array_record"
  for content in (b"", b"no", b"x" * 70_000):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.array_record: not ArrayRecord"):
      list(read_array_record(path))
  for record, words in ((b"[1]", "row 0: expected a JSON object, got list"),
                        (b"{", "row 0: not JSON")):  # fmt: skip
    writer = ArrayRecordWriter(str(path), "group_size:1")
    writer.write(record)
    writer.close()
    with pytest.raises(ValueError, match=words):
      list(read_array_record(path))
  with pytest.raises(FileNotFoundError, match="none"):
    read_trajectories(tmp_path / "none.array_record")


@KINDS
def test_a_file_appears_when_it_is_whole(tmp_path, suffix):
  path = tmp_path / f"t.{suffix}"

  def fails():
    yield Trajectory("a").to_json()
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    write_lines(path, fails())
  with pytest.raises(EOFError):
    write_lines(path, [], at_least_one=True)
  assert os.listdir(tmp_path) == []
  assert write_lines(path, []) == 0 and read_trajectories(path) == []


@KINDS
def test_rows_are_counted_without_reading_them(tmp_path, suffix):
  path = tmp_path / f"t.{suffix}"
  write_lines(path, [Trajectory(str(n)).to_json() for n in range(700)])
  assert count_rows(path) == 700
  with pytest.raises(FileNotFoundError):
    count_rows(tmp_path / f"none.{suffix}")
  if suffix != "jsonl":
    path.write_text("no")
    with pytest.raises(ValueError, match=f"t.{suffix}"):
      count_rows(path)


def test_a_broken_gzip_is_named_where_rows_are_counted(tmp_path):
  path = tmp_path / "t.jsonl.gz"
  path.write_bytes(gzip.compress(b"{}\n{}\n"))
  assert count_rows(path) == 2
  for broken in (b"no", path.read_bytes()[:-9]):
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=r"t\.jsonl\.gz: cannot be read"):
      count_rows(path)


def test_refusals(tmp_path):
  with pytest.raises(ValueError, match=r"'.txt'; accepted: .jsonl, .parquet$"):
    write_lines(tmp_path / "t.txt", [])
  (tmp_path / "t.parquet").write_text("no")
  with pytest.raises(ValueError, match=r"t\.parquet row 0: cannot be read as par"):
    read_trajectories(tmp_path / "t.parquet")


def test_half_a_character_is_no_reason_to_lose_a_row(tmp_path):
  t = Trajectory("a", [Segment(Author.TOOL, "observation", "x \ud800")])
  write_lines(tmp_path / "t.parquet", [t.to_json()])
  (read,) = read_trajectories(tmp_path / "t.parquet")
  assert read.segments[0].text == "x ?"


def test_a_column_of_text_by_others_is_left_as_it_is(tmp_path):
  import pyarrow
  import pyarrow.parquet

  rows = [{"meta": "plain"}, {"meta": None}, {"meta": '{"a": 1}'}]
  path = tmp_path / "t.parquet"
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  metas = [row["meta"] for _, row in read_parquet(path)]
  assert metas == ["plain", None, {"a": 1}]
