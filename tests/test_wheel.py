"""The installed wheel, without a checkout: its commands, training and a chat."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest
import toy

import coa_jax
from coa_jax.cli.main import COMMANDS
from coa_jax.protocol.trajectory import write_jsonl
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent
SFT = """
import ml_collections

def get_config():
  config = ml_collections.ConfigDict()
  config.init = ""
  config.model = dict(width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ff=64)
  config.data = dict(
    trajectories="trajectories.jsonl",
    steps=2,
    rows=2,
    length=128,
    validation=1,
    vocab_size=384,
  )
  return config
"""
CHAT = f"""
import ml_collections

def get_config():
  config = ml_collections.ConfigDict()
  config.init = "model"
  config.rollout = dict(
    variant="unified", style="brief", slots=1, window=4, max_len=128, prefill_rows=3
  )
  config.tools = dict(tools=("code",), sandbox={BACKEND!r})
  config.tasks = dict(uri="nothing reads this")
  return config
"""


def run(*words: object, cwd: pathlib.Path, stdin: str = "") -> str:
  """Runs a command without the checkout; it must succeed. Returns standard output."""
  env = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
  done = subprocess.run(
    list(map(str, words)),
    cwd=cwd,
    env=env | {"COLUMNS": "200"},
    input=stdin,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_every_command_runs_from_the_wheel(tmp_path):
  # --- Build: from a copy, because setuptools leaves folders in the source.
  copy = tmp_path / "copy"
  for folder in ("coa_jax", "tools_sandbox"):
    shutil.copytree(ROOT / folder, copy / folder)
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, copy)
  pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
  build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path]
  run(*pip, *build, copy, cwd=tmp_path)
  (wheel,) = tmp_path.glob("*.whl")
  assert wheel.name.startswith(f"coa_jax-{coa_jax.__version__}-")

  # --- Install: with this environment's dependencies from a path file, which does not
  # make their folder a site folder, so an editable install there has no effect.
  venv = tmp_path / "venv"
  run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
  site = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
  (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
  python = venv / "bin" / "python"
  run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=venv)

  # --- Run.
  work = tmp_path / "work"
  work.mkdir()
  where = run(python, "-c", "import coa_jax; print(coa_jax.__file__)", cwd=work)
  assert where.startswith(str(site))
  coa = venv / "bin" / "coa"
  listed = run(coa, cwd=work)
  for name in COMMANDS:
    assert f"  {name} " in listed
    said = subprocess.run([coa, name, "--help"], cwd=work, capture_output=True)
    assert b"flags:" in said.stdout and not said.stderr, said.stderr

  examples = toy.trajectories()
  for trajectory in examples:
    for segment in trajectory.segments:
      segment.ids = []
  write_jsonl(work / "trajectories.jsonl", examples)
  (work / "sft.py").write_text(SFT)
  run(coa, "sft", "--config=sft.py", "--workdir=run", "--compile_cache=", cwd=work)
  assert (work / "run" / "results.json").exists()
  export = ["export", "--workdir=run", "--out=exported"]
  run(coa, *export, cwd=work)
  assert (work / "exported" / "model" / "model.safetensors").exists()

  toy.save_policy(str(work / "model"), toy.actor().params)
  (work / "chat.py").write_text(CHAT)
  chat = ["chat", "--config=chat.py", "--compile_cache=", "--quiet"]
  assert run(coa, *chat, cwd=work, stdin="2 + 3\n") == "5\n"
