"""Flags, endings and configs that benchmarks share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ml_collections
import rich
from absl import flags

from coa_jax.report.metrics import write_json
from coa_jax.report.tables import Table, rich_table
from configs import rl_world

QUICK = flags.DEFINE_bool("quick", False, "Less of everything: under a minute.")
OUT = flags.DEFINE_string("out", "", "JSON file to write the figures to.")
CASES = flags.DEFINE_string("cases", "", "Only cases whose name this regex finds.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of every contestant.", 1)
PYTHONS = {
  name: flags.DEFINE_string(f"{name}_python", sys.executable, f"Runs {name}'s worker.")
  for name in ("torch", "tunix", "vllm")
}

T = TypeVar("T")


@flags.validator("cases")
def _is_regex(pattern: str) -> bool:
  try:
    re.compile(pattern)
  except re.error as e:
    raise flags.ValidationError(f"no regular expression: {e}") from None
  return True


def chosen(cases: Mapping[str, T]) -> dict[str, T]:
  """The cases that --cases finds; with --quick the first of them.

  Raises:
    ValueError: it finds none; the message lists their names.
  """
  out = {name: case for name, case in cases.items() if re.search(CASES.value, name)}
  if not out:
    raise ValueError(f"--cases={CASES.value!r} finds none of: {', '.join(cases)}")
  return dict(list(out.items())[:1]) if QUICK.value else out


def quickstart_config(folder: str, quick: bool, seed: int) -> ml_collections.ConfigDict:
  """RL's config on a quickstart's world, from its SFT model.

  Args:
    folder: of a finished `experiments.quickstart`.
    quick: `rl_world`'s tiny settings.
    seed: of the rollouts.

  Raises:
    FileNotFoundError: there is no finished quickstart.
  """
  model, world = (os.path.join(folder, *x) for x in (("sft", "model"), ("world",)))
  if not os.path.isdir(model):
    raise FileNotFoundError(
      f"{model}: there is no such model; run python -m experiments.quickstart, or give "
      "--quickstart the folder of a finished one"
    )
  config = rl_world.get_config("tiny" if quick else "")
  config.init = model
  config.tasks.uri = os.path.join(world, "rl_tasks.jsonl")
  config.tools.corpus = os.path.join(world, "train_pages.jsonl")
  config.dev.uri = os.path.join(world, "dev_tasks.jsonl")
  config.dev.corpus = os.path.join(world, "dev_pages.jsonl")
  config.rollout.seed = seed
  return config


def program(
  run: Callable[[], dict[str, Any]], title: str, columns: Mapping[str, str], note: str
) -> Callable[[], None]:
  """A main that prints `run()`'s table and ratios; writes all of it where --out says.

  Args:
    run: returns "table" (rows), "ratios" (by name) and what else belongs in the file.
    title: of the table.
    columns: of the table: key of a row -> heading.
    note: below the table.
  """

  def main() -> None:
    figures = run()
    rich.print(rich_table(Table(title, figures["table"], dict(columns), note)))
    for name, ratio in figures["ratios"].items():
      print(f"{name}: {ratio:.2f}")
    if OUT.value:
      write_json(OUT.value, figures)

  return main
