"""Writes the seeded world: pages and tasks of train, dev and test as JSON lines.

  python -m experiments.make_world --directory=runs/world

Task files: train (distillation), rl (other questions over the same worlds), dev and
test (worlds of unseen names), ood (families never trained on, over the test worlds).
"""

import dataclasses
from collections.abc import Sequence

from absl import app, flags

from coa_jax.tasks.world import Mix, WorldConfig, write_world
from coa_jax.tasks.world_questions import HELD_OUT
from experiments.launch import stop, with_clear_errors

_DIRECTORY = flags.DEFINE_string("directory", "runs/world", "Where to write.")
_WORLD_SEED = flags.DEFINE_integer("world_seed", 0, "Decides the facts of every world.")
_TRAIN = flags.DEFINE_integer("train", 13000, "Tasks to distil.", 1)
_RL = flags.DEFINE_integer("rl", 6000, "Tasks to practise on.", 1)
_HELD_OUT = flags.DEFINE_integer("held_out", 600, "Of dev, test and ood each.", 1)


def make_world(
  directory: str,
  seed: int,
  train: int,
  rl: int,
  held_out: int,
  unseen: int | None = None,
  mix: Mix = WorldConfig.mix,
  unseen_families: Sequence[str] = HELD_OUT,
) -> None:
  """Writes every file into `directory`.

  Args:
    directory: made if missing.
    seed: decides the facts and what is asked.
    train: tasks to distil.
    rl: tasks to practise on.
    held_out: tasks each of dev, test and ood.
    unseen: tasks of ood, where it is to have another number.
    mix: families and their weights, of all but ood.
    unseen_families: those of ood, in equal parts.
  """
  config = WorldConfig(mix=mix)
  ood = dataclasses.replace(config, mix=tuple((name, 1.0) for name in unseen_families))
  for split, name, n, mixed, task_seed in (
    ("train", "train", train, config, 0),
    ("train", "rl", rl, config, 1),
    ("dev", "dev", held_out, config, 0),
    ("test", "test", held_out, config, 0),
    ("test", "ood", held_out if unseen is None else unseen, ood, 0),
  ):
    write_world(directory, split, n, mixed, seed, task_seed, name)


def main(argv: list[str]) -> None:
  """Writes everything and says where."""
  if argv[1:]:
    stop(f"unexpected argument {argv[1]!r}")
  asked = _WORLD_SEED.value, _TRAIN.value, _RL.value, _HELD_OUT.value
  with_clear_errors(lambda: make_world(_DIRECTORY.value, *asked))
  print(f"wrote pages and tasks of train, rl, dev, test and ood to {_DIRECTORY.value}")


if __name__ == "__main__":
  app.run(main)
