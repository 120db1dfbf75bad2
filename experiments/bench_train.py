"""The SFT step against torch with transformers, and against google-tunix, on a CPU.

  python -m experiments.bench_train [--quick] [--out=FILE.json]
    [--torch_python=/tmp/peer_torch/bin/python]   pip install torch transformers
    [--tunix_python=/tmp/peer_tunix/bin/python]   pip install google-tunix

Full fine-tuning of one Qwen3 in float32, random weights from one Hugging Face folder:
rows of 1,024 tokens with five segments each, attention inside segments, loss on three
quarters of the tokens, gradients clipped to norm 1, AdamW. Each contestant is a process
of its own that stays alive and is told how many steps to make; they take turns, one at
a time. Their first losses, before and after updates, must agree to 1e-3.

Sizes have small vocabularies where the model is small: 1,344 (the quickstart's), 4,096,
and 32,768 at 100M, so that the output matrix does not outweigh the layers. Every
contestant runs its row of `SETTINGS` (--settings changes it): how many rows go through
the model at once, what is compiled. All have glibc's allocator as `launch.prepare` sets
it. The settings are not tuned yet: that needs a machine with nothing else on it.

tokens/s: median over rounds of wall time; `cores` is processor time over wall time, far
below the machine's cores where something else ran beside. Peak MB is the process's
ru_maxrss: interpreter, libraries, compilation, weights, optimizer and activations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import rich
from absl import app, flags

from coa_jax.model.architecture import LoadConfig
from coa_jax.report.metrics import write_json
from coa_jax.report.tables import Table, rich_table
from experiments.bench import OUT, QUICK
from experiments.bench_train_work import JOB, Size
from experiments.launch import stop, with_clear_errors

_SIZES = flags.DEFINE_list("sizes", ["1M", "5M", "100M"], "Which of 1M, 5M, 100M.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of every contestant.", 1)
_PYTHONS = {
  "torch": flags.DEFINE_string("torch_python", sys.executable, "Runs torch's worker."),
  "tunix": flags.DEFINE_string("tunix_python", sys.executable, "Runs tunix's worker."),
}
_SETTINGS = flags.DEFINE_string(
  "settings", "{}", 'Other settings, as JSON: {"torch": {"rows": 2, "compile": true}}.'
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOLERANCE = 1e-3  # relative, between losses
CHECKED = 3  # steps whose losses are compared; the second and third follow updates
# What `launch.prepare` does in our process, for processes that can not call it.
_ALLOCATOR = {
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
  "MALLOC_TOP_PAD_": str(1 << 28),
}
# Modules that a peer needs, and what installs them.
PEERS = {
  "torch": (("numpy", "torch", "transformers"), "torch transformers"),
  "tunix": (("numpy", "tunix"), "google-tunix"),
}


def _model(V: int, D: int, L: int, N: int, K: int, H: int, F: int) -> dict[str, Any]:
  return {
    "vocab_size": V,
    "width": D,
    "layers": L,
    "heads": N,
    "kv_heads": K,
    "head_dim": H,
    "ff": F,
    # tunix computes its rotary frequencies with this base whatever its config says.
    "rope_theta": 1e6,
  }


SIZES = {
  "1M": Size(_model(1_344, 128, 4, 4, 2, 32, 384), rows=8, steps=4),
  "5M": Size(_model(4_096, 256, 6, 4, 2, 64, 640), rows=8, steps=2),
  "100M": Size(_model(32_768, 768, 12, 12, 4, 64, 2_048), rows=2, steps=1),
}
# `rows` go through the model at once, the rest of a step's after them.
SETTINGS: dict[str, dict[str, Any]] = {
  "ours": {"rows": 1},  # and fields of `LoadConfig`
  "torch": {"rows": 1, "attention": "sdpa", "compile": False, "remat": False},
  "tunix": {"rows": 1, "remat": "NONE"},  # and names of tunix's RematConfig
}


def _command(name: str, folder: str, python: str) -> list[str]:
  return [python, "-m", "experiments.bench_train_work", name, folder]


class Worker:
  """A contestant's process, seen from here; use as a context manager."""

  def __init__(
    self,
    name: str,
    folder: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
  ):
    """Starts it, in an environment if not ours, and waits until its model is loaded.

    Raises:
      ValueError: it ended; the message has the last lines that it wrote.
    """
    self.name = name
    self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
    self._process = subprocess.Popen(
      _command(name, folder, python),
      cwd=ROOT,
      env=env,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
    )
    self._read()

  def run(self, steps: int) -> dict[str, Any]:
    """Has it make steps: seconds, cpu_seconds, losses, peak_mb (see `serve`).

    Raises:
      ValueError: it ended.
    """
    with contextlib.suppress(BrokenPipeError):  # it has ended, as `_read` will say
      print(json.dumps({"steps": steps}), file=self._process.stdin, flush=True)
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
    self._process.terminate()
    self._process.wait()
    self._process.stdout.close()
    self._log.close()


def missing(python: str, modules: Sequence[str]) -> list[str]:
  """Which of the modules an interpreter lacks."""
  code = (
    "import importlib.util as u, sys;"
    "print(*[m for m in sys.argv[1:] if not u.find_spec(m)])"
  )
  done = subprocess.run(
    [python, "-c", code, *modules],
    capture_output=True,
    text=True,
    check=True,
    cwd=tempfile.gettempdir(),
  )
  return done.stdout.split()


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
    The losses of those first steps, and what every turn took (see `serve`), by
    contestant, ours first.

  Raises:
    ValueError: losses differ (see `check_losses`), or a worker ended.
  """
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    with open(os.path.join(folder, JOB), "w", encoding="utf-8") as f:
      json.dump({"size": dataclasses.asdict(size), "settings": settings}, f)
    # In a process of its own: a child's ru_maxrss begins with its parent's size.
    code = "from experiments import bench_train_work as w; w.write_work({!r})"
    subprocess.run(
      [sys.executable, "-c", code.format(folder)], cwd=ROOT, env=_env(size), check=True
    )
    workers = {
      name: stack.enter_context(Worker(name, folder, python, _env(size, name)))
      for name, python in {"ours": sys.executable, **pythons}.items()
    }
    first = {n: worker.run(checked)["losses"] for n, worker in workers.items()}
    for name, values in first.items():
      print(f"{name}: losses", *(f"{x:.6f}" for x in values), flush=True)
    check_losses(first, tolerance)
    turns: Turns = {n: [] for n in workers}
    for _ in range(rounds):
      for name, worker in workers.items():
        turns[name].append(worker.run(size.steps))
  return first, turns


def _env(size: Size, name: str = "ours") -> dict[str, str]:
  """Of a contestant's process. Half precision may use a GPU, and shares it."""
  if size.dtype != "float32":
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  return {**os.environ, "JAX_PLATFORMS": "cpu", **(_ALLOCATOR if name in PEERS else {})}


def measure(
  name: str,
  size: Size,
  pythons: Mapping[str, str],
  settings: Mapping[str, Mapping[str, Any]],
  rounds: int,
  checked: int = CHECKED,
) -> list[dict[str, Any]]:
  """Rows of the table: every contestant at one size, ours first.

  Args as of `race`, and the size's name.

  Raises:
    ValueError: losses differ (see `check_losses`), or a worker ended.
  """
  print(name, flush=True)
  first, turns = race(size, pythons, settings, rounds, checked)
  tokens = size.rows * size.length * size.steps
  rows = []
  for contestant, taken in turns.items():
    seconds = statistics.median(t["seconds"] for t in taken)
    rows.append(
      {
        "size": name,
        "contestant": contestant,
        "parameters": parameters(size),
        "vocabulary": size.model["vocab_size"],
        "rows": size.rows,
        "setting": ", ".join(f"{k} {v}" for k, v in settings[contestant].items()),
        "first_loss": first[contestant][0],
        "tokens_per_second": tokens / seconds,
        "slowest": tokens / max(t["seconds"] for t in taken),
        "fastest": tokens / min(t["seconds"] for t in taken),
        "cores": statistics.median(t["cpu_seconds"] / t["seconds"] for t in taken),
        "peak_mb": taken[-1]["peak_mb"],
      }
    )
  return rows


def parameters(size: Size) -> int:
  """Scalars of the model; the embedding is also the output matrix."""
  m = size.model
  heads = m["width"] * m["head_dim"] * 2 * (m["heads"] + m["kv_heads"])
  layer = heads + 3 * m["width"] * m["ff"] + 2 * m["width"] + 2 * m["head_dim"]
  return m["vocab_size"] * m["width"] + m["layers"] * layer + m["width"]


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Ours over theirs, by name; more than 1 is better in speed and worse in memory."""
  by = {(row["size"], row["contestant"]): row for row in rows}
  return {
    f"{size} {figure} over {peer}": by[size, "ours"][figure] / row[figure]
    for (size, peer), row in by.items()
    if peer != "ours"
    for figure in ("tokens_per_second", "peak_mb")
  }


def available(pythons: Mapping[str, str]) -> dict[str, str]:
  """The peers that can run; of others one line says what is missing."""
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


def merged(changes: str) -> dict[str, dict[str, Any]]:
  """`SETTINGS` with --settings over them.

  Raises:
    ValueError: not JSON, or a contestant or a setting that does not exist.
  """
  try:
    given = json.loads(changes)
  except json.JSONDecodeError as e:
    raise ValueError(f"--settings: not JSON ({e})") from e
  out = {name: dict(values) for name, values in SETTINGS.items()}
  ours_too = {f.name for f in dataclasses.fields(LoadConfig)}
  for name, values in given.items():
    known = set(out.get(name, ())) | (ours_too if name == "ours" else set())
    for key in values:
      if key not in known:
        raise ValueError(
          f"--settings: {name} has no {key!r}; accepted: {sorted(known)}"
        )
    out[name] |= values
  return out


_COLUMNS = {
  "size": "size",
  "vocabulary": "vocabulary",
  "contestant": "who",
  "tokens_per_second": "tokens/s",
  "cores": "cores",
  "peak_mb": "peak MB",
  "setting": "setting",
}


def run() -> dict[str, Any]:
  """Everything the flags ask for: the table and the ratios."""
  names = ["1M"] if QUICK.value else _SIZES.value
  for name in names:
    if name not in SIZES:
      raise ValueError(f"--sizes: no {name!r}; there are {', '.join(SIZES)}")
  settings = merged(_SETTINGS.value)
  peers = available({name: flag.value for name, flag in _PYTHONS.items()})
  rows = []
  for name in names:
    size, rounds, checked = SIZES[name], _ROUNDS.value, CHECKED
    if QUICK.value:
      size, rounds, checked = dataclasses.replace(size, rows=2, steps=1), 2, 2
    rows += measure(name, size, peers, settings, rounds, checked)
  return {"table": rows, "ratios": ratios(rows)}


def main(argv: list[str]) -> None:
  """Prints the table and the ratios; writes them where --out says."""
  if argv[1:]:
    stop(f"unexpected argument {argv[1]!r}")
  figures = with_clear_errors(run)
  note = "Float32, rows of 1,024 tokens; medians of rounds by turns; peak: ru_maxrss."
  rich.print(rich_table(Table("SFT step", figures["table"], _COLUMNS, note)))
  for name, ratio in figures["ratios"].items():
    print(f"{name}: {ratio:.2f}")
  if OUT.value:
    write_json(OUT.value, figures)


if __name__ == "__main__":
  app.run(main)
