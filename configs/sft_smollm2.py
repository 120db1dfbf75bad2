"""SFT of SmolLM2-135M-Instruct on GSM8K's programs (configs/distill_smollm2.py).

  hf download HuggingFaceTB/SmolLM2-135M-Instruct \
    --local-dir=models/SmolLM2-135M-Instruct
  python -m experiments.sft --config=configs/sft_smollm2.py \
    --workdir=runs/smollm2/sft

Trains all weights in float32; on a GPU, matrix products are in bfloat16. Rows of 1,024
tokens hold four or five trajectories. ":cpu" is for two cores and the trajectories of
configs/distill_smollm2.py:cpu; --cpu_devices=2 --config.mesh.data=2
--config.mesh.fsdp=1 is 10 % faster. Expect there: validation loss 0.51 after 200
updates of 21 s; greedy 0.062 (0.043 to 0.091) on 400 test questions.
Expect on one H100: loss 0.17, validation loss 0.54 after 600 updates, 2 minutes; greedy
0.100 on GSM8K's test questions (configs/evaluate_smollm2.py).
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "cpu" trains less, in float32; "tiny" makes 2 updates."""
  if arg not in ("", "cpu", "tiny"):
    raise ValueError(f"sft_smollm2 answers '', 'cpu' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  steps = {"": 600, "cpu": 200, "tiny": 2}[arg]
  config = ml_collections.ConfigDict()
  config.init = "models/SmolLM2-135M-Instruct"
  config.model = dict(
    dtype="float32" if arg else "bfloat16",
    remat="none",
    scan=True,
  )
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.optim = dict(
    name="adamw",
    lr=5e-4 if arg == "cpu" else 3e-4,
    warmup=steps // 20,
    schedule="cosine",
    final=0.1,
  )
  config.data = dict(
    trajectories="runs/smollm2/distill/trajectories.jsonl",
    steps=steps,
    rows=2 if arg else 16,
    micro_batches=2 if arg == "cpu" else 1,
    length=512 if tiny else 1024,
    validation={"": 128, "cpu": 64, "tiny": 2}[arg],
    validate_every={"": 200, "cpu": 100, "tiny": 1}[arg],
    seed=0,
  )
  config.checkpoint = dict(every={"": 400, "cpu": 50, "tiny": 2}[arg], keep=1)
  config.log = dict(wandb_project="")
  return config
