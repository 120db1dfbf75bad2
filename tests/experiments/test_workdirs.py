"""Workdirs with two runs, on full disks, or at impossible paths."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator

import forked
import pytest
from programs import config_file, small_distillation, start, toy_runs


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, str]:
  """A config file for a short run of each stage."""
  folder = tmp_path_factory.mktemp("inputs")
  runs = toy_runs(folder)
  runs["sft"]["checkpoint"] = dict(every=2)
  files = {
    name: config_file(folder / f"{name}.py", config) for name, config in runs.items()
  }
  return {"distill": small_distillation(folder), **files}


def run(journey: str, config: str, workdir: pathlib.Path, *flags: str):
  """Runs `experiments.JOURNEY` on a workdir."""
  flags = (f"--config={config}", f"--workdir={workdir}", *flags)
  return forked.run(f"experiments.{journey}", *flags)


def refused(done: subprocess.CompletedProcess[str]) -> str:
  """Checks that a run failed with one error; returns that line."""
  errors = done.stderr
  assert done.returncode == 2, errors
  assert "Traceback" not in errors and errors.count("error: ") == 1, errors
  return errors.splitlines()[-1]


@pytest.mark.slow
def test_two_runs_do_not_share_a_workdir(configs, tmp_path):
  workdir = tmp_path / "w"
  first = start("distill", configs["distill"], workdir)
  while not (workdir / "runs.jsonl").exists():
    assert first.poll() is None, first.communicate()
    time.sleep(0.01)
  first.send_signal(signal.SIGSTOP)  # keeps it alive
  line = refused(run("distill", configs["distill"], workdir))
  assert line.startswith(f"error: {workdir}: process {first.pid} on "), line
  first.kill()
  first.communicate()
  again = run("distill", configs["distill"], workdir, "--json")
  assert again.returncode == 0, again.stderr
  assert json.loads(again.stdout)["runs"] == 40
  assert len((workdir / "runs.jsonl").read_text().splitlines()) == 40


@pytest.fixture
def full(tmp_path) -> Iterator[pathlib.Path]:
  """A separate small disk, mounted on tmp_path."""
  mounted = subprocess.run(
    ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)],
    capture_output=True,
    text=True,
  )
  if mounted.returncode:
    pytest.skip(f"a disk of its own needs root: {mounted.stderr.strip()}")
  yield tmp_path
  subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("journey", "kilobytes"),
  [
    ("distill", 150),
    ("sft", 300),
    ("rl", 300),
    pytest.param("evaluate", 40, marks=pytest.mark.soak),
  ],
)
def test_a_full_disk_is_one_line_and_loses_nothing(configs, full, journey, kilobytes):
  def resize(size: int) -> None:
    size = f"remount,size={size}k"
    subprocess.run(["mount", "-o", size, str(full)], check=True)

  resize(kilobytes)
  line = refused(run(journey, configs[journey], full / "w"))
  assert line.startswith(f"error: {full}") and "No space left on device" in line
  resize(40_000)
  again = run(journey, configs[journey], full / "w")
  assert again.returncode == 0, again.stderr
  assert os.path.getsize(full / "w" / "results.json")


@pytest.mark.parametrize(
  ("workdir", "reason"),
  [("x" * 300, "File name too long"), ("file/w", "Not a directory")],
)
def test_a_place_that_can_not_be_is_one_line(configs, tmp_path, workdir, reason):
  (tmp_path / "file").write_text("")
  line = refused(run("distill", configs["distill"], tmp_path / workdir))
  assert reason in line and str(tmp_path) in line
