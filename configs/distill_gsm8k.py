"""Distils GSM8K's worked solutions: each calculator note becomes a real program run.

  python -m experiments.distill --config=configs/distill_gsm8k.py \
    --workdir=runs/gsm8k/distill

Needs data/gsm8k/train.jsonl, as github.com/openai/grade-school-math has it. Expect:
6,876 of 7,473 rows kept, 22,414 programs run, every one with the value that the
solution claims. Dropped: 409 whose answer no note computes, 187 without a note that
calculates, 1 that repeats itself. Some 250 tokens a trajectory, question included. 140
s on two busy cores. ":tiny" (64 tasks): a few seconds; give it a workdir of its own.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config; `arg` "tiny" takes 64 tasks."""
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
    max_repeats=1,  # two things of the same size are two honest programs
  )
  return config
