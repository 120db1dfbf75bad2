"""Writes a page to browse trajectories with: filter, search, sort, compare a group.

  python -m experiments.browse --trajectories=runs/X/rl --out=browse.html
  python -m experiments.browse --trajectories='runs/X/rl/trajectories/step_*.jsonl'

--trajectories takes files, globs and folders, and may be given several times. The page
is one file that opens without a server or a network. With the run's tokenizer, which is
found where the run lies beside its `model` folder, tokens can be coloured within the
text by log-prob or policy version; with --variant the page says where a trajectory
breaks the protocol.
"""

from __future__ import annotations

import os

from absl import flags

from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.report.viewer import find_files, open_files, write_page
from experiments.launch import run_program

_TRAJECTORIES = flags.DEFINE_multi_string(
  "trajectories", None, "Files, globs, folders."
)
_OUT = flags.DEFINE_string("out", "browse.html", "The page.")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", None, "A model folder; by default the `model` folder of the run."
)
_VARIANT = flags.DEFINE_string(
  "variant", None, "The run's rollout.variant, to show where the protocol is broken."
)


def run_tokenizer(file: str) -> Tokenizer | None:
  """The tokenizer of the run that wrote RUN/trajectories/FILE, or None."""
  run = os.path.dirname(os.path.dirname(os.path.abspath(file)))
  folder = os.path.join(run, "model")
  if not os.path.exists(os.path.join(folder, "tokenizer.json")):
    return None
  return Tokenizer.load(folder)


def main() -> None:
  """Writes the page and says where."""
  files = find_files(_TRAJECTORIES.value)
  path = _TOKENIZER.value
  tokenizer = Tokenizer.load(path) if path else run_tokenizer(files[0])
  variant = get_variant(_VARIANT.value) if _VARIANT.value else None
  count = write_page(_OUT.value, "Trajectories", open_files(files), variant, tokenizer)
  size = os.path.getsize(_OUT.value) / 1e6
  print(f"{_OUT.value}: {count} trajectories of {len(files)} files, {size:.1f} MB")


if __name__ == "__main__":
  flags.mark_flag_as_required("trajectories")
  run_program(main)
