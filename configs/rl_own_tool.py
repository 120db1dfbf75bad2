"""RL with your own tool and grader: copy this file and change the marked lines.

  python -m experiments.rl --config=configs/rl_own_tool.py --workdir=runs/own \
    --config.tasks.uri=train.jsonl --config.dev.uri=dev.jsonl

The tool is a Python function (`days_between` below), and so is the grader (`near`);
both run in this process, so neither should execute model-written code. The model knows
the tool only by its line in the prompt, so the variant is unified and the style full.
Needs a model folder (`hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir=models/qwen`)
and tasks with question and answer. Expect: not known; its tiny form was run here on
random weights, the full form was not.
"""

import datetime

import ml_collections

from tools_sandbox.faults import BadCall


def days_between(first: str, last: str) -> str:
  """Counts the days from the first date to the last, both as in 2024-02-28."""
  try:
    dates = [datetime.date.fromisoformat(text) for text in (first, last)]
  except (TypeError, ValueError) as e:
    raise BadCall(str(e)) from None  # the model reads this error
  return str((dates[1] - dates[0]).days)


def near(task, answer, trajectory):
  """Scores a number by its distance from the accepted number: 1 if equal, 0 if far."""
  try:
    wanted, found = float(task.answers[0]), float(answer or "nan")
  except ValueError:
    return 0.0
  off = abs(found - wanted) / max(abs(wanted), 1.0)
  score = max(0.0, 1.0 - off) if off >= 0 else 0.0  # not a number is not near
  return {"answer": score, "calls": len(trajectory.calls)}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" makes 2 updates from a few rollouts, for a CPU."""
  if arg not in ("", "tiny"):
    raise ValueError(f"rl_own_tool answers '' and 'tiny', not {arg!r}")
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
    # One agent thinks, calls tools and answers: the hyphens remove agents.
    variant="unified-plan-reflection-suggested_answer-double_check",
    style="full",
    constrain=True,
    slots=4 if tiny else 64,
    window=8,
    max_len=1024 if tiny else 4096,
    max_calls=8,
    seed=0,
  )
  config.tools = dict(
    tools=("tool",),  # functions by name; code, web_search, ... may follow
    functions=dict(
      days_between=dict(  # CHANGE: the tool's name for the model
        description="count the days between dates; its arguments are first and last",
        function="configs.rl_own_tool:days_between",  # CHANGE: module:function
      )
    ),
  )
  config.reward = dict(
    # CHANGE: a task's source or kind -> "module:function".
    graders=dict(qa="configs.rl_own_tool:near", math="configs.rl_own_tool:near"),
  )
  config.tasks = dict(uri="train.jsonl")
  config.algo = dict(
    steps=2 if tiny else 200,
    sampling=dict(prompts=2 if tiny else 32, samples=2 if tiny else 8),
    batch=dict(rows=2 if tiny else 8, length=1024 if tiny else 4096),
  )
  config.dev = dict(every=1 if tiny else 20, uri="dev.jsonl", limit=4 if tiny else 128)
  config.checkpoint = dict(every=1 if tiny else 20, keep=2)
  config.log = dict(wandb_project="")
  return config
