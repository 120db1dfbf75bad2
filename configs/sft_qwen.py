"""SFT of a pretrained Qwen on trajectories, imported or distilled.

  hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir=models/qwen
  python -m experiments.sft --config=configs/sft_qwen.py --workdir=runs/qwen/sft \
    --config.data.trajectories=trajectories.jsonl

Trajectories come from `experiments.import_traces` or `experiments.distill`. A
4,096-token row holds several trajectories; longer ones are dropped and counted: raise
data.length. `data.steps` is 3 epochs for about 5,000 rows. --config.lora.rank=16 trains
only adapters. Expect: not known; its tiny form was run here on random weights, the full
form was not run.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates of short rows, for a CPU."""
  if arg not in ("", "tiny"):
    raise ValueError(f"sft_qwen answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  config.init = "models/qwen"
  config.model = dict(
    dtype="float32" if tiny else "bfloat16",
    remat="none" if tiny else "attention",
    scan=not tiny,
  )
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.optim = dict(
    name="adamw",
    lr=1.4e-5,
    warmup=1 if tiny else 50,
    schedule="cosine",
    final=0.1,
  )
  config.data = dict(
    trajectories="trajectories.jsonl",
    steps=2 if tiny else 500,
    rows=2 if tiny else 8,
    length=2048 if tiny else 4096,
    micro_batches=1 if tiny else 4,
    validation=2 if tiny else 64,
    validate_every=1 if tiny else 50,
    seed=0,
  )
  config.checkpoint = dict(every=1 if tiny else 100, keep=1)
  config.log = dict(wandb_project="")
  return config
