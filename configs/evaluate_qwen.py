"""Evaluation of a Qwen model folder on your own questions, with the code tool.

  python -m experiments.evaluate --config=configs/evaluate_qwen.py \
    --workdir=runs/qwen/eval --config.tasks.uri=test.jsonl

Evaluates the model from configs/rl_qwen.py; before training, --config.init=models/qwen.
`experiments.serve` and `experiments.chat` take this config too. Expect: not known;
its tiny form was run here on random weights, the full form was not run.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" plays 4 tasks, for a CPU."""
  if arg not in ("", "tiny"):
    raise ValueError(f"evaluate_qwen answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  config.init = f"runs/qwen{'_tiny' if tiny else ''}/rl/model"
  config.model = dict(dtype="float32" if tiny else "bfloat16", remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.rollout = dict(
    variant="unified-plan-reflection-suggested_answer-double_check",
    style="full",
    constrain=True,
    slots=4 if tiny else 64,
    window=8,
    max_len=1024 if tiny else 4096,
    max_calls=8,
    seed=1,
  )
  config.tools = dict(tools=("code",), workers=2 if tiny else 8)
  config.tasks = dict(uri="test.jsonl", limit=4 if tiny else 0, seed=0)
  config.eval = dict(greedy=True, samples=0 if tiny else 3)
  return config
