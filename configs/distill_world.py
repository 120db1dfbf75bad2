"""Distils the scripted team over the seeded world into the quickstart's training set.

  python experiments/make_world.py --directory=data/world
  python experiments/distill.py --config=configs/distill_world.py --workdir=WORKDIR

Expect: NUMBERS
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` "tiny" takes 64 tasks."""
  if arg not in ("", "tiny"):
    raise ValueError(f"distill_world answers '' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.tasks = dict(
    uri="data/world/train_tasks.jsonl",
    limit=64 if arg == "tiny" else None,
  )
  config.tools = dict(
    tools=("wiki_search", "code"),
    corpus="data/world/train_pages.jsonl",
    top_k=1,  # a small student reads one page at a time
    workers=2,
  )
  config.teacher = dict(brain="scripted", workers=4, variant="unified", prompt="brief")
  config.scripted = dict(seed=0)
  config.filters = dict(
    min_activations=5,
    # Half of the answers from memory are kept: see them, do not live by them.
    keep_unreflected=0.5,
    corrected_copies=2,
  )
  return config
