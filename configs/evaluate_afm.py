"""Evaluation of the paper's agents (arXiv 2508.13167) on its benchmarks.

  python -m experiments.evaluate --config=configs/evaluate_afm.py:math \
    --workdir=runs/math/eval --config.init=runs/math/rl/model \
    --config.tasks.uri=aime24.parquet,aime25.parquet,math500.parquet

The argument is an agent (web, mhqa, code or math) and a size (1.5b, 7b or 32b), joined
by colons; by default code and 7b. ":tiny" plays 4 tasks. `tasks.uri` takes a released
file, several joined by commas, a glob or a folder; results are per source.

| agent | its benchmarks | played | judged by |
|---|---|---|---|
| web | GAIA, WebWalkerQA, BrowseComp, HLE | 3 samples | a model |
| mhqa | NQ, TriviaQA, PopQA, HotpotQA, 2Wiki, MuSiQue, Bamboogle | greedily | a model |
| code | LiveCodeBench v4 and v5, CodeContests | 1 sample | hidden tests |
| math | AIME24, AIME25, MATH500, AMC23, OlympiadBench | 16 samples | value |

Temperature, top-p, top-k, length and calls are the paper's. The paper has no 1.5B
model: 1.5b uses the 7B settings. For math `pass1_sampled` is avg@16; where the paper
takes a single sample, the mean is the same. The paper's judge is Qwen2.5-72B-Instruct:

  vllm serve Qwen/Qwen2.5-72B-Instruct --port=8001    # in its own environment

The paper's scripts judge mhqa by exact match of the answer's first part:
--config.reward.graders.qa=qa --config.reward.judge=None. Unlike in the paper, turns
have no separate limit (web: 4,096 tokens), and a full context is not pruned. Web needs
a search key (serper.key), mhqa a search server or --config.tools.corpus=FILE with
--config.tools.retriever=None; ":tiny" of both takes --config.tools.corpus=FILE and
exact match instead. A replica takes `mesh.tensor` devices (1.5b: 2, 7b: 4, 32b: 8); on
one GPU, set --config.mesh.tensor=1.

Expect: not known; the tiny form was run here on random weights. The paper's 7B after
RL: GAIA 40.8, WebWalkerQA 55.6, BrowseComp 5.8, HLE 15.6 %; mhqa 45.5 % on average;
LiveCodeBench v4 and v5 29.0 and 28.7, CodeContests 18.8 %; AIME24 and AIME25 51.9 and
37.8, MATH500 89.4, AMC23 81.6, OlympiadBench 60.6 %.
"""

import dataclasses

import ml_collections


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """The paper's settings for one agent's benchmarks."""

  max_len: int  # tokens, prompt and observations included
  max_calls: int
  tools: tuple[str, ...]
  samples: int  # 0 plays greedily
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0


AGENTS = {
  # At most 36 turns, the answer included.
  "web": Benchmark(
    max_len=32768,
    max_calls=35,
    tools=("web_search", "crawl_page"),
    samples=3,
    top_p=0.9,
    top_k=20,
  ),
  "mhqa": Benchmark(max_len=10240, max_calls=8, tools=("wiki_search",), samples=0),
  "code": Benchmark(
    max_len=32768, max_calls=12, tools=("code",), samples=1, temperature=0.8
  ),
  "math": Benchmark(
    max_len=32768, max_calls=12, tools=("code",), samples=16, temperature=0.8
  ),
}
# The paper's temperature for 32B code and math.
LARGE_CODE = 0.6
# Size -> devices per replica.
SIZES = {"1.5b": 2, "7b": 4, "32b": 8}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """Returns the config; `arg` is an agent, a size and "tiny", joined by colons.

  budget: a config is one list.

  """
  # --- The agent and its size.
  words = arg.split(":") if arg else []
  unknown = set(words) - {*AGENTS, *SIZES, "tiny"}
  several = any(len([w for w in words if w in names]) > 1 for names in (AGENTS, SIZES))
  if unknown or several:
    accepted = ", ".join((*AGENTS, *SIZES, "tiny"))
    raise ValueError(
      f"evaluate_afm answers one agent and one size of {accepted}, by ':', not {arg!r}"
    )
  tiny = "tiny" in words
  name = next((word for word in words if word in AGENTS), "code")
  size = next((word for word in words if word in SIZES), "7b")
  agent = AGENTS[name]
  if size == "32b" and name in ("code", "math"):
    agent = dataclasses.replace(agent, temperature=LARGE_CODE)

  # --- The model and its sampling.
  config = ml_collections.ConfigDict()
  config.init = f"runs/{name}{'_tiny' if tiny else ''}/rl/model"
  config.model = dict(dtype="float32" if tiny else "bfloat16", remat="none")
  config.mesh = dict(data=1, fsdp=-1, context=1, tensor=1 if tiny else SIZES[size])
  config.rollout = dict(
    variant=name,
    style="full",
    slots=4 if tiny else 32,
    window=8,
    max_len=1024 if tiny else agent.max_len,
    max_calls=agent.max_calls,
    observation_tokens=512 if tiny else 4096,
    tool_seconds=60.0 if tiny else 600.0,
    top_p=agent.top_p,
    top_k=agent.top_k,
    seed=1,
  )

  # --- Its tools; tiny has a page file instead of services.
  config.tools = dict(tools=agent.tools, workers=2 if tiny else 16)
  if name in ("web", "mhqa") and tiny:
    config.tools.corpus = "corpus.jsonl"
  elif name == "mhqa":
    config.tools.retriever = "http://127.0.0.1:8000/retrieve"
  elif name == "web":
    config.tools.web = dict(
      endpoint="https://google.serper.dev/search",
      key_file="serper.key",
      cache="search.sqlite",
    )

  # --- Its tasks, samples and grader.
  if name in ("web", "mhqa") and not tiny:
    judge = dict(base_url="http://127.0.0.1:8001/v1", model="Qwen/Qwen2.5-72B-Instruct")
    config.reward = dict(graders=dict(qa="judge"), judge=dict(chat=judge))
  config.tasks = dict(uri="test.jsonl", limit=4 if tiny else 0, seed=0)
  config.eval = dict(
    greedy=agent.samples == 0,
    samples=min(agent.samples, 2) if tiny else agent.samples,
    temperature=agent.temperature,
  )
  return config
