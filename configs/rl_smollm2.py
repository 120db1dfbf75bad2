"""GRPO on GSM8K with the code tool, from the SFT model of configs/sft_smollm2.py.

  python -m experiments.rl --config=configs/rl_smollm2.py --workdir=runs/smollm2/rl

Trains on the questions of configs/distill_smollm2.py; `dev` plays the held-out ones.
Advantages are not divided by the group's standard deviation; only the answer is
rewarded. ":cpu" is for two cores; it trains on questions of one or two steps, at
temperature 0.5, because the shorter SFT seldom answers others:

  python -c 'import sys; [print(row, end="") for row in sys.stdin
    if 1 <= row.count("<<") <= 2]' \
    < data/gsm8k/train_6973.jsonl > data/gsm8k/train_short.jsonl

Expect: not known; only two updates were run, on one H100: reward 0.11 and 0.13, half
the groups mixed, 6 s per update after 90 s of compiling. On two cores the reward rose
from 0.08 to 0.13 (means of four) in 16 updates of 4 minutes; greedy on 400 test
questions 0.062 before and 0.082 after, a difference that may be chance.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "cpu" takes fewer questions, "tiny" makes 2 updates.

  budget: a config is one list.

  """
  if arg not in ("", "cpu", "tiny"):
    raise ValueError(f"rl_smollm2 answers '', 'cpu' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  config.init = "runs/smollm2/sft/model"
  config.model = dict(
    dtype="float32" if arg else "bfloat16",
    remat="none",
    scan=True,
  )
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.optim = dict(
    name="adamw",
    lr=2e-5 if arg == "cpu" else 5e-6,
    warmup=1 if tiny else 3,
    schedule="constant" if arg == "cpu" else "cosine",  # a longer run extends it
    final=0.1,
  )
  config.rollout = dict(
    # One agent thinks, runs programs and answers: the hyphens remove agents.
    variant="unified-plan-reflection-suggested_answer-double_check",
    style="brief",
    constrain=True,
    slots={"": 512, "cpu": 64, "tiny": 4}[arg],
    window=16,
    max_len=320 if arg == "cpu" else 448,
    max_calls=2,
    observation_tokens=80,
    seed=0,
  )
  config.tools = dict(tools=("code",), workers=2 if arg else 16)
  config.reward = dict(shaping=dict(format="none"))
  questions = "train_short" if arg == "cpu" else "train_6973"
  config.tasks = dict(uri=f"data/gsm8k/{questions}.jsonl")
  config.algo = dict(
    steps=2 if tiny else 40,
    # At a pass rate of 5 %, groups of 8 give a mixed group for half the learning of 16.
    sampling=dict(
      prompts={"": 64, "cpu": 24, "tiny": 2}[arg],
      samples={"": 16, "cpu": 8, "tiny": 2}[arg],
      rounds=1,
      temperature=0.5 if arg == "cpu" else 1.0,
    ),
    loss=dict(advantage="dr_grpo", clip_low=0.2, clip_high=0.28),
    batch=dict(
      rows={"": 16, "cpu": 2, "tiny": 1}[arg],
      length=512 if tiny else 1024,
    ),
  )
  config.dev = dict(
    every={"": 10, "cpu": 20, "tiny": 1}[arg],
    uri="data/gsm8k/dev.jsonl",
    limit={"": 500, "cpu": 200, "tiny": 2}[arg],
  )
  config.checkpoint = dict(every={"": 10, "cpu": 5, "tiny": 1}[arg], keep=1)
  config.log = dict(wandb_project="")
  config.watch = dict(stop=False)
  return config
