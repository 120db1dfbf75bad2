"""Difficulty selection: keeps training tasks that the SFT model sometimes solves.

  python -m experiments.tasks --config=configs/select_world.py \
    --workdir=runs/world/select

For RL on these tasks: --config.tasks.uri=runs/world/select/tasks.jsonl. Needs
runs/world/sft/model (configs/sft_world.py). To select questions not answerable without
tools, like the web tasks in arXiv 2508.13167: --config.tools.enabled=False
--config.select.at_most=0.3 --config.select.all_wrong=True --config.eval.samples=32.

Expect, for 200 of the quickstart's rl_tasks and its SFT model with 8 samples: 27 never
solved, 6 always, 167 in between.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" plays 8 tasks twice."""
  if arg not in ("", "tiny"):
    raise ValueError(f"select_world answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  world = "world_tiny" if tiny else "world"  # the :tiny stages feed each other
  config = ml_collections.ConfigDict()
  config.init = f"runs/{world}/sft/model"
  config.model = dict(remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.rollout = dict(
    variant="unified",
    style="brief",
    slots=16 if tiny else 64,
    window=8,
    max_len=256,
    max_calls=8,
    prefill_rows=4,
    constrain=False,
    seed=2,
  )
  config.tools = dict(
    tools=("wiki_search", "code"),
    corpus="runs/world/train_pages.jsonl",
    top_k=1,
    workers=2,
    enabled=True,
  )
  config.tasks = dict(
    uri="runs/world/train_tasks.jsonl", limit=8 if tiny else 2000, families=()
  )
  config.eval = dict(greedy=False, samples=2 if tiny else 8, temperature=1.0)
  config.select = dict(
    at_least=0.0,
    at_most=1.0,
    all_wrong=False,
    all_right=False,
    limit=0,
    strata=("family", "rate"),
    min_attempts=1,
    without=(),
    played=(),
    seed=0,
  )
  return config
