"""Evaluation of an instruct model as it is: one reply a task, without tools.

  pip install openai
  python -m experiments.evaluate --config=configs/evaluate_chat.py \
    --workdir=runs/smollm2/chat --config.init=models/SmolLM2-135M-Instruct

A baseline for trained agents: the question in the folder's chat template, with a
line that says how to write the answer (`ask` in experiments/agents.py). For all sets at
hand: python -m experiments.benchmark --suite=offline --data=benchmarks
--workdir=runs/smollm2/benchmark -- --config=configs/evaluate_chat.py. ":cpu" decodes in
float32 on two cores; ":tiny" plays 4 tasks. ":endpoint" plays a model behind OpenAI's
API: set agent.endpoint.base_url, model and key_file.
Expect: see "A pretrained model" in docs/benchmarks.md.
"""

import ml_collections
from ml_collections import config_dict


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config.

  Args:
    arg: "cpu" decodes in float32; "tiny" plays 4 tasks; "endpoint" plays a model behind
      OpenAI's API.
  """
  if arg not in ("", "cpu", "tiny", "endpoint"):
    names = "'', 'cpu', 'tiny' and 'endpoint'"
    raise ValueError(f"evaluate_chat answers {names}, not {arg!r}")
  tiny = arg == "tiny"
  at_once = {"": 512, "tiny": 4}.get(arg, 64)
  config = ml_collections.ConfigDict()
  config.agent = dict(
    path="experiments.agents:ask",
    format="chat",
    seconds=3600.0,
    workers=at_once,
  )
  config.rollout = dict(seed=1)
  if arg == "endpoint":
    config.agent.endpoint = dict(
      base_url="http://localhost:8000/v1",
      model="Qwen/Qwen2.5-7B-Instruct",
      key_file=config_dict.placeholder(str),
    )
  else:
    config.init = "models/SmolLM2-135M-Instruct"
    config.model = dict(dtype="float32" if arg else "bfloat16", remat="none", scan=True)
    config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
    config.rollout.slots = at_once
    config.rollout.window = 16
    config.rollout.max_len = 256 if tiny else 2048
  config.tools = dict(tools=())
  config.reward = dict(shaping=dict(format="none"))
  config.tasks = dict(uri="data/gsm8k/test.jsonl", limit=4 if tiny else 0, seed=0)
  config.eval = dict(greedy=True, samples=0)
  return config
