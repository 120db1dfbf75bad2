"""Writes the seeded world: pages and tasks of train, dev and test as JSON lines.

  python -m experiments.make_world --directory=runs/world

Task files: train (distillation), rl (other questions over the same worlds), dev and
test (worlds of unseen names), ood (families never trained on, over the test worlds).
"""

import dataclasses

from absl import app, flags

from coa_jax.tasks.world import WorldConfig, write_world
from coa_jax.tasks.world_questions import HELD_OUT

_DIRECTORY = flags.DEFINE_string("directory", "runs/world", "Where to write.")
_WORLD_SEED = flags.DEFINE_integer("world_seed", 0, "Decides the facts of every world.")
_TRAIN = flags.DEFINE_integer("train", 13000, "Tasks to distil.")
_RL = flags.DEFINE_integer("rl", 6000, "Tasks to practise on.")
_HELD_OUT = flags.DEFINE_integer("held_out", 600, "Tasks each of dev, test and ood.")


def make_world(directory: str, seed: int, train: int, rl: int, held_out: int) -> None:
  """Writes every file into `directory`.

  Args:
    directory: made if missing.
    seed: decides the facts and what is asked.
    train: tasks to distil.
    rl: tasks to practise on.
    held_out: tasks each of dev, test and ood.
  """
  config = WorldConfig()
  ood = dataclasses.replace(config, mix=tuple((family, 1.0) for family in HELD_OUT))
  for split, name, n, mixed, task_seed in (
    ("train", "train", train, config, 0),
    ("train", "rl", rl, config, 1),
    ("dev", "dev", held_out, config, 0),
    ("test", "test", held_out, config, 0),
    ("test", "ood", held_out, ood, 0),
  ):
    write_world(directory, split, n, mixed, seed, task_seed, name)


def main(argv: list[str]) -> None:
  """Writes everything and says where."""
  del argv
  make_world(
    _DIRECTORY.value, _WORLD_SEED.value, _TRAIN.value, _RL.value, _HELD_OUT.value
  )
  print(f"wrote pages and tasks of train, rl, dev, test and ood to {_DIRECTORY.value}")


if __name__ == "__main__":
  app.run(main)
