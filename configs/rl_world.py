"""RL of the world's SFT model: GRPO with DAPO's clip-higher and dynamic sampling.

  python -m experiments.rl --config=configs/rl_world.py --workdir=runs/world/rl

rl_world.py:NAME selects an algorithm in coa_jax/learner/algorithms.py (gspo, ppo, ...),
rl_world.py:NAME:tiny its small form. Needs runs/world/sft (configs/sft_world.py).
Expect: greedy pass@1 on held-out worlds 0.92 -> 0.94, sampled 0.46 -> 0.81; 129 s on
two cores.
"""

import ml_collections

from coa_jax.learner.algorithms import PRESETS, preset


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` is a preset's name, "tiny" (2 updates), or both.

  budget: a config is one list.

  """
  if arg not in ("", "tiny", *PRESETS, *(f"{name}:tiny" for name in PRESETS)):
    names = ", ".join(PRESETS)
    raise ValueError(
      f"rl_world answers '', 'tiny', NAME and NAME:tiny, not {arg!r}; names are {names}"
    )
  tiny, name = arg.endswith("tiny"), arg.removesuffix("tiny").removesuffix(":")
  world = "world_tiny" if tiny else "world"  # the :tiny stages feed each other
  config = ml_collections.ConfigDict()
  config.init = f"runs/{world}/sft/model"
  config.model = dict(remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.optim = dict(
    name="muon",
    lr=0.003,
    adam_lr=1e-3,
    warmup=3,
    schedule="linear",
    final=0.2,
  )
  config.rollout = dict(
    variant="unified",
    style="brief",
    slots=16 if tiny else 64,
    window=8,
    max_len=256,
    max_calls=8,
    prefill_rows=4,
    constrain=False,
    seed=0,
  )
  config.tools = dict(
    tools=("wiki_search", "code"),
    corpus="runs/world/train_pages.jsonl",
    top_k=1,
    workers=2,
  )
  config.tasks = dict(uri="runs/world/rl_tasks.jsonl")
  config.algo = dict(
    steps=2 if tiny else 25,
    keep_every=1 if tiny else 10,
    sampling=dict(
      prompts=4 if tiny else 24,
      samples=4 if tiny else 8,
      rounds=1,
    ),
    loss=dict(clip_low=0.2, clip_high=0.28),
    batch=dict(rows=16, length=256),
  )
  if name:
    config.algo.update(preset(name))
  config.dev = dict(
    every=1 if tiny else 10,
    uri="runs/world/dev_tasks.jsonl",
    limit=8 if tiny else 96,
    corpus="runs/world/dev_pages.jsonl",
  )
  config.checkpoint = dict(every=1 if tiny else 10, keep=1)
  config.log = dict(wandb_project="")
  config.watch = dict(stop=False)
  return config
