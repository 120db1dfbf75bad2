"""Writes the seeded world: pages and tasks of train, dev and test as JSON lines.

  python -m experiments.make_world --directory=runs/world

Task files: train (distillation), rl (other questions over the same worlds), dev and
test (worlds of unseen names), deep (families never trained on, over the test worlds).
"""

import dataclasses

from absl import app, flags

from coa_jax.tasks.world import WorldConfig, write_world
from coa_jax.tasks.world_questions import HELD_OUT

_DIRECTORY = flags.DEFINE_string("directory", "runs/world", "Where to write.")
_SEED = flags.DEFINE_integer("seed", 0, "Decides the facts of every world.")
_TRAIN = flags.DEFINE_integer("train", 15000, "Tasks to distil.")
_RL = flags.DEFINE_integer("rl", 6000, "Tasks to practise on.")
_HELD_OUT = flags.DEFINE_integer("held_out", 600, "Tasks each of dev, test and deep.")


def main(argv: list[str]) -> None:
  """Writes everything and prints the paths."""
  del argv
  config = WorldConfig()
  deep = dataclasses.replace(config, mix=tuple((family, 1.0) for family in HELD_OUT))
  for split, name, n, mixed, task_seed in (
    ("train", "train", _TRAIN.value, config, 0),
    ("train", "rl", _RL.value, config, 1),
    ("dev", "dev", _HELD_OUT.value, config, 0),
    ("test", "test", _HELD_OUT.value, config, 0),
    ("test", "deep", _HELD_OUT.value, deep, 0),
  ):
    paths = write_world(_DIRECTORY.value, split, n, mixed, _SEED.value, task_seed, name)
    print(f"{n} tasks: {paths['tasks']}  over {paths['corpus']}")


if __name__ == "__main__":
  app.run(main)
