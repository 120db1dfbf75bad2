"""Programs as users start them: a config file, a workdir, a process."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

from coa_jax.data.tasks.world.build import WorldConfig, write_world
from configs import distill_world
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent


def config_file(path: pathlib.Path, config: dict[str, Any]) -> str:
  """Writes a config file that returns these sections; returns its name."""
  path.write_text(
    "import ml_collections\n\n\n"
    'def get_config(arg=""):\n'
    f"  return ml_collections.ConfigDict({config!r})\n"
  )
  return str(path)


def small_distillation(folder: pathlib.Path) -> str:
  """Writes a small world and the config file of a distillation in it; its name."""
  sizes = WorldConfig(towns=40, people=60, films=20, companies=20, train_worlds=1)
  world = write_world(folder, "train", 40, sizes)
  config = distill_world.get_config("tiny").to_dict()
  config["tasks"]["uri"] = world["tasks"]
  config["tools"] |= dict(corpus=world["corpus"], sandbox=BACKEND)
  return config_file(folder / "distill.py", config)


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


def start_together(
  journey: str, config: str, workdir: pathlib.Path, processes: int, *flags: str
) -> list[subprocess.Popen[str]]:
  """Starts a run of so many processes; one alone needs no others."""
  if processes == 1:
    return [start(journey, config, workdir, *flags)]
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  started = []
  for i in range(processes):
    where = f"--distributed={address},{processes},{i}"
    started.append(start(journey, config, workdir, where, *flags))
  return started


def wait_for_step(
  processes: list[subprocess.Popen[str]], workdir: pathlib.Path, step: int
) -> None:
  """Waits until a run has logged this step."""
  while reached(workdir) < step:
    for process in processes:
      assert process.poll() is None, process.communicate()
    time.sleep(0.02)


def ended(
  processes: list[subprocess.Popen[str]], status: int = 0, seconds: float = 600
) -> list[str]:
  """Waits until all have ended with this status; returns what they said."""
  # All are read at once: one whose pipe is full would hold up the others.
  try:
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as threads:
      errors = [
        threads.submit(lambda p=p: p.communicate(timeout=seconds)[1]) for p in processes
      ]
      texts = [each.result() for each in errors]
  finally:
    for process in processes:
      process.kill()
  assert [p.returncode for p in processes] == [status] * len(processes), texts
  return texts


def whole_lines(path: pathlib.Path) -> list[str]:
  """The lines of a file that is being written, but for half a last one."""
  return path.read_text().splitlines(keepends=True)[:-1] if path.exists() else []


def reached(workdir: pathlib.Path) -> int:
  """The last step that a run has logged; 0 for none."""
  logged = whole_lines(workdir / "metrics.jsonl")
  return max((json.loads(line)["step"] for line in logged), default=0)
