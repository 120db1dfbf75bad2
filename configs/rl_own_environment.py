"""RL in an environment of your own: copy this file and change the marked lines.

  python -m experiments.rl --config=configs/rl_own_environment.py --workdir=runs/own \
    --config.tasks.uri=train.jsonl --config.dev.uri=dev.jsonl

The environment is a class whose methods the policy calls, one instance per trajectory
(docs/environments.md, which has a task's row too). Needs a model folder, like
configs/rl_own_tool.py. Expect: not known; its tiny form was run here on random weights,
the full form was not.
"""

import ml_collections

from configs import rl_own_tool


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates from a few rollouts, for a CPU."""
  if arg not in ("", "tiny"):
    raise ValueError(f"rl_own_environment answers '' and 'tiny', not {arg!r}")
  config = rl_own_tool.get_config(arg)
  config.tools = dict(
    tools=("tool",),
    environment=dict(
      path="experiments.environments:Rooms",  # CHANGE: module:Class
      functions=dict(  # CHANGE: its methods for the model
        go="walk to the next room; its argument is direction",
      ),
      jail=False,  # True for a class that executes what the model writes
    ),
  )
  config.reward = dict()
  return config
