"""Task synthesis over any text, offline: gaps in its pages' sentences.

  python -m experiments.synthesize --config=configs/synthesize_cloze.py \
    --workdir=runs/synth --config.tools.corpus=pages.jsonl

Expect: see experiments/LOG.md, "tasks without a model".
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" begins with 20 documents."""
  if arg not in ("", "tiny"):
    raise ValueError(f"synthesize_cloze answers '' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.synthesis = dict(
    backend="cloze",
    seeds=20 if arg == "tiny" else 1000,
    depth=2,
    width=0.25,
    guesses=1,
    workers=2,
    seed=0,
  )
  config.tools = dict(
    tools=("wiki_search",),
    corpus="runs/world/train_pages.jsonl",
    top_k=1,
    workers=2,
    max_chars=4000,
  )
  return config
