"""Evaluation on held-out worlds: entities absent from all training text.

  python -m experiments.evaluate --config=configs/evaluate_world.py \
    --workdir=runs/world/eval

Needs a model folder (`--config.init=runs/world/rl/model`). Expect: pass@1 0.94
greedy and 0.78 sampled for the quickstart's RL model.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" plays 8 tasks."""
  if arg not in ("", "tiny"):
    raise ValueError(f"evaluate_world answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  world = "world_tiny" if tiny else "world"  # the :tiny stages feed each other
  config = ml_collections.ConfigDict()
  config.init = f"runs/{world}/rl/model"
  config.model = dict(remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.rollout = dict(
    variant="unified",
    style="brief",
    slots=16 if tiny else 64,
    window=8,
    max_len=320,  # the deeper held-out questions need more room than training
    max_calls=8,
    prefill_rows=4,
    constrain=False,
    seed=1,
  )
  config.tools = dict(
    tools=("wiki_search", "code"),
    corpus="runs/world/test_pages.jsonl",
    top_k=1,
    workers=2,
    enabled=True,
  )
  config.tasks = dict(
    uri="runs/world/test_tasks.jsonl", limit=8 if tiny else 300, families=()
  )
  config.eval = dict(greedy=True, samples=3, temperature=1.0)
  return config
