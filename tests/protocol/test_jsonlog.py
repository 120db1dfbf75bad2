"""A log of JSON lines holds only whole rows, however its last writer ended."""

from __future__ import annotations

import resource

import pytest

from coa_jax.protocol.jsonlog import JsonLog


def opened(path) -> tuple[JsonLog, list]:
  rows = []
  log = JsonLog(str(path), lambda row, where, place: rows.append((row, place)))
  return log, rows


def test_rows_are_read_back_by_place_and_after_half_a_line(tmp_path):
  path = tmp_path / "log.jsonl"
  log, rows = opened(path)
  assert not rows and not path.exists()
  places = [log.append(row) for row in ({"a": "\u00e9"}, [2], None)]
  assert [log.read(place) for place in places] == [{"a": "\u00e9"}, [2], None]
  with path.open("ab") as f:
    f.write(b'{"half": ')
  log, rows = opened(path)
  assert [place for _, place in rows] == places
  assert log.read(log.append("next")) == "next"
  assert [row for row, _ in opened(path)[1]] == [{"a": "\u00e9"}, [2], None, "next"]


def test_a_file_that_is_no_log_is_named_and_left_alone(tmp_path):
  path = tmp_path / "notes.txt"
  path.write_text("1\nnot JSON\nhalf")
  with pytest.raises(ValueError, match=r"notes\.txt:2: not JSON"):
    opened(path)
  assert path.read_text() == "1\nnot JSON\nhalf"


def test_a_row_that_finds_no_room_leaves_nothing(tmp_path):
  path = tmp_path / "log.jsonl"
  log, _ = opened(path)
  log.append("before")
  size = path.stat().st_size
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
  try:
    with pytest.raises(OSError, match="File too large"):
      log.append("x" * 100)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert path.stat().st_size == size
  assert log.read(log.append("after")) == "after"
