"""SFT of the paper's agents (arXiv 2508.13167).

  hf download Qwen/Qwen2.5-7B-Instruct --local-dir=models/Qwen2.5-7B-Instruct
  python -m experiments.sft --config=configs/sft_afm.py:web:7b \
    --workdir=runs/web/sft --config.data.trajectories=web.jsonl

The argument is an agent (web, mhqa, code or math) and a size (1.5b, 7b or 32b), joined
by colons; by default code and 7b. ":tiny" makes 2 short updates.
`experiments.import_traces --variant=web` (mhqa, code) converts the released records to
trajectories. Learning rate, warm-up, schedule, batch and epochs are the paper's,
otherwise its released scripts'. The paper has no 1.5B model: 1.5b uses the 7B settings.
The paper trains one model for code and math; use "code" for both.

The step compiled ahead of time with these rows (experiments/LOG.md, 2026-11-21) needs,
per chip: 1.5b on v5e:2x4 10.9 of 16 GB at 8k tokens, 7b on v5p:2x2x4 42.7 of 95 GB and
32b on v5p:4x4x4 37.4 of 95 GB, both at 32k. For another number of devices set
`data.rows` to a multiple of fsdp, and keep its product with `data.micro_batches`. The
paper's batch counts records; ours counts rows of several packed records. So
`data.steps` is right for records as long as a row, and too large for short records.

Expect: not known; the tiny form was run here on random weights, no size was trained.
The paper's 7B after SFT: GAIA 34.0 % (web), LiveCodeBench v4 28.0 % and AIME24 27.5 %
(code).
"""

import dataclasses

import ml_collections


@dataclasses.dataclass(frozen=True)
class Agent:
  """SFT settings for one agent, from the paper or its scripts (S)."""

  records: int  # approximate
  epochs: float
  batch: int  # records per update
  lr: float
  warmup: float  # fraction of updates
  length: int  # tokens per record


AGENTS = {
  "web": Agent(7607, 2.5, 256, 1.4e-5, warmup=0.1, length=32768),
  "mhqa": Agent(8826, 4, 32, 2e-5, warmup=0.03, length=5120),  # S
  "code": Agent(47000, 2, 32, 3e-5, warmup=0.1, length=32768),
  "math": Agent(47000, 2, 32, 3e-5, warmup=0.1, length=32768),
}
# The paper's 32B settings for code and math that differ from 7B.
LARGE_CODE = dict(batch=64, lr=1.4e-5)
# Size -> mesh, rows per micro-batch, longest row, compiled by compile_check.
SIZES = {
  "1.5b": (dict(data=1, fsdp=-1, context=1, tensor=1), 8, 8192),
  "7b": (dict(data=1, fsdp=-1, context=1, tensor=1), 16, 32768),
  "32b": (dict(data=1, fsdp=-1, context=4, tensor=1), 16, 32768),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` is an agent, a size and "tiny", joined by colons."""
  # --- The agent and its size.
  words = arg.split(":") if arg else []
  unknown = set(words) - {*AGENTS, *SIZES, "tiny"}
  several = any(len([w for w in words if w in names]) > 1 for names in (AGENTS, SIZES))
  if unknown or several:
    accepted = ", ".join((*AGENTS, *SIZES, "tiny"))
    raise ValueError(
      f"sft_afm answers one agent and one size of {accepted}, by ':', not {arg!r}"
    )
  tiny = "tiny" in words
  name = next((word for word in words if word in AGENTS), "code")
  size = next((word for word in words if word in SIZES), "7b")
  agent = AGENTS[name]
  if size == "32b" and name in ("code", "math"):
    agent = dataclasses.replace(agent, **LARGE_CODE)
  mesh, rows, longest = SIZES[size]
  steps = round(agent.epochs * agent.records / agent.batch)
  coder = "Coder-" if name in ("code", "math") else ""

  # --- Its config; the tiny form is for a CPU.
  config = ml_collections.ConfigDict()
  config.init = f"models/Qwen2.5-{coder}{size.upper()}-Instruct"
  config.model = dict(
    dtype="float32" if tiny else "bfloat16",
    remat="none" if tiny else "full",
    scan=not tiny,
  )
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1) if tiny else mesh
  config.optim = dict(
    name="adamw",
    lr=agent.lr,
    warmup=1 if tiny else round(agent.warmup * steps),
    schedule="cosine",
    final=0.0,
  )
  config.data = dict(
    trajectories="trajectories.jsonl",
    steps=2 if tiny else steps,
    rows=2 if tiny else rows,
    length=2048 if tiny else min(agent.length, longest),
    micro_batches=1 if tiny else max(1, agent.batch // rows),
    validation=2 if tiny else 64,
    validate_every=1 if tiny else 50,
    seed=0,
  )
  config.checkpoint = dict(every=1 if tiny else 50, keep=1)
  config.log = dict(wandb_project="")
  return config
