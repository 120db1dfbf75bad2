"""Distils GSM8K's worked solutions for a small model: one program per question.

  head -n 6973 data/gsm8k/train.jsonl > data/gsm8k/train_6973.jsonl
  tail -n 500 data/gsm8k/train.jsonl > data/gsm8k/dev.jsonl
  python -m experiments.distill --config=configs/distill_smollm2.py \
    --workdir=runs/smollm2/distill

Needs data/gsm8k/train.jsonl, from github.com/openai/grade-school-math; its last 500
questions are held out. Each question gives two trajectories; if its numbers can be
changed, each of two copies with other numbers gives two more.
Expect: 12,838 trajectories from 6,419 questions (dropped: 756 without a note for the
answer, 352 without a calculating note) and two for each of 7,321 copies, about 210
tokens each, question included. About 13 minutes on two cores.
":cpu" makes one trajectory per question, for configs/sft_smollm2.py:cpu: 6,419 in 70
seconds. ":tiny" (64 tasks): a few seconds. Give each a separate workdir.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "cpu" makes fewer trajectories, "tiny" takes 64 tasks."""
  if arg not in ("", "cpu", "tiny"):
    raise ValueError(f"distill_smollm2 answers '', 'cpu' and 'tiny', not {arg!r}")
  config = ml_collections.ConfigDict()
  config.tasks = dict(
    uri="data/gsm8k/train_6973.jsonl",
    limit=64 if arg == "tiny" else 0,
  )
  config.tools = dict(tools=("code",), workers=2)
  config.teacher = dict(
    backend="gsm8k_programs",
    samples=1 if arg == "cpu" else 2,
    new_numbers=0 if arg == "cpu" else 2,
    workers=4,
    # One agent thinks, runs programs and answers: the hyphens remove agents.
    variant="unified-plan-reflection-suggested_answer-double_check",
    prompt="brief",
  )
  config.filters = dict(
    min_activations=2,  # a think and a call
    keep_unreflected=1.0,
  )
  return config
