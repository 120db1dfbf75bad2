"""metrics.jsonl, progress lines and results.json."""

from __future__ import annotations

import json
from concurrent.futures import Future

import numpy as np
import pytest
import rich.console

from coa_jax.report import metrics
from coa_jax.report.metrics import Metrics, read_metrics, resume_log, write_json


def steps(path: str, stage: str) -> list[int]:
  return [row["step"] for row in read_metrics(path, stage)]


def test_a_line_holds_stage_step_seconds_and_the_values(tmp_path, clock):
  with Metrics(str(tmp_path / "run"), "sft", total=2) as log:
    clock[0] += 1.5
    log.log(1, {"loss": np.float32(0.5), "tokens": np.array(12)})
    with pytest.raises(ValueError, match="'step' is taken"):
      log.log(2, {"step": 2.0})
  row = {"stage": "sft", "step": 1, "seconds": 1.5, "loss": 0.5, "tokens": 12.0}
  assert read_metrics(log.path, "sft") == [row]
  assert log.path == str(tmp_path / "run" / "metrics.jsonl")


def test_a_resumed_stage_has_no_duplicates_and_leaves_others_alone(tmp_path, clock):
  path = str(tmp_path / "metrics.jsonl")
  with Metrics(str(tmp_path), "sft", total=5) as log:
    for step in (1, 2, 3, 4):
      clock[0] += 1
      log.log(step, {"loss": step})
  with Metrics(str(tmp_path), "rl", total=5) as log:
    log.log(4, {"reward": 1})
  with open(path, "a") as f:
    f.write('{"stage": "rl", "st')  # killed while writing
  with Metrics(str(tmp_path), "sft", total=5) as log:
    assert steps(path, "sft") == [1, 2, 3, 4]  # nothing is lost before the first log
    clock[0] += 1
    log.log(3, {"loss": -3})
    log.log(4, {"loss": -4})
  rows = read_metrics(path, "sft")
  assert [(r["step"], r["loss"], r["seconds"]) for r in rows] == [
    (1, 1, 1),
    (2, 2, 2),
    (3, -3, 3),  # the clock continues from the previous line
    (4, -4, 3),
  ]
  assert steps(path, "rl") == [4]
  assert read_metrics(tmp_path, "sft") == rows  # a workdir works, too


def test_a_long_step_shows_its_work(tmp_path, clock, capfd):
  with Metrics(str(tmp_path), "rl", total=2) as log:
    futures = [Future() for _ in range(4)]
    log.follow(futures, "trajectories")
    for future, seconds in zip(futures, (1, 30, 10, 100), strict=True):
      clock[0] += seconds
      future.set_result(None)
    assert capfd.readouterr().err == "rl  2/4 trajectories\n"  # the step ends it


def test_a_process_that_joins_a_run_has_the_log_of_the_first(tmp_path):
  first = str(tmp_path)
  own = str(tmp_path / "process_1")
  with Metrics(first, "sft", total=5) as log:
    for step in (1, 2, 3, 4):
      log.log(step, {"loss": step})
  rows = read_metrics(first, "sft")
  assert resume_log(own, "sft", 3, first) == rows[:3]
  assert read_metrics(own, "sft") == rows[:3]
  # It was absent while steps were repeated.
  with Metrics(own, "sft", total=5) as log:
    log.log(3, {"loss": -3})
    log.log(5, {"loss": -5})
  assert resume_log(own, "sft", 4, first) == rows == read_metrics(own, "sft")
  assert resume_log(first, "sft", 3, first) == rows[:3]
  assert read_metrics(first, "sft") == rows  # until its next line


def test_not_a_number_becomes_null_and_is_counted(tmp_path, capsys):
  with Metrics(str(tmp_path), "sft", total=2) as log:
    log.log(1, {"loss": float("nan"), "norm": float("inf"), "rate": 1e-3})
    log.log(2, {"loss": 1.0})
  first, second = read_metrics(log.path, "sft")
  assert (first["loss"], first["norm"], first["rate"]) == (None, None, 1e-3)
  assert second["loss"] == 1.0
  assert log.non_finite == 2
  assert "sft: 2 values were NaN or infinite" in capsys.readouterr().err


def test_plain_lines_first_last_and_every_ten_seconds(tmp_path, clock, capsys):
  with Metrics(str(tmp_path), "rl", total=100, unit="update") as log:
    for step in range(1, 51):
      clock[0] += 1
      log.log(step, {}, figure=f"reward 0.{step}")
  lines = capsys.readouterr().err.splitlines()
  shown = [int(line.split("update ")[1].split("/")[0]) for line in lines]
  assert shown == [1, 11, 21, 31, 41, 50]
  assert lines[-1] == "rl  update 50/100  50s elapsed  50s left  reward 0.50"


def test_items_are_counted_and_nothing_is_written(tmp_path, clock, capsys):
  items = []
  with Metrics(str(tmp_path), "data", 300, unit="row") as log:
    for item in log.count(range(300)):
      items.append(item)
      clock[0] += 0.05
  assert items == list(range(300)) and not list(tmp_path.iterdir())
  assert capsys.readouterr().err.splitlines() == [
    "data  row 201/300  10s elapsed  5s left",
    "data  row 300/300  15s elapsed  0s left",
  ]


def test_the_pace_is_that_of_the_steps_done_here(tmp_path, clock, capsys):
  for step in (90, 92):
    with Metrics(str(tmp_path), "sft", total=100) as log:
      clock[0] += 4
      log.log(step, {})
  assert capsys.readouterr().err.splitlines()[-1].endswith("16s left")


def test_a_live_bar_on_a_terminal(tmp_path, monkeypatch):
  console = rich.console.Console(force_terminal=True, width=100, record=True)
  monkeypatch.setattr(metrics, "Console", lambda stderr: console)
  with Metrics(str(tmp_path), "sft", total=4) as log:
    log.log(2, {}, figure="loss [0.5]")
  text = console.export_text()
  assert "step 2/4" in text
  assert "loss [0.5]" in text  # not read as markup


@pytest.mark.parametrize(
  ("seconds", "text"), [(0.4, "0s"), (59.7, "1m00s"), (185, "3m05s"), (7620, "2h07m")]
)
def test_duration(seconds, text):
  assert metrics.duration(seconds) == text


def test_read_metrics_names_what_is_wrong(tmp_path):
  with pytest.raises(FileNotFoundError, match="no metrics at"):
    read_metrics(tmp_path / "metrics.jsonl", "sft")
  (tmp_path / "metrics.jsonl").write_text('{"a\n{"stage": "sft"}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not JSON"):
    read_metrics(tmp_path / "metrics.jsonl", "sft")


def test_equal_results_are_equal_files(tmp_path):
  value = {"b": [np.float64(1.5), float("nan")], "a": {"y": np.arange(2), "x": (1,)}}
  write_json(tmp_path / "one" / "results.json", value)
  write_json(tmp_path / "two.json", dict(reversed(value.items())))
  text = (tmp_path / "one" / "results.json").read_text()
  assert text == (tmp_path / "two.json").read_text()
  assert json.loads(text) == {"a": {"x": [1], "y": [0, 1]}, "b": [1.5, None]}
  assert list(json.loads(text)) == ["a", "b"]
  assert not list(tmp_path.glob("**/*.tmp"))
