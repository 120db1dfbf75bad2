"""The console script `coa`: `coa COMMAND --config=X.py --workdir=DIR ...`."""

from __future__ import annotations

import importlib
import signal
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

from coa_jax.runtime.fields import nearest

# Command -> its purpose. The module has the same name, or the name in MODULES.
COMMANDS = {
  "distill": "play teacher runs and write them as trajectories",
  "sft": "fine-tune a model on trajectories",
  "rl": "train a model on tasks by agentic RL",
  "evaluate": "measure a model on tasks",
  "benchmark": "measure a model on a suite of benchmarks, in one table",
  "serve": "serve a model behind OpenAI's API",
  "chat": "ask a model in the terminal",
  "browse": "write a page that shows a run's trajectories",
  "export": "write a run's model as a Hugging Face folder",
  "tasks": "check a set of tasks, or select some by how often a model solves them",
  "synthesize": "make tasks from documents",
  "import": "read agent traces of others as trajectories",
  "sweep": "run a command over a grid of config fields",
  "compare": "draw runs side by side",
  "pod": "write the manifest or script of a run on TPU slices, Kubernetes or Slurm",
}
MODULES = {"import": "import_traces"}


def usage() -> str:
  """Lists the commands, one per line."""
  lines = "\n".join(f"  {name:<12}{about}" for name, about in COMMANDS.items())
  return f"usage: coa COMMAND [--FLAG=VALUE ...]\n\n{lines}\n\ncoa COMMAND --help: more"


def split_program(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
  """Splits a command line, `coa COMMAND ...` or `MODULE ...`, for another process.

  Returns:
    The program as `experiments.NAME`, or the module; `python -m`'s words; the flags.
  """
  module, *rest = words
  if module != "coa":
    return module, [module], rest
  command, *rest = rest or [""]
  if command not in COMMANDS:
    _refuse(command)
  name = MODULES.get(command, command)
  return f"experiments.{name}", ["coa_jax.cli.main", command], rest


def run(command: str) -> None:
  """Runs a command in `COMMANDS` with the command line's words."""
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
  try:
    module = importlib.import_module(f"coa_jax.cli.{MODULES.get(command, command)}")
    # --help prints the main module's docstring and the flags defined under the
    # program's name.
    sys.modules["__main__"].__doc__ = module.__doc__
    sys.argv[0] = module.__name__
    module.command()
  except KeyboardInterrupt:  # before any work, which handles its own
    print("\ninterrupted", file=sys.stderr)
    sys.exit(130)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
  """Raises KeyboardInterrupt, a moment later if it would have no effect now.

  Python ignores what a callback of its garbage collector raises, and JAX has one.
  """
  del number
  while frame is not None:
    if frame.f_code.co_name == "_xla_gc_callback":
      signal.signal(signal.SIGALRM, _interrupt)
      signal.setitimer(signal.ITIMER_REAL, 0.01)
      return
    frame = frame.f_back
  raise KeyboardInterrupt


def main() -> None:
  """Runs the command named in the command line; without a name, lists all."""
  command = sys.argv[1] if len(sys.argv) > 1 else "--help"
  if command in ("-h", "-help", "--help"):
    print(usage())
  elif command in COMMANDS:
    del sys.argv[1]
    run(command)
  else:
    _refuse(command)


def _refuse(command: str) -> NoReturn:
  """Ends the program with one line that names the nearest command, or all."""
  from coa_jax.cli.launch import stop  # imports what --help does not need

  stop(f"coa {command}: there is no such command{nearest(command, COMMANDS)}")


if __name__ == "__main__":
  main()
