"""Starts programs as users do: with a config file, in a workdir, as a process."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

import ml_collections
import toy

from coa_jax.data.tasks.world.build import WorldConfig, write_world
from coa_jax.protocol.trajectory import write_jsonl
from configs import distill_world
from tests.backend import BACKEND

ROOT = pathlib.Path(__file__).parent.parent


def config_file(path: pathlib.Path, config: dict[str, Any]) -> str:
  """Writes a config file that returns these sections; returns its path."""
  path.write_text(
    "import ml_collections\n\n\n"
    'def get_config(arg=""):\n'
    f"  return ml_collections.ConfigDict({config!r})\n"
  )
  return str(path)


def small_distillation(folder: pathlib.Path) -> str:
  """Writes a small world and a distillation config file for it; returns its path."""
  sizes = WorldConfig(towns=40, people=60, films=20, companies=20, train_worlds=1)
  world = write_world(folder, "train", 40, sizes)
  config = distill_world.get_config("tiny").to_dict()
  config["tasks"]["uri"] = world["tasks"]
  config["tools"] |= dict(corpus=world["corpus"], sandbox=BACKEND)
  return config_file(folder / "distill.py", config)


def toy_runs(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Writes the toy policy and its inputs; returns configs of short runs by stage."""
  toy.save_policy(str(folder / "model"), toy.params())
  write_jsonl(folder / "data.jsonl", toy.trajectories() * 6)
  rows = [{"id": q, "question": q, "answers": ["5"]} for q in ("2 + 3", "mixed")]
  write_jsonl(folder / "tasks.jsonl", rows)
  init = str(folder / "model")
  tasks = dict(uri=str(folder / "tasks.jsonl"))
  data = dict(trajectories=str(folder / "data.jsonl"), steps=4, rows=2, validation=2)
  plays = dict(
    init=init,
    rollout=dict(style="brief", slots=4, max_len=toy.MAX_LEN),
    tools=dict(tools=["code"], enabled=False),
    tasks=tasks,
  )
  algo = dict(
    steps=2,
    keep_every=1,
    sampling=dict(prompts=2, samples=2, rounds=1),
    batch=dict(rows=4, length=128),
  )
  return {
    "sft": dict(init=init, data=data | dict(length=toy.MAX_LEN)),
    "rl": plays | dict(algo=algo, dev=dict(every=2, **tasks)),
    "evaluate": plays | dict(eval=dict(samples=8)),
  }


def small_evaluation(folder: pathlib.Path) -> ml_collections.ConfigDict:
  """Writes a half-trained policy, tasks and corpus; returns an evaluation config."""
  toy.save_policy(str(folder / "model"), toy.actor(60).params)
  write_jsonl(folder / "tasks.jsonl", [t.to_json() for t in toy.TASKS])
  page = {"id": "ur", "title": "Ur", "text": "Ur: its capital is Uruk."}
  write_jsonl(folder / "pages.jsonl", [page])
  corpus = str(folder / "pages.jsonl")
  rollout = dict(variant="unified", style="brief", slots=4, window=16)
  return ml_collections.ConfigDict(
    dict(
      init=str(folder / "model"),
      rollout=rollout | dict(max_len=toy.MAX_LEN),
      tools=dict(tools=toy.TOOLS, corpus=corpus, top_k=1, sandbox=BACKEND),
      tasks=dict(uri=str(folder / "tasks.jsonl")),
      eval=dict(samples=3),
    )
  )


def free_address() -> str:
  """A free address on this machine."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{s.getsockname()[1]}"


def start(
  journey: str, config: str, workdir: pathlib.Path | str, *flags: str
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
  """Starts a run of N processes; a single one needs no address."""
  if processes == 1:
    return [start(journey, config, workdir, *flags)]
  address = free_address()
  return [
    start(journey, config, workdir, f"--distributed={address},{processes},{i}", *flags)
    for i in range(processes)
  ]


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
  """Waits until all processes end with this status; returns their standard errors."""
  # Read all pipes at once: a process with a full pipe would block the others.
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
  """The complete lines of a growing file; [] without a file."""
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [line for line in lines if line.endswith("\n")]


def reached(workdir: pathlib.Path) -> int:
  """The last logged step by `whole_lines`; 0 for none."""
  logged = whole_lines(workdir / "metrics.jsonl")
  return max((json.loads(line)["step"] for line in logged), default=0)
