"""Flags, output and configs shared by benchmarks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ml_collections
import rich
from absl import flags

from coa_jax.report.metrics import write_json
from coa_jax.report.tables import Table
from configs import rl_world
from experiments.bench import peers

QUICK = flags.DEFINE_bool("quick", False, "A smaller run, under a minute.")
OUT = flags.DEFINE_string("out", "", "JSON file for the figures.")
CASES = flags.DEFINE_string("cases", "", "Only cases with names matching this regex.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns per contestant.", 1)
_BEFORE = flags.DEFINE_string(
  "before", "", "Another checkout of this repository, as a contestant."
)
_PYTHONS = {
  name: flags.DEFINE_string(f"{name}_python", sys.executable, f"Runs {name}'s worker.")
  for name in peers.PEERS
}

T = TypeVar("T")
Row = Mapping[str, Any]


@flags.validator("cases")
def _is_regex(pattern: str) -> bool:
  try:
    re.compile(pattern)
  except re.error as e:
    raise flags.ValidationError(f"no regular expression: {e}") from None
  return True


def chosen(cases: Mapping[str, T]) -> dict[str, T]:
  """The cases that match --cases; with --quick only the first."""
  out = {name: case for name, case in cases.items() if re.search(CASES.value, name)}
  if not out:
    raise ValueError(f"--cases={CASES.value!r} finds none of: {', '.join(cases)}")
  if QUICK.value:
    return dict(list(out.items())[:1])
  return out


def rounds() -> int:
  """Turns per contestant: --rounds, or one with --quick."""
  if QUICK.value:
    return 1
  return ROUNDS.value


def available(*names: str) -> dict[str, str]:
  """Returns the usable peers' interpreters (see `peers.available`).

  With --before also that checkout, under "before".

  Raises:
    ValueError: --before is not a checkout of this repository.
  """
  out = peers.available({name: _PYTHONS[name].value for name in names})
  if _BEFORE.value:
    if not os.path.isfile(os.path.join(_BEFORE.value, "experiments/bench/peers.py")):
      raise ValueError(f"--before={_BEFORE.value} is no checkout of this repository")
    out[peers.BEFORE] = _BEFORE.value
  return out


def by_model(cases: Mapping[str, tuple[Any, ...]]) -> dict[tuple, list[Any]]:
  """Groups cases that differ only in their last field and so share a model."""
  out: dict[tuple, list[Any]] = {}
  for *model, varied in cases.values():
    out.setdefault(tuple(model), []).append(varied)
  return out


def ratios(
  rows: Sequence[Row], case: Sequence[str], figures: Sequence[str]
) -> dict[str, float]:
  """Our figures over the peers', by "CASE FIGURE over PEER".

  The keys `case` identify a case; our row comes first in each.
  """
  out = {}
  ours: dict[str, Row] = {}
  for row in rows:
    title = ", ".join(str(row[name]) for name in case)
    if row["contestant"] == "ours":
      ours[title] = row
      continue
    for figure in figures:
      name = f"{title} {figure} over {row['contestant']}"
      out[name] = ours[title][figure] / row[figure]
  return out


def quickstart_config(folder: str, quick: bool, seed: int) -> ml_collections.ConfigDict:
  """RL's config for a finished quickstart's world and SFT model."""
  # --- The SFT model, every run's start.
  model = os.path.join(folder, "sft", "model")
  world = os.path.join(folder, "world")
  if not os.path.isdir(model):
    raise FileNotFoundError(
      f"{model}: there is no such model; run python -m experiments.quickstart, or give "
      "--quickstart the folder of a finished one"
    )

  # --- Its world's tasks and pages.
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
  """Makes a main that prints `run()`'s table and ratios, and writes --out.

  `run` returns "table" (rows), "ratios" (by name) and further fields for the file.
  """

  def main() -> None:
    figures = run()
    rich.print(Table(title, figures["table"], dict(columns), note))
    for name, ratio in figures["ratios"].items():
      print(f"{name}: {ratio:.2f}")
    if OUT.value:
      write_json(OUT.value, figures)

  return main
