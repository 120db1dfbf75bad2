"""The README's first command in small: interrupted, run again, its outputs checked."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from coa_jax.report import scores
from experiments import quickstart, quickstart_report

COMMAND = [sys.executable, "-m", "experiments.quickstart", "--tiny"]


@pytest.mark.slow
def test_interrupted_and_run_again_it_tells_everything(tmp_path: pathlib.Path):
  workdir = tmp_path / "quickstart"
  command = [*COMMAND, f"--workdir={workdir}"]
  # A shell's background jobs ignore Ctrl-C, and their children inherit this.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
  signal.signal(signal.SIGINT, before)
  deadline = time.monotonic() + 600
  while not (workdir / "sft" / "metrics.jsonl").exists():
    assert first.poll() is None and time.monotonic() < deadline
    time.sleep(0.1)
  first.send_signal(signal.SIGINT)
  _, errors = first.communicate(timeout=600)
  assert first.returncode == 130, errors
  assert "the same command resumes from" in errors

  again = subprocess.run(command, capture_output=True, text=True, timeout=1500)
  assert again.returncode == 0, again.stderr
  assert "at work, and its runs distilled: done" in again.stdout
  results = json.loads((workdir / "results.json").read_text())
  for who in ("teacher", "sft", "rl", "tools_off"):
    assert set(scores.summary([], [])) <= set(results[who]), who
  assert set(results["ood"]) == {"age", "four_hop"}
  assert results["seconds"] > 0
  # A team of agents sends its context repeatedly; one model does not.
  assert results["cost"]["reduction_no_cache"] > 0
  team = results["cost"]["multi_agent"]["per_task"]["total"]
  share = results["cost"]["instructions"] / team
  less = results["cost"]["reduction_no_cache"] - results["cost"]["reduction_instructed"]
  assert share == pytest.approx(less, rel=1e-6)
  page = (workdir / "report.html").read_text()
  assert page.count('"evidence":') >= 20

  other = subprocess.run([*command, "--seed=1"], capture_output=True, text=True)
  assert other.returncode == 2
  assert "another workdir" in other.stderr and "seed" in other.stderr


def test_without_a_jail_it_says_what_is_missing(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(quickstart, "check_jail", lambda: ["no user namespaces"])
  run = quickstart.Quickstart(str(tmp_path), seed=0, tiny=True)
  assert run.sandbox == "subprocess" == run.sandbox
  printed = capsys.readouterr().out
  assert "no user namespaces" in printed
  assert printed.count("tools.sandbox=subprocess") == 1
  monkeypatch.setattr(quickstart, "check_jail", list)
  assert quickstart.Quickstart(str(tmp_path), seed=0, tiny=True).sandbox == "jail"


@pytest.mark.parametrize(
  "text", ["", '{"world": 1', "[]", "3", '{"world": "x"}', '{"world": [1]}']
)
def test_a_damaged_record_of_stages_is_named(tmp_path, text: str):
  (tmp_path / "stages.json").write_text(text)
  stages = quickstart.Quickstart(str(tmp_path), 0, tiny=True)
  with pytest.raises(ValueError, match=r"stages\.json: .*; delete the file"):
    stages.stage(1, "world", "a world", lambda: None)


def test_the_command_that_asks_the_model_runs_where_the_run_did():
  line = quickstart_report._invitation("w", "subprocess")
  assert line.endswith(" --config.tools.sandbox=subprocess")
  assert "sandbox" not in quickstart_report._invitation("w", "jail")


def test_a_figure_that_is_none_has_a_row():
  """For example pass@3 of a family with fewer than 3 graded samples."""
  summary = dict.fromkeys(quickstart_report.FIGURES, 0.5)
  summary["pass3"] = None
  summary["ci95"] = dict.fromkeys(quickstart_report.FIGURES)
  row = quickstart_report._row("SFT", summary)
  assert row["pass3_ci"] is None and row["pass1_greedy_ci"] == "0.500 (0.500-0.500)"
