"""On-policy distillation in the world, from a 5M- to a 0.5M-parameter model.

  python -m experiments.rl --config=configs/opd_world.py --workdir=runs/world/opd

The student plays tasks with real tools; the teacher scores each token of the student.
The task's reward does not count (`distillation.task`). Needs runs/world/sft
(configs/sft_world.py) and, as the teacher, runs/world/teacher
(configs/sft_world.py:large). Expect (not measured yet): `teacher_kl` falls, and
the sampled reward rises towards the teacher's.
"""

import ml_collections

from configs import rl_world


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates from a few rollouts."""
  if arg not in ("", "tiny"):
    raise ValueError(f"opd_world answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  world = "world_tiny" if tiny else "world"
  config = rl_world.get_config(arg)
  # In the tiny form the teacher is the student's initial model.
  teacher = f"runs/{world}/sft/model" if tiny else f"runs/{world}/teacher/model"
  config.distillation = dict(teacher=teacher, coef=1.0, task=0.0)
  config.algo.sampling.filter_groups = False
  return config
