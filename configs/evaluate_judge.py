"""Evaluation with your own judge: the paper's web agent on GAIA.

  vllm serve Qwen/Qwen2.5-72B-Instruct --port=8001    # in its own environment
  python -m experiments.evaluate --config=configs/evaluate_judge.py \
    --workdir=runs/web/gaia --config.tasks.uri=gaia.jsonl \
    --config.init=runs/web/rl/model

The judge is any OpenAI-compatible endpoint; verdicts are kept in the workdir
(verdicts.jsonl) and none is paid for twice. Sampling is the paper's for the web agent:
temperature 1, top-p 0.9, top-k 20, 32k tokens; pass@3 and a vote of 3 beside pass@1.
Needs a search key in serper.key. ":tiny" plays 4 tasks over --config.tools.corpus=FILE;
give --config.reward.judge.chat.base_url and --config.reward.judge.chat.model, too.
Expect: not known; the tiny form was run here on random weights and a scripted judge.
The paper's 7B after RL has 40.8 % on GAIA, its 32B 55.3 %.
"""

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` "tiny" plays 4 tasks over a corpus."""
  if arg not in ("", "tiny"):
    raise ValueError(f"evaluate_judge answers '' and 'tiny', not {arg!r}")
  tiny = arg == "tiny"
  config = ml_collections.ConfigDict()
  config.init = f"runs/web{'_tiny' if tiny else ''}/rl/model"
  config.model = dict(dtype="float32" if tiny else "bfloat16", remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1)
  config.rollout = dict(
    variant="web",
    style="full",
    slots=4 if tiny else 32,
    window=8,
    max_len=1024 if tiny else 32768,
    max_calls=24,
    observation_tokens=512 if tiny else 4096,
    top_p=0.9,
    top_k=20,
    seed=1,
  )
  config.tools = dict(tools=("web_search", "crawl_page"), workers=2 if tiny else 16)
  if tiny:
    config.tools.corpus = "corpus.jsonl"
  else:
    config.tools.web = dict(
      endpoint="https://google.serper.dev/search",
      key_file="serper.key",
      cache="search.sqlite",
    )
  config.reward = dict(
    graders=dict(qa="judge"),
    judge=dict(
      chat=dict(base_url="http://127.0.0.1:8001/v1", model="Qwen/Qwen2.5-72B-Instruct")
    ),
  )
  config.tasks = dict(uri="gaia.jsonl", limit=4 if tiny else 0, seed=0)
  config.eval = dict(greedy=False, samples=3, temperature=1.0)
  return config
