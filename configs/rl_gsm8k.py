"""RL of Qwen2.5-0.5B-Instruct on GSM8K with the code tool, on one GPU or in Colab.

  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir=models/Qwen2.5-0.5B-Instruct
  python -m experiments.rl --config=configs/rl_gsm8k.py --workdir=runs/gsm8k/rl

Needs train.jsonl and test.jsonl from github.com/openai/grade-school-math in data/gsm8k;
`dev` plays 256 test tasks. GRPO with DAPO's clip-higher. Float32 weights and AdamW use
8 GB; --config.lora.rank=16 trains only adapters, for Colab's 16 GB. Expect: not known;
its tiny form was run here on random weights, the full form was not run.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates from a few rollouts, for a CPU."""
  if arg not in ("", "tiny"):
    raise ValueError(f"rl_gsm8k answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  config.init = "models/Qwen2.5-0.5B-Instruct"
  config.model = dict(
    dtype="float32" if tiny else "bfloat16",
    remat="none" if tiny else "attention",
    scan=not tiny,
  )
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.optim = dict(name="adamw", lr=1e-6, warmup=5, schedule="constant")
  config.rollout = dict(
    # One agent thinks, runs programs and answers: the hyphens remove agents.
    variant="unified-plan-reflection-suggested_answer-double_check",
    style="full",
    constrain=True,
    slots=4 if tiny else 64,
    window=8,
    max_len=1024 if tiny else 1536,
    max_calls=4,
    seed=0,
  )
  config.tools = dict(tools=("code",), workers=2)
  config.tasks = dict(uri="data/gsm8k/train.jsonl")
  config.algo = dict(
    steps=2 if tiny else 100,
    sampling=dict(prompts=2 if tiny else 16, samples=2 if tiny else 8),
    loss=dict(clip_low=0.2, clip_high=0.28),
    batch=dict(rows=2 if tiny else 4, length=1024 if tiny else 1536),
  )
  config.dev = dict(
    every=1 if tiny else 20, uri="data/gsm8k/test.jsonl", limit=4 if tiny else 256
  )
  config.checkpoint = dict(every=1 if tiny else 20, keep=1)
  config.log = dict(wandb_project="")
  return config
