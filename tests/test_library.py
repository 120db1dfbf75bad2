"""The program in docs/library.md runs."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import toy

from coa_jax.model.hf.io import save_model
from coa_jax.model.transformer import init_params
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = '"runs/quickstart/rl/model"'
TOOLS = 'ToolsConfig(tools=("code",), '


@pytest.mark.slow
def test_the_program_plays_and_learns(tmp_path):
  folder = tmp_path / "model"
  save_model(
    str(folder), toy.MODEL, init_params(toy.MODEL, 0), tokenizer=toy.tokenizer()
  )
  page = (ROOT / "docs" / "library.md").read_text()
  program = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
  assert FOLDER in program and TOOLS in program
  program = program.replace(FOLDER, repr(str(folder)))
  program = program.replace(TOOLS, f"{TOOLS}sandbox={BACKEND!r}, ")
  script = tmp_path / "program.py"
  script.write_text(program)
  done = subprocess.run(
    [sys.executable, str(script)],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  assert done.returncode == 0, done.stderr
  *attempts, figures = done.stdout.splitlines()
  assert len(attempts) >= 4
  assert figures.startswith("{") and "logp_diff" in figures
