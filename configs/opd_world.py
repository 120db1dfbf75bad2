"""On-policy distillation in the world: a teacher scores the student's own tokens.

  python -m experiments.rl --config=configs/opd_world.py --workdir=runs/world/opd

The student plays tasks with real tools; the task's reward does not count
(`distillation.task`). Needs runs/world/sft (configs/sft_world.py) as the student and
runs/world/rl (configs/rl_world.py) as the teacher. Expect: sampled reward from 0.45 to
0.73 in 25 updates, as RL reaches with rewards, and `teacher_kl` from 0.016 to 0.001
(means of three seeds).
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
  teacher = f"runs/{world}/sft/model" if tiny else f"runs/{world}/rl/model"
  config.distillation = dict(teacher=teacher, coef=1.0, task=0.0)
  config.algo.sampling.filter_groups = False
  return config
