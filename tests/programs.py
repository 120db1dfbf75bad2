"""Programs as users start them: a config file, a workdir, a process."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent


def config_file(path: pathlib.Path, config: dict[str, Any]) -> str:
  """Writes a config file that returns these sections; returns its name."""
  path.write_text(
    "import ml_collections\n\n\n"
    'def get_config(arg=""):\n'
    f"  return ml_collections.ConfigDict({config!r})\n"
  )
  return str(path)


def start(
  journey: str, config: str, workdir: pathlib.Path, *flags: str
) -> subprocess.Popen[str]:
  """Starts `experiments.JOURNEY` on a workdir."""
  command = [sys.executable, "-m", f"experiments.{journey}", f"--config={config}"]
  return subprocess.Popen(
    [*command, f"--workdir={workdir}", *flags],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
