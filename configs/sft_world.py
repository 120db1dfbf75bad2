"""SFT of a half-million-parameter model on the world's distilled trajectories.

  python -m experiments.sft --config=configs/sft_world.py --workdir=runs/world/sft

":again" trains the trained model on more trajectories, such as the right ones of
another model's attempts (--config.data.trajectories). Needs runs/world/distill
(configs/distill_world.py). Expect: validation loss 0.125,
greedy pass@1 0.92 on held-out worlds, 284 s on two cores.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config.

  Args:
    arg: "tiny" trains a smaller model for 20 steps; "large" a 5M-parameter model;
      "hybrid" a model of the default size with linear attention in three of four
      layers, like Qwen3.5; "again" continues from runs/world/sft with RL's rates.
  """
  if arg not in ("", "tiny", "large", "hybrid", "again"):
    names = "'', 'tiny', 'large', 'hybrid' and 'again'"
    raise ValueError(f"sft_world answers {names}, not {arg!r}")
  tiny = arg == "tiny"
  world = "world_tiny" if tiny else "world"  # the :tiny stages feed each other
  config = ml_collections.ConfigDict()
  config.init = ""
  config.model = dict(
    width=64 if tiny else 96,
    layers=2 if tiny else 4,
    heads=4 if tiny else 3,
    kv_heads=2 if tiny else 1,
    head_dim=16 if tiny else 32,
    ff=192 if tiny else 288,
    rope_theta=1000.0,  # sharper positions for short rows: copying is learned earlier
  )
  if arg == "hybrid":
    config.model.update(
      ff=272,
      layer_kinds=("delta", "delta", "delta", "attention"),
      delta=dict(key_heads=1, value_heads=3, key_dim=32, value_dim=32),
      attention_gate=True,
      norm_offset=True,
      rotary_dim=8,
    )
  if arg == "large":
    config.model.update(width=256, layers=6, heads=8, kv_heads=4, ff=768)
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1, devices=0)
  config.optim = dict(
    name="muon",
    lr=0.01 if arg == "large" else 0.02,
    adam_lr=3e-3 if arg == "large" else 1e-2,
    warmup=5 if tiny else 30,
    schedule="cosine",
    final=0.05,
  )
  config.data = dict(
    trajectories=f"runs/{world}/distill/trajectories.jsonl",
    # Many small updates: copying depends more on their number than on their size.
    steps={"tiny": 20, "large": 1500}.get(arg, 2200),
    rows=4 if tiny else 8,
    length=256,
    validation=16 if tiny else 128,
    validate_every=10 if tiny else 250,
    vocab_size=1344,
    seed=0,
  )
  if arg == "again":
    config.init = f"runs/{world}/sft/model"
    config.model = dict(remat="none")
    config.optim.update(lr=0.003, adam_lr=1e-3, warmup=3, schedule="linear", final=0.2)
    del config.data["vocab_size"]  # the model has a tokenizer
    config.data.update(steps=119, rows=16, validation=64)
  config.checkpoint = dict(every=10 if tiny else 500, keep=1)
  config.log = dict(wandb_project="")
  return config
