"""A run continues after the reader of its output ends, as in `program 2>&1 | head`."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import logging, os, sys, time
from coa_jax.report import metrics
from coa_jax.report.tables import Table
from coa_jax.cli.launch import run_program
import rich

def main():
  metrics.PLAIN_EVERY = 0.0
  with metrics.Metrics(sys.argv[1], "sft", 50) as log:
    for step in range(1, 51):
      if step == 3:
        os.read(int(sys.argv[2]), 1)  # the reader has gone
      log.log(step, {"loss": 1.0 / step, "seconds_step": 0.01})
      print("a line of a library", file=sys.stderr)
      logging.warning("a warning")
  os.system("echo a child process >&2")
  print("results")
  rich.print(Table("t", [{"a": 1}], {"a": "a"}))

sys.argv, words = sys.argv[:1], sys.argv
sys.argv += words[1:]
run_program(lambda words: main(), takes_words=True)
"""


@pytest.mark.parametrize("both", [True, False], ids=["2>&1", "2>"])
def test_a_run_goes_on_without_its_reader(tmp_path: pathlib.Path, both: bool):
  program = tmp_path / "program.py"
  program.write_text(PROGRAM)
  reader, writer = os.pipe()
  gone, tell = os.pipe()
  process = subprocess.Popen(
    [sys.executable, str(program), str(tmp_path / "w"), str(gone)],
    stdout=writer if both else subprocess.PIPE,
    stderr=writer,
    pass_fds=(gone,),
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  os.close(writer)
  with open(reader) as lines:  # like `head -1`
    assert "step 1/50" in lines.readline()
  os.write(tell, b"x")
  out, _ = process.communicate(timeout=120)
  assert process.returncode == 0
  rows = [json.loads(row) for row in (tmp_path / "w" / "metrics.jsonl").open()]
  assert [row["step"] for row in rows] == list(range(1, 51))
  if not both:
    assert out.startswith(b"results\n")
