"""Trajectories as JSON lines: exact round trip, and errors with their location."""

from __future__ import annotations

import gzip
import re

import pytest

from coa_jax.protocol import trajectory
from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  Status,
  ToolCall,
  Trajectory,
  Usage,
  read_jsonl,
  read_trajectories,
  write_jsonl,
)


def full() -> Trajectory:
  """A trajectory with no field at its default."""
  return Trajectory(
    task_id="t1",
    segments=[
      Segment(Author.PROMPT, "question", "Wer? \u00e4\u2028\U0001f600\n", [1, 2]),
      Segment(Author.POLICY, "code", "<code>", [3, 4], [-0.1, -1e-9], [7, 7]),
      Segment(Author.TOOL, "observation", "o", [5]),
      Segment(Author.ENVIRONMENT, "", "e", [6]),
    ],
    calls=[ToolCall("code", "x", "y", CallStatus.TOOL, 0.25)],
    status=Status.TURN_LIMIT,
    reward=0.5,
    reward_parts={"answer": 1.0, "format": 0.5},
    usage=Usage(1, 2, 3, 4, 5, 6, 0.125),
    sample=3,
    meta={"question": "Wer?", "answers": ["a"], "nested": {"x": [1, None]}},
  )


def test_views_of_a_trajectory():
  t = full()
  assert t.text == "<code>oe"
  assert t.num_tokens == 6
  assert t.usage.total == 1 + 3 + 4


@pytest.mark.parametrize(
  ("break_it", "named"),
  [
    (lambda row: row.pop("segments"), "segments"),
    (lambda row: row.update(colour=1), "colour"),
    (lambda row: row.update(status="lost"), "lost"),
    (lambda row: row.update(segments=5), "segments"),
    (lambda row: row["usage"].update(tokens=1), "tokens"),
    (lambda row: row["segments"][0].update(author="me"), "me"),
    (lambda row: row["calls"][0].update(status="bad"), "bad"),
  ],
)
def test_a_broken_record_names_file_line_and_field(tmp_path, break_it, named):
  rows = [full().to_json(), full().to_json()]
  break_it(rows[1])
  path = tmp_path / "t.jsonl"
  write_jsonl(path, rows)
  with pytest.raises(ValueError) as e:
    read_trajectories(path)
  assert str(e.value).startswith(f"{path}:2: ") and named in str(e.value)


@pytest.mark.parametrize(
  ("line", "reason"), [("{", "not JSON"), ("[1]", "object, got list"), ("3", "got int")]
)
def test_a_broken_line_names_file_and_line(tmp_path, line: str, reason: str):
  path = tmp_path / "t.jsonl"
  path.write_text('{"a": 1}\n\n' + line + "\n")
  with pytest.raises(ValueError, match=reason) as e:
    list(read_jsonl(path))
  assert str(e.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_without_end_is_refused(suffix, tmp_path, monkeypatch):
  monkeypatch.setattr(trajectory, "MOST_OF_A_LINE", 1 << 20)
  path = str(tmp_path / f"x.jsonl{suffix}")
  start = gzip.open if suffix else open
  for length, fault in ((1 << 10, ""), (1 << 22, ":2: the line is longer than 1 MiB")):
    with start(path, "wb") as f:
      f.write(b'{"a": 1}\n{"a": "' + b"x" * length + b'"}\n')
    rows = trajectory.read_jsonl(path)
    assert next(rows)[1] == {"a": 1}
    if not fault:
      assert len(next(rows)[1]["a"]) == length
      continue
    with pytest.raises(ValueError, match=re.escape(path + fault)):
      next(rows)
