"""Contestants' worker processes: start, answers, death, and why one is left out."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from absl import flags
from absl.testing import flagsaver
from forked import finish
from toy import eventually

from experiments.bench import peers, program

ECHO = """
import subprocess, sys, pathlib
from experiments.bench.peers import serve

def start(name, folder, job):
  print("a library says hello")
  if name == "dies":
    raise ValueError("no weights here")
  child = subprocess.Popen(["sleep", "600"])
  pathlib.Path(folder, "child").write_text(str(child.pid))
  return lambda batch: {"first": [job["token"]] * batch}

serve(start)
"""


@pytest.fixture
def worker(tmp_path):
  """Starts a worker by name; its module prints, answers and has a child process."""
  (tmp_path / "echo.py").write_text(ECHO)
  peers.write_job(str(tmp_path), {"token": 7})
  env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{peers.ROOT}"}
  return lambda name: peers.Worker(name, str(tmp_path), "echo", env=env)


def test_a_worker_takes_turns_and_ends_with_all_that_it_started(worker, tmp_path):
  checked = []
  with worker("ours") as ours:
    turns = peers.warm_turns({"ours": ours}, 3, checked.append, batch=2)
    child = pathlib.Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert child.exists()
  assert checked == [{"ours": [7, 7]}] and len(turns["ours"]) == 3
  assert peers.median(turns["ours"]) > 0 and turns["ours"][0]["peak_mb"] > 1
  # It may be a zombie until its new parent reaps it.
  eventually(lambda: not child.exists() or ") Z " in child.read_text())


def test_ours_of_another_checkout_takes_part(monkeypatch, tmp_path):
  here = tmp_path / "experiments" / "bench"
  here.mkdir(parents=True)
  (here / "peers.py").touch()
  (tmp_path / "echo.py").write_text(ECHO)
  (tmp_path / "write.py").write_text("def write_work(folder): pass")
  monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{peers.ROOT}")
  flags.FLAGS.mark_as_parsed()
  job = {"token": 5}
  with flagsaver.flagsaver(before=str(tmp_path)):
    before = program.available()
  with peers.contestants("echo", job, before, "write") as workers:
    first = peers.ask_all(workers, batch=1)
  assert {who: answer["first"] for who, answer in first.items()} == {
    "ours": [5],
    "before": [5],
  }
  with (
    flagsaver.flagsaver(before=str(here)),
    pytest.raises(ValueError, match="is no checkout of this repository"),
  ):
    program.available()


def test_a_checkout_older_than_a_benchmark_takes_part_in_it(monkeypatch, tmp_path):
  """This checkout's worker module runs on the older checkout's library."""
  new = tmp_path / "new"
  new.mkdir()
  (new / "fresh.py").write_text(ECHO)
  old = tmp_path / "old"
  library = old / "experiments" / "bench" / "peers.py"
  library.parent.mkdir(parents=True)
  library.write_text(pathlib.Path(peers.__file__).read_text())
  monkeypatch.setattr(peers, "ROOT", new)
  peers.write_job(str(tmp_path), {"token": 3})
  with peers.Worker("ours", str(tmp_path), "fresh", checkout=old) as worker:
    assert worker.ask(batch=1)["first"] == [3]


def test_a_worker_that_dies_says_why(worker):
  with pytest.raises(ValueError, match=r"worker of dies ended(.|\n)*no weights here"):
    worker("dies")


def test_a_peer_that_is_not_installed_is_left_out_with_a_line(monkeypatch, capsys):
  absent = (("numpy", "no_such_module"), "torch transformers")
  monkeypatch.setattr(peers, "PEERS", {"torch": absent, "tunix": (("numpy",), "")})
  pythons = {"torch": sys.executable, "tunix": sys.executable}
  assert peers.available(pythons) == {"tunix": sys.executable}
  (line,) = capsys.readouterr().out.splitlines()
  assert "no no_such_module;" in line and "pip install torch transformers" in line


@pytest.mark.parametrize("python", ["/nowhere/python", "", "/bin/false"])
def test_a_file_that_is_no_interpreter_is_named(python):
  with pytest.raises(ValueError, match=f"'{python}' is no Python interpreter"):
    peers.missing(python, ["numpy"])


@pytest.mark.parametrize(
  ("module", "flag", "reason"),
  [
    ("train", "--cases=9M", "--cases='9M' finds none of: 1M, 5M, 100M"),
    ("algorithms", "--cases=(", "flag --cases=(: no regular expression: missing )"),
  ],
)
def test_a_wrong_flag_is_one_line(module: str, flag: str, reason: str):
  finish(f"bench.{module}", flag, reason=reason)
