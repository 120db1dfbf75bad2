"""Limits, Result and frames."""

import os
import time

import pytest

from tools_sandbox.jail import wire
from tools_sandbox.jail.wire import Limits, Result, Verdict


@pytest.mark.parametrize(
  ("field", "value", "message"),
  [
    ("wall_s", 0, "positive"),
    ("wall_s", float("nan"), "positive"),
    ("cpu_s", float("inf"), "positive"),
    pytest.param("cpu_s", 10**400, "positive", id="cpu_s-large"),
    pytest.param("inodes", 10**400, "positive", id="inodes-large"),
    ("seed", 1.5, "integer"),
    ("seed", True, "integer"),
    ("clock_s", -1, "Unix seconds"),
    ("clock_s", float("nan"), "Unix seconds"),
    pytest.param("clock_s", 10**400, "Unix seconds", id="clock_s-large"),
    ("clock_s", "1", "Unix seconds"),
    ("cpu_s", "3", "a number"),
    ("memory_mb", 1.5, "an integer"),
    ("output_bytes", -1, "positive"),
    ("output_bytes", wire.MAX_OUTPUT + 1, "at most"),
    ("file_mb", True, "an integer"),
    ("processes", None, "an integer"),
  ],
)
def test_bad_limits_name_the_field(field, value, message):
  with pytest.raises(ValueError, match=rf"limits\.{field} must be .*{message}"):
    Limits(**{field: value})


def test_records_survive_json():
  limits = Limits(wall_s=1.5, processes=3)
  assert Limits.from_json(limits.to_json()) == limits
  result = Result("a", "b", -9, Verdict.TIMEOUT, 0.5, True)
  back = Result.from_json(result.to_json())
  assert back == result and isinstance(back.verdict, Verdict)


ROW = Result("", "", 0, Verdict.OK, 0.0).to_json()


@pytest.mark.parametrize(
  ("row", "message"),
  [
    (ROW | {"stdout": 5}, r"Result\.stdout is"),
    (ROW | {"stderr": None}, r"Result\.stderr is"),
    (ROW | {"exit_code": 1.5}, r"Result\.exit_code is"),
    (ROW | {"seconds": float("nan")}, r"Result\.seconds is"),
    (ROW | {"seconds": 10**400}, r"Result\.seconds is"),
    (ROW | {"truncated": 1}, r"Result\.truncated is"),
    (ROW | {"verdict": "great"}, "great"),
    (ROW | {"x": 1}, "Result: expected fields"),
    ({"stdout": ""}, "Result: expected fields"),
    ([], "Result: expected fields"),
  ],
)
def test_malformed_results(row, message):
  with pytest.raises(ValueError, match=message):
    Result.from_json(row)


@pytest.fixture
def pipe():
  """Both ends of a pipe, as files, so that a test may close one."""
  read, write = os.pipe()
  with os.fdopen(read, "rb", 0) as out, os.fdopen(write, "wb", 0) as into:
    yield out, into


def test_deadlines_hold_both_ways(pipe):
  read, write = (end.fileno() for end in pipe)
  os.set_blocking(write, False)
  with pytest.raises(TimeoutError):
    wire.read_frame(read, time.monotonic() + 0.05)
  with pytest.raises(TimeoutError):
    wire.write_frame(write, {"x": "y" * 300_000}, time.monotonic() + 0.05)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{"])
def test_a_malformed_frame_is_refused(pipe, data):
  read, write = (end.fileno() for end in pipe)
  os.write(write, data)
  with pytest.raises(ValueError):
    wire.read_frame(read)
