"""Task synthesis over a corpus, by a model behind an OpenAI-compatible endpoint.

  vllm serve Qwen/Qwen2.5-7B-Instruct    # in its own environment
  python -m experiments.synthesize --config=configs/synthesize_chat.py \
    --workdir=runs/synth

Takes any corpus for `wiki_search`: --config.tools.corpus=pages.jsonl. Expect: no number
with a real model is on record yet; results.json has kept tasks and cost.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" begins with 4 documents."""
  if arg not in ("", "tiny"):
    raise ValueError(f"synthesize_chat answers '' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.synthesis = dict(
    seeds=4 if arg == "tiny" else 1000,
    depth=2,
    width=0.25,
    guesses=3,
    workers=16,
    seed=0,
  )
  config.tools = dict(
    tools=("wiki_search",),
    corpus="runs/world/train_pages.jsonl",
    top_k=1,
    workers=2,
    max_chars=4000,
  )
  config.chat = dict(
    base_url="http://localhost:8000/v1",
    model="Qwen/Qwen2.5-7B-Instruct",
    temperature=0.7,
    max_tokens=512,
    prices=(),
  )
  return config
