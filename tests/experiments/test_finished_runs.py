"""Every documented program, on the outputs of real finished runs.

The commands in docs/guide.md make these runs: all stages in small.
"""

from __future__ import annotations

import glob
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
RUNBOOK = (ROOT / "experiments" / "README.md").read_text()
SANDBOX = f"--config.tools.sandbox={BACKEND}"
WORLD = "runs/world_tiny"

# (command, required output); later commands read the outputs of earlier ones.
PROGRAMS = [
  (f"compare {WORLD} --out=compare.html", "Runs of rl"),
  (f"compare {WORLD}/sft {WORLD}/rl", "runs of 2 stages"),
  (f"compare {WORLD}/*", "Runs of evaluate"),
  (
    "sweep --workdir=runs/lr --grid optim.lr=1e-3,3e-3 -- experiments.sft "
    "--config=configs/sft_world.py:tiny --config.data.steps=2",
    "compare.html",
  ),
  ("compare runs/lr/*", "optim.lr=0.003"),
  (
    "sweep --workdir=runs/seeds --seeds=1 -- experiments.rl "
    f"--config=configs/opd_world.py:tiny --config.algo.steps=1 {SANDBOX}",
    "Runs of rl",
  ),
  (f"browse --workdir={WORLD}/distill", f"{WORLD}/distill/browse.html"),
  (f"browse --workdir={WORLD}/rl", f"{WORLD}/rl/browse.html"),
  (f"browse --trajectories={WORLD}/eval", f"{WORLD}/eval/browse.html"),
  (f"export --workdir={WORLD}/rl --out=runs/exported", "runs/exported/model"),
  (
    "benchmark --suite=offline --files=gsm8k=runs/world/test_tasks.jsonl "
    "--limit_per_source=4 --workdir=runs/benchmark -- "
    "--config=configs/evaluate_world.py:tiny --config.init=runs/exported/model "
    f"{SANDBOX}",
    "Benchmarks: offline",
  ),
  (
    f"tasks --config=configs/select_world.py:tiny --workdir={WORLD}/select "
    f"--config.select.all_wrong=True {SANDBOX}",
    "Tasks by pass rate",
  ),
  (
    f"synthesize --config=configs/synthesize_cloze.py:tiny --workdir={WORLD}/synth "
    "--config.tools.corpus=runs/world/dev_pages.jsonl",
    "Tasks made",
  ),
  (
    f"compare --multi={WORLD}/distill/teacher.jsonl "
    f"--single={WORLD}/select/sampled.jsonl",
    "Cost of an answer",
  ),
  (
    "chat --config=configs/evaluate_world.py:tiny --config.init=runs/exported/model "
    f"{SANDBOX} --question='Who?'",
    "",
  ),
]
# Programs in the runbook's table, run by other tests or on other machines.
ELSEWHERE = {
  "quickstart",
  "serve",
  "pictures",
  "import_traces",
  "pod",
}

pytestmark = pytest.mark.slow


def run(command: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
  """Runs a program in a folder, as in a terminal with 80 columns."""
  words = [sys.executable, "-m", *shlex.split(command)]
  for i, word in enumerate(words):
    if "*" in word:
      words[i : i + 1] = sorted(glob.glob(word, root_dir=folder))
  return subprocess.run(
    words,
    cwd=folder,
    env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
  """A folder in which the guide's printed commands have run."""
  folder = tmp_path_factory.mktemp("programs")
  (folder / "configs").symlink_to(ROOT / "configs")
  fences = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
  (block,) = [body for language, body in fences if not language and ":tiny" in body]
  for command in block.splitlines():
    words = command.removeprefix("python -m ")
    if BACKEND != "jail" and "--config" in words and ".sft " not in words:
      words += f" {SANDBOX}"
    done = run(words, folder)
    assert done.returncode == 0, done.stderr
    check_width(done.stdout)
  return folder


def check_width(text: str) -> None:
  """Checks that tables fit in 80 columns, with no cell cut off."""
  table = [line for line in text.splitlines() if line[:1] in "\u250f\u2503\u2502\u2514"]
  assert max(map(len, table), default=0) <= 80, text
  assert "\u2026" not in text


def test_every_program_runs_on_finished_runs(home):
  """In one test, because some programs read the outputs of others."""
  for command, said in PROGRAMS:
    done = run(f"experiments.{command}", home)
    # An untrained model gives no answer, so `chat` exits with status 1.
    expected = (0, 1) if command.startswith("chat") else (0,)
    assert done.returncode in expected, f"{command}\n{done.stderr}"
    assert "Traceback" not in done.stderr and "Warning:" not in done.stderr, command
    assert said in done.stdout, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("\n") < 100, command
    check_width(done.stdout)


def test_every_program_of_the_runbook_is_run_here_or_elsewhere():
  rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \|", RUNBOOK, re.MULTILINE)
  listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
  listed = {name for name in listed if name.partition(".")[0] != "bench"}
  here = {command.split()[0] for command, _ in PROGRAMS}
  stages = set(re.findall(r"-m experiments\.(\w+) --config=\S+:tiny", GUIDE))
  assert listed == here | stages | ELSEWHERE | {"make_world"}
