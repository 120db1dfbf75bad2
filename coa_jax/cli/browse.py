"""Writes a page for browsing trajectories: filter, search, sort, compare a group.

  coa browse --workdir=runs/X/rl
  coa browse --trajectories='runs/X/rl/trajectories/step_*.jsonl'

--workdir takes a run; --trajectories takes files, globs and folders, and may be given
several times. The page is one file and opens without a server or a network; by default
it is `browse.html` in the run's folder. With the run's tokenizer, found in its `model`
folder, tokens can be coloured within the text by log-prob or policy version; with
--variant the page marks protocol violations.
"""

from __future__ import annotations

import os

from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.report.viewer import find_files, open_files, write_page
from coa_jax.runtime.config import ConfigError

_TRAJECTORIES = flags.DEFINE_multi_string("trajectories", [], "Files, globs, folders.")
_OUT = flags.DEFINE_string(
  "out", "", "The page; by default browse.html in the run's folder."
)
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", None, "A model folder; by default the `model` folder of the run."
)
_VARIANT = flags.DEFINE_string(
  "variant", None, "The run's rollout.variant, to show where the protocol is broken."
)


def run_of(file: str) -> str:
  """Returns the run's folder for RUN/trajectories/FILE or RUN/FILE."""
  folder = os.path.dirname(os.path.abspath(file))
  if os.path.basename(folder) == "trajectories":
    return os.path.dirname(folder)
  return folder


def run_tokenizer(file: str) -> Tokenizer | None:
  """Returns the tokenizer of a file's run; None if the run has none."""
  folder = os.path.join(run_of(file), "model")
  if not os.path.exists(os.path.join(folder, "tokenizer.json")):
    return None
  return Tokenizer.load(folder)


def main() -> None:
  """Writes the page and prints its path."""
  workdir = flags.FLAGS.workdir
  where = [*([workdir] if workdir else []), *_TRAJECTORIES.value]
  if not where:
    raise ConfigError("name a run by --workdir=DIR, or files by --trajectories=FILES")
  files = find_files(where)
  out = _OUT.value or os.path.join(workdir or run_of(files[0]), "browse.html")
  path = _TOKENIZER.value
  tokenizer = Tokenizer.load(path) if path else run_tokenizer(files[0])
  variant = get_variant(_VARIANT.value) if _VARIANT.value else None
  count = write_page(out, "Trajectories", open_files(files), variant, tokenizer)
  size = os.path.getsize(out) / 1e6
  print(f"{out}: {count} trajectories of {len(files)} files, {size:.1f} MB")


def command() -> None:
  """Runs the command line."""
  # Not on import: other programs have the same flag, and tests import both.
  flags.DEFINE_string("workdir", None, "A run; all its trajectories are shown.")
  run_program(main)
