"""Writes the seeded world: pages and tasks of train, dev and test as JSON lines.

  python -m experiments.make_world --directory=runs/world

Task files: train (distillation), rl (other questions over the same worlds), dev and
test (worlds with unseen names), ood (untrained families, over the test worlds).
"""

from collections.abc import Sequence

from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.data.tasks.world.build import (
  MOST_TASKS,
  TRAIN_MIX,
  Mix,
  WorldConfig,
  write_world,
)
from coa_jax.data.tasks.world.questions import HELD_OUT
from coa_jax.runtime.lock import hold

_DIRECTORY = flags.DEFINE_string("directory", "runs/world", "Output folder.")
_WORLD_SEED = flags.DEFINE_integer("world_seed", 0, "Seed for every world's facts.")
_TRAIN = flags.DEFINE_integer("train", 13000, "Tasks for distillation.", 1, MOST_TASKS)
_RL = flags.DEFINE_integer("rl", 6000, "Tasks for RL.", 1, MOST_TASKS)
_HELD_OUT = flags.DEFINE_integer(
  "held_out", 600, "Tasks each for dev, test and ood.", 1, MOST_TASKS
)


def make_world(
  directory: str,
  seed: int,
  train: int,
  rl: int,
  held_out: int,
  unseen: int | None = None,
  mix: Mix = WorldConfig.mix,
  train_mix: Mix = TRAIN_MIX,
  unseen_families: Sequence[str] = HELD_OUT,
) -> None:
  """Writes every file into `directory`.

  Args:
    directory: made if missing.
    seed: for facts and questions.
    train: number of distillation tasks.
    rl: number of RL tasks.
    held_out: number of tasks each in dev, test and ood.
    unseen: number of ood tasks, if different.
    mix: dev's and test's families with weights.
    train_mix: train's and rl's.
    unseen_families: ood's, with equal weights.
  """
  if unseen is None:
    unseen = held_out
  train_config = WorldConfig(mix=train_mix)
  held_out_config = WorldConfig(mix=mix)
  ood_config = WorldConfig(mix=tuple((name, 1.0) for name in unseen_families))
  # (worlds, task file's name, tasks, families, questions' seed). rl has train's worlds
  # and another seed.
  files = (
    ("train", "train", train, train_config, 0),
    ("train", "rl", rl, train_config, 1),
    ("dev", "dev", held_out, held_out_config, 0),
    ("test", "test", held_out, held_out_config, 0),
    ("test", "ood", unseen, ood_config, 0),
  )
  with hold(directory):
    for split, name, n, config, task_seed in files:
      write_world(directory, split, n, config, seed, task_seed, name)


def main() -> None:
  """Writes all files and prints their paths."""
  if not _DIRECTORY.value:
    raise ValueError("--directory is empty; name the folder to write to")
  make_world(
    _DIRECTORY.value, _WORLD_SEED.value, _TRAIN.value, _RL.value, _HELD_OUT.value
  )
  print(f"wrote pages and tasks of train, rl, dev, test and ood to {_DIRECTORY.value}")


if __name__ == "__main__":
  run_program(main)
