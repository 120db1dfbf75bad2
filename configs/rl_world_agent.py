"""RL of the world's SFT model by an agent's own loop, instead of ours.

  pip install openai
  python -m experiments.rl --config=configs/rl_world_agent.py \
    --workdir=runs/world/rl_agent

The agent is experiments/agents.py, some 20 lines with the `openai` package; copy it for
an agent of your own (docs/agents.md). Needs runs/world/sft (configs/sft_world.py).
Expect: sampled reward 0.42 -> 0.80 in 25 steps, as with our own loop (rl_world.py: 0.40
-> 0.81); 619 s on two cores, beside other work.
"""

import ml_collections

from configs import rl_world


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates."""
  if arg not in ("", "tiny"):
    raise ValueError(f"rl_world_agent answers '' and 'tiny', not {arg!r}")
  config = rl_world.get_config(arg)
  config.agent = dict(
    path="experiments.agents:chat",  # module:function
    format="team",  # "chat": the folder's chat template, for published models
    seconds=600.0,
    workers=64,
  )
  return config
