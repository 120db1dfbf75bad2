"""RL of a pretrained Qwen on your own questions, with the code tool: GRPO.

  hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir=models/qwen
  python -m experiments.rl --config=configs/rl_qwen.py --workdir=runs/qwen/rl \
    --config.tasks.uri=train.jsonl --config.dev.uri=dev.jsonl

The prompt explains the protocol and the grammar enforces it, so SFT is not needed;
after SFT (configs/sft_qwen.py) set --config.init=runs/qwen/sft/model and the variant of
its trajectories. Expect: not known; its tiny form was run here on random weights, the
full form was not run.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates from a few rollouts, for a CPU."""
  if arg not in ("", "tiny"):
    raise ValueError(f"rl_qwen answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  config.init = "models/qwen"
  config.model = dict(
    dtype="float32" if tiny else "bfloat16",
    remat="none" if tiny else "attention",
    scan=not tiny,
  )
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.optim = dict(name="adamw", lr=1e-6, warmup=5, schedule="constant")
  config.rollout = dict(
    # One agent thinks, calls tools and answers; "unified" is the whole team.
    variant="unified-plan-reflection-suggested_answer-double_check",
    style="full",
    constrain=True,
    slots=4 if tiny else 64,
    window=8,
    max_len=1024 if tiny else 4096,
    max_calls=8,
    seed=0,
  )
  config.tools = dict(tools=("code",), workers=2 if tiny else 8)
  config.tasks = dict(uri="train.jsonl")
  config.algo = dict(
    steps=2 if tiny else 200,
    sampling=dict(prompts=2 if tiny else 32, samples=2 if tiny else 8),
    loss=dict(clip_low=0.2, clip_high=0.28),
    batch=dict(rows=8, length=1024 if tiny else 4096),
  )
  config.dev = dict(every=1 if tiny else 20, uri="dev.jsonl", limit=4 if tiny else 128)
  config.checkpoint = dict(every=1 if tiny else 20, keep=2)
  config.log = dict(wandb_project="")
  return config
