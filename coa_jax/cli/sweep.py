r"""Runs one stage for every combination of field values and seeds.

  coa sweep --workdir=runs/lr --grid optim.lr=1e-3,3e-3 --seeds=3 \
    -- coa sft --config=configs/sft_world.py --config.data.steps=400

Each combination is a separate run below --workdir, one after the other, named by its
values. The same command resumes a stopped sweep; --shard=I/N runs every Nth run (I from
0), for N machines with a shared folder. At the end all runs are compared as in
`coa compare`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence

from absl import flags

from coa_jax.cli.compare import compare
from coa_jax.cli.config_help import CONFIGS, read_class
from coa_jax.cli.launch import config_of_words, run_program
from coa_jax.cli.main import split_program
from coa_jax.cli.shards import read_shard
from coa_jax.runtime.config import ConfigError, read_config
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.shard import Shard

# Stage -> the field that numbers repetitions of a run.
SEED_FIELDS = {
  "experiments.distill": "scripted.seed",
  "experiments.sft": "data.seed",
  "experiments.rl": "rollout.seed",
  "experiments.evaluate": "rollout.seed",
}
_RECORD = "sweep.json"
_ALL = Shard(0, 1)


def parse_grid(text: str) -> tuple[str, list[str]]:
  """Reads "FIELD=A,B,C"; commas within brackets or quotes do not separate.

  Raises:
    ConfigError: the text has another form.
  """
  field, equals, rest = text.partition("=")
  field = field.removeprefix("--config.").removeprefix("config.")
  values = [""]
  depth = 0
  quote = ""
  for char in rest:
    if quote:
      quote = "" if char == quote else quote
    elif char in "'\"":
      quote = char
    elif char in "([{":
      depth += 1
    elif char in ")]}":
      depth -= 1
    elif char == "," and not depth:
      values.append("")
      continue
    values[-1] += char
  if not equals or not field or not all(values):
    raise ConfigError(
      f"--grid={text}: write FIELD=VALUE,VALUE as in optim.lr=1e-3,3e-3"
    )
  return field, values


def combinations(
  grid: Sequence[tuple[str, Sequence[str]]], seed_field: str, seeds: int
) -> Iterator[list[str]]:
  """Yields each run's fields, as "FIELD=VALUE"; a combination's seeds in a row."""
  axes = [[f"{field}={value}" for value in values] for field, values in grid]
  if seeds:
    axes.append([f"{seed_field}={seed}" for seed in range(seeds)])
  for choice in itertools.product(*axes):
    yield list(choice)


def sweep(
  workdir: str,
  command: Sequence[str],
  grid: Sequence[tuple[str, Sequence[str]]],
  seeds: int = 0,
  shard: Shard = _ALL,
) -> list[str]:
  """Runs all unfinished runs.

  Args:
    workdir: the runs' common folder.
    command: `coa` and a command, or a module; and its flags, without --workdir.
    grid: fields and their values.
    seeds: runs per combination, with seeds 0, 1, ...; 0 for one run with the
      config's seed.
    shard: our part of the runs.

  Returns:
    The workdirs of all runs in the sweep.

  Raises:
    ConfigError: the folder holds another command's sweep; or runs have failed
      (reported after all others have ended).
  """
  module, start, arguments = split_program(command)
  if start == [module] and importlib.util.find_spec(module) is None:
    raise ConfigError(f"there is no program {module!r}; give a command, as: -- coa sft")
  if seeds and module not in SEED_FIELDS:
    known = ", ".join(SEED_FIELDS)
    raise ConfigError(f"--seeds: {module} has no known seed; only {known} have")
  if any(word.startswith("--workdir") for word in arguments):
    raise ConfigError("--workdir belongs before the --; each run has a folder in it")
  _check_record(workdir, list(command))

  # --- Every run's config, before the first run.
  runs = list(combinations(grid, SEED_FIELDS.get(module, ""), seeds))
  stage = module.removeprefix("experiments.")
  for fields in runs if stage in CONFIGS else ():
    words = [*arguments, *(f"--config.{field}" for field in fields)]
    config_class = read_class(stage)
    try:
      read_config(config_of_words(words, config_class), config_class)
    except (ValueError, flags.Error) as e:
      raise ConfigError(f"--grid: {' '.join(fields) or 'the command'}: {e}") from e

  # --- One run after the other.
  names = [folder_name(fields) for fields in runs]
  for number, name in enumerate(names):
    if names.count(name) > 1:  # values that differ only in characters without a place
      names[number] = f"{name}-{zlib.crc32(repr(runs[number]).encode()):08x}"
  folders = [os.path.join(workdir, name) for name in names]
  ours = range(shard.index, len(runs), shard.count)
  failed = []
  for number, i in enumerate(ours, 1):
    title = f"[{number}/{len(ours)}] {folders[i]}"
    if os.path.exists(os.path.join(folders[i], "results.json")):
      print(f"{title}: done before", flush=True)
      continue
    print(title, flush=True)
    flags_of_run = [f"--config.{field}" for field in runs[i]]
    words = [*arguments, *flags_of_run, f"--workdir={folders[i]}"]
    # The run's results are in the final table; its messages are shown meanwhile.
    done = subprocess.run(
      [sys.executable, "-m", *start, *words], stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode in (130, 143):  # Ctrl-C, SIGTERM: saved
      raise KeyboardInterrupt
    if done.returncode:
      failed.append(folders[i])
  if failed:
    raise ConfigError(f"{len(failed)} of {len(ours)} runs failed: {', '.join(failed)}")
  return folders


def folder_name(fields: Sequence[str]) -> str:
  """Returns a run's folder name: its fields, without characters unsafe in a path."""
  name = ",".join(fields) or "run"
  return "".join(c if c.isalnum() or c in "._=,-+" else "_" for c in name)


def _check_record(workdir: str, command: list[str]) -> None:
  """Refuses a folder with another command's runs."""
  path = os.path.join(workdir, _RECORD)
  if os.path.exists(path):
    before = read_object(path).get("command")
    if before != command:
      raise ConfigError(
        f"{workdir} holds a sweep of {before}, not of {command}; choose another "
        "workdir (only a larger grid or more seeds are accepted here)"
      )
    return
  with atomic_write(path) as f:
    json.dump({"command": command}, f, indent=2)


def _define_flags() -> None:
  flags.DEFINE_string("workdir", None, "The folder of all runs.", required=True)
  flags.DEFINE_multi_string("grid", [], "FIELD=VALUE,VALUE of the config; repeatable.")
  flags.DEFINE_integer(
    "seeds", 0, "Runs of each, with seeds 0, 1, ...; 0 for one.", lower_bound=0
  )
  flags.DEFINE_string("shard", "0/1", "I/N: run every Nth, beginning with the Ith.")


def main(command: list[str]) -> None:
  """Runs the command line's sweep, and compares its finished runs."""
  if not command:
    raise ConfigError("after -- name the command: -- coa sft --config=...")
  values = flags.FLAGS
  folders = sweep(
    values.workdir,
    command,
    [parse_grid(text) for text in values.grid],
    values.seeds,
    read_shard(values.shard),
  )
  done = [f for f in folders if os.path.exists(os.path.join(f, "results.json"))]
  if not done:
    print("no run has a results.json: nothing to compare")
    return
  compare(done, os.path.join(values.workdir, "compare.html"))


def command() -> None:
  """Runs the command line."""
  _define_flags()
  run_program(main, takes_words=True)
