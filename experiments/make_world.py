"""Writes a seeded world as JSON lines: pages and tasks for train, dev and test.

  python -m experiments.make_world --directory=runs/world

Task files: train (distillation), rl (other questions over the same worlds), dev and
test (worlds with unseen names), ood (untrained families, over the test worlds).
"""

from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.data.tasks.world.build import TRAIN_MIX, WorldConfig, write_world
from coa_jax.data.tasks.world.questions import HELD_OUT
from coa_jax.runtime.lock import hold

_MOST_TASKS = 1_000_000  # more than any split's worlds have questions
_DIRECTORY = flags.DEFINE_string("directory", "runs/world", "The output folder.")
_WORLD_SEED = flags.DEFINE_integer("world_seed", 0, "Seed of the facts of every world.")
_TRAIN = flags.DEFINE_integer(
  "train", 13000, "Number of tasks to distil.", 1, _MOST_TASKS
)
_RL = flags.DEFINE_integer("rl", 6000, "Number of tasks for RL.", 1, _MOST_TASKS)
_HELD_OUT = flags.DEFINE_integer(
  "held_out", 600, "Number of tasks each in dev, test and ood.", 1, _MOST_TASKS
)
_FILLER = flags.DEFINE_integer(
  "filler", 0, "Words without a fact at the end of each page.", 0
)


def make_world(
  directory: str, seed: int, train: int, rl: int, held_out: int, filler: int = 0
) -> None:
  """Writes every file into `directory`; the arguments are as the flags."""
  seen = WorldConfig(mix=TRAIN_MIX, filler=filler)
  unseen = WorldConfig(mix=tuple((name, 1.0) for name in HELD_OUT), filler=filler)
  # (worlds, task file, number of tasks, families, question seed). rl asks about train's
  # worlds, with another seed.
  files = (
    ("train", "train", train, seen, 0),
    ("train", "rl", rl, seen, 1),
    ("dev", "dev", held_out, WorldConfig(filler=filler), 0),
    ("test", "test", held_out, WorldConfig(filler=filler), 0),
    ("test", "ood", held_out, unseen, 0),
  )
  with hold(directory):
    for split, name, n, config, task_seed in files:
      write_world(directory, split, n, config, seed, task_seed, name)


def main() -> None:
  """Writes all files and prints their folder."""
  if not _DIRECTORY.value:
    raise ValueError("--directory is empty; name the folder to write to")
  make_world(
    _DIRECTORY.value,
    _WORLD_SEED.value,
    _TRAIN.value,
    _RL.value,
    _HELD_OUT.value,
    _FILLER.value,
  )
  print(f"wrote pages and tasks of train, rl, dev, test and ood to {_DIRECTORY.value}")


if __name__ == "__main__":
  run_program(main)
