"""Distils GSM8K's worked solutions: each calculator note becomes a real program run.

  python -m experiments.distill --config=configs/distill_gsm8k.py \
    --workdir=runs/gsm8k/distill

Needs data/gsm8k/train.jsonl, from github.com/openai/grade-school-math. Expect: 6,876 of
7,473 rows kept and 22,414 programs run, each with the solution's value. Dropped: 409
rows without a note for the answer, 187 without a calculating note, 1 repetition. About
250 tokens per trajectory, question included. 140 s on two busy cores. ":tiny" (64
tasks): a few seconds; give it a separate workdir.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" takes 64 tasks."""
  if arg not in ("", "tiny"):
    raise ValueError(f"distill_gsm8k answers '' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.tasks = dict(
    uri="data/gsm8k/train.jsonl",
    limit=64 if arg == "tiny" else 0,
  )
  config.tools = dict(tools=("code",), workers=2)
  config.teacher = dict(
    backend="gsm8k_replay", workers=4, variant="math", prompt="brief"
  )
  config.filters = dict(
    min_activations=5,  # a plan, one round of think, code and reflection, a last think
    max_repeats=1,  # equal values may need two equal programs
  )
  return config
