"""What the contestants of `bench.rollout` do: generate from the same prompts, greedily.

  PYTHON -m experiments.bench.rollout_work CONTESTANT FOLDER  (bench.rollout starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.bench.worker import Turn, serve

MODEL, JOB = "model", "job.json"

# Continues so many prompts by so many tokens each; the new ids of each.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
  """Random ids; the same for everyone."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, vocab_size, (count, length)).tolist()


def write_work(folder: str) -> None:
  """The model folder that all contestants load, with random weights.

  Args:
    folder: holds the job: `model` (fields of ModelConfig), `dtype`, `prompt`, `new`.
  """
  from coa_jax.model.config import ModelConfig
  from coa_jax.model.hf.io import save_model
  from coa_jax.model.transformer import init_params

  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    job = json.load(f)
  cfg = ModelConfig(**job["model"], param_dtype=job["dtype"])
  save_model(os.path.join(folder, MODEL), cfg, init_params(cfg, 0))


def use_cores(job: dict[str, Any]) -> None:
  """Shows the CPU as several devices, as `--cpu_devices` does.

  As many as the job's `devices` says; where it says nothing, one a core.
  """
  from experiments.launch import prepare

  prepare("", job.get("devices") or len(os.sched_getaffinity(0)))


def our_model(folder: str, job: dict[str, Any]) -> tuple[Any, Any, Any]:
  """Architecture, parameters, and an automaton that no token stops."""
  from coa_jax.model.config import LoadConfig
  from coa_jax.model.hf.io import load_model
  from coa_jax.protocol.grammar.automaton import Automaton

  load = LoadConfig(dtype=job["dtype"], param_dtype=job["dtype"])
  cfg, params = load_model(os.path.join(folder, MODEL), load)
  nothing = np.zeros((1, 1), np.int32)
  return cfg, params, Automaton(np.zeros(cfg.vocab_size, int), nothing, nothing, ())


def our_engine(
  model: Any, params: Any, automaton: Any, rows: int, **config: int
) -> tuple[Any, Any]:
  """Returns an engine of so many rows and its parameters, on devices that divide them.

  Args:
    model, params, automaton: of `our_model`.
    rows: sequences decoded together, on all devices.
    **config: fields of RolloutConfig but `slots`.
  """
  import jax

  from coa_jax.model.sharding import MeshConfig, make_partitioner
  from coa_jax.rollout.replicas import ReplicaPool
  from coa_jax.rollout.types import RolloutConfig

  replicas = math.gcd(rows, jax.device_count())
  partitioner = make_partitioner(MeshConfig(), jax.devices()[:replicas])
  if partitioner:
    params = jax.device_put(params, partitioner.tree(params))
  config = RolloutConfig(slots=rows // replicas, **config)
  return ReplicaPool(model, automaton, config, partitioner), params


def ours(folder: str, job: dict[str, Any]) -> Generate:
  """This project's engine, as rollouts use it."""
  loaded = our_model(folder, job)
  engines: dict[tuple[int, int], tuple[Any, Any]] = {}

  def generate(given: list[list[int]], new: int) -> list[list[int]]:
    size = len(given), len(given[0]) + new
    if size not in engines:
      engines.clear()  # one cache at a time
      engines[size] = our_engine(
        *loaded, size[0], max_len=size[1], window=64, inject_rows=min(size[0], 16)
      )
    engine, params = engines[size]
    episodes = [Turns(i, ids, new) for i, ids in enumerate(given)]
    play(engine, params, episodes)
    return [e.new[0] for e in episodes]

  return generate


def play(engine: Any, params: Any, episodes: Sequence[Any]) -> None:
  """Plays episodes to their ends."""
  engine.set_policy(params, 0)
  with engine.batch():
    futures = [engine.submit(episode) for episode in episodes]
  for future in futures:
    future.result()


class Turns:
  """A sequence for our engine: greedy turns of a fixed length, tools in between."""

  temperature = 0.0
  seed = 0

  def __init__(
    self,
    sequence: int,
    prompt: list[int],
    new: int,
    tools: Sequence[Callable[[], Any]] = (),
  ):
    """Args: `new`: tokens of a turn; `tools`: start a call, whose future gives ids."""
    self.sequence, self.prompt, self.tools = sequence, prompt, list(tools)
    self.turn, self.limit, self.new = new, len(prompt) + new, []

  def start(self) -> list[int]:
    return self.prompt

  def forced(self) -> list[int]:
    return []

  def progress(self, ids: list[int]) -> None:
    pass

  def sampled(self, ids: list[int], logps: list[float], tag: None) -> Any:
    self.new.append(ids)
    return self.tools.pop(0)() if self.tools else None

  def observed(self, result: list[int]) -> list[int]:
    self.limit += len(result) + self.turn
    return result

  def out_of_room(self) -> None:
    raise ValueError("an observation has no room")

  def lost(self) -> None:
    raise ValueError("a turn was lost")


def vllm_engine(folder: str, job: dict[str, Any], **options: Any) -> Any:
  """vLLM's offline engine; what it would print in text is left out."""
  os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
  import vllm

  return vllm.LLM(
    os.path.join(folder, MODEL),
    dtype=job["dtype"],
    skip_tokenizer_init=True,
    max_num_seqs=64,
    **options,
  )


def vllm_sampling(new: int) -> Any:
  """So many tokens, greedily."""
  import vllm

  return vllm.SamplingParams(
    temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
  )


def vllm(folder: str, job: dict[str, Any]) -> Generate:
  """vLLM, all prompts at once; none is asked twice, so without a prefix cache."""
  length = job["prompt"] + job["new"]
  engine = vllm_engine(folder, job, max_model_len=length, enable_prefix_caching=False)

  def generate(given: list[list[int]], new: int) -> list[list[int]]:
    asked = [{"prompt_token_ids": ids} for ids in given]
    out = engine.generate(asked, vllm_sampling(new), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in out]

  return generate


def tunix_engine(folder: str, job: dict[str, Any], size: int) -> Any:
  """tunix's sampler over its Qwen3, with a tokenizer that reads numbers."""
  import jax.numpy as jnp
  from tunix.generate import sampler
  from tunix.models.qwen3 import params as loading

  from experiments.bench.train_peers import tunix_config

  path = os.path.join(folder, MODEL)
  config = tunix_config(path, "NONE")
  config.dtype = getattr(jnp, job["dtype"])
  model = loading.create_model_from_safe_tensors(path, config, dtype=config.dtype)

  class Numbers:
    """Ids written as numbers. No sequence ends: that id is past the vocabulary."""

    def encode(self, text: str, **unused: Any) -> list[int]:
      return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **unused: Any) -> str:
      return ""

    def bos_id(self) -> None:
      return None

    def eos_id(self) -> int:
      return config.vocab_size + 1

    def pad_id(self) -> int:
      return config.vocab_size + 1

  cache = sampler.CacheConfig(
    cache_size=size + 1,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )
  return sampler.Sampler(model, Numbers(), cache)


def tunix_generate(engine: Any, given: list[list[int]], new: int) -> list[list[int]]:
  """Continues prompts of one length."""
  asked = [" ".join(map(str, ids)) for ids in given]
  out = engine(asked, max_generation_steps=new, max_prompt_length=len(given[0]))
  return [np.asarray(ids)[:new].tolist() for ids in out.tokens]


def tunix(folder: str, job: dict[str, Any]) -> Generate:
  """tunix's sampler."""
  engine = tunix_engine(folder, job, job["prompt"] + job["new"])
  return lambda given, new: tunix_generate(engine, given, new)


CONTESTANTS = {"ours": ours, "vllm": vllm, "tunix": tunix}


def start(name: str, folder: str) -> Turn:
  """A contestant's turn: {"batch": B} prompts are continued."""
  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    job = json.load(f)
  if name == "ours":
    use_cores(job)
  generate = CONTESTANTS[name](folder, job)

  def turn(batch: int) -> dict[str, Any]:
    given = prompts(batch, job["prompt"], job["model"]["vocab_size"])
    ids = generate(given, job["new"])
    return {"tokens": sum(map(len, ids)), "first": [x[:16] for x in ids]}

  return turn


if __name__ == "__main__":
  serve(lambda: start(*sys.argv[1:]))
