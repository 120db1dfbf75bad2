"""Distils the scripted team over the seeded world into the quickstart's training set.

  python -m experiments.make_world --directory=runs/world
  python -m experiments.distill --config=configs/distill_world.py \
    --workdir=runs/world/distill

Expect: the team solves 0.896 of 13,000 tasks, 13,719 trajectories kept (2,841 are
second copies), 2,168 tokens per run (1,165 with cache credit); 66 to 100 s.
":tiny" (64 tasks): a few seconds.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" takes 64 tasks."""
  if arg not in ("", "tiny"):
    raise ValueError(f"distill_world answers '' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.tasks = dict(
    uri="runs/world/train_tasks.jsonl",
    limit=64 if arg == "tiny" else 0,
  )
  config.tools = dict(
    tools=("wiki_search", "code"),
    corpus="runs/world/train_pages.jsonl",
    top_k=1,  # a small student reads one page at a time
    workers=2,
  )
  config.teacher = dict(
    backend="scripted", workers=4, variant="unified", prompt="brief"
  )
  config.scripted = dict(seed=0)
  config.filters = dict(
    min_activations=5,
    # Half of the answers from memory are kept, so the model sees a few.
    keep_unreflected=0.5,
    corrected_copies=2,
  )
  return config
