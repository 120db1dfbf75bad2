"""What the contestants of `bench_rollout` do: generate from the same prompts, greedily.

  PYTHON -m experiments.bench_rollout_work CONTESTANT FOLDER  (bench_rollout starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench_server import Turn, serve

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
    folder: holds the job: `model` (fields of QwenConfig), `dtype`, `prompt`, `new`.
  """
  from coa_jax.model.architecture import QwenConfig
  from coa_jax.model.qwen import init_params
  from coa_jax.model.weights import save_model

  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    job = json.load(f)
  cfg = QwenConfig(**job["model"], param_dtype=job["dtype"])
  save_model(os.path.join(folder, MODEL), cfg, init_params(cfg, 0))


def ours(folder: str, job: dict[str, Any]) -> Generate:
  """This project's scheduler and sampler, as rollouts use them."""
  from experiments.launch import prepare

  prepare("")
  from coa_jax.model.architecture import LoadConfig
  from coa_jax.model.weights import load_model
  from coa_jax.protocol.automaton import Automaton
  from coa_jax.rollout.engine import RolloutConfig
  from coa_jax.rollout.scheduler import Scheduler

  load = LoadConfig(dtype=job["dtype"], param_dtype=job["dtype"])
  cfg, params = load_model(os.path.join(folder, MODEL), load)
  nothing = np.zeros((1, 1), np.int32)  # one state, which no token stops
  automaton = Automaton(np.zeros(cfg.vocab_size, np.int32), nothing, nothing, ())
  schedulers: dict[tuple[int, int], Scheduler] = {}

  class Plain:
    """A sequence that only grows."""

    temperature = 0.0
    limit = 1 << 30

    def __init__(self, sequence: int, ids: list[int]):
      self.sequence, self.given, self.new = sequence, ids, []

    def start(self) -> list[int]:
      return self.given

    def forced(self) -> list[int]:
      return []

    def progress(self, ids: list[int]) -> None:
      pass

    def sampled(self, ids: list[int], logps: list[float], tag: None) -> None:
      self.new = ids

  def generate(given: list[list[int]], new: int) -> list[list[int]]:
    size = len(given), len(given[0]) + new
    if size not in schedulers:
      schedulers.clear()  # one cache at a time
      config = RolloutConfig(
        slots=size[0], max_len=size[1], window=64, inject_rows=min(size[0], 16)
      )
      schedulers[size] = Scheduler(cfg, automaton, config)
    episodes = [Plain(i, ids) for i, ids in enumerate(given)]
    for _ in schedulers[size].run(params, episodes, 0):
      pass
    return [e.new for e in episodes]

  return generate


def vllm(folder: str, job: dict[str, Any]) -> Generate:
  """vLLM's offline engine; what it would print in text is left out."""
  os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
  import vllm

  engine = vllm.LLM(
    os.path.join(folder, MODEL),
    dtype=job["dtype"],
    skip_tokenizer_init=True,
    max_model_len=job["prompt"] + job["new"],
    max_num_seqs=64,
    enable_prefix_caching=False,
  )

  def generate(given: list[list[int]], new: int) -> list[list[int]]:
    sampling = vllm.SamplingParams(
      temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": ids} for ids in given]
    out = engine.generate(asked, sampling, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in out]

  return generate


def tunix(folder: str, job: dict[str, Any]) -> Generate:
  """tunix's sampler over its Qwen3, with a tokenizer that reads numbers."""
  import jax.numpy as jnp
  from tunix.generate import sampler
  from tunix.models.qwen3 import params as loading

  from experiments.bench_train_contestants import tunix_config

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
    cache_size=job["prompt"] + job["new"] + 1,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )
  engine = sampler.Sampler(model, Numbers(), cache)

  def generate(given: list[list[int]], new: int) -> list[list[int]]:
    asked = [" ".join(map(str, ids)) for ids in given]
    out = engine(asked, max_generation_steps=new, max_prompt_length=len(given[0]))
    return [np.asarray(ids)[:new].tolist() for ids in out.tokens]

  return generate


CONTESTANTS = {"ours": ours, "vllm": vllm, "tunix": tunix}


def start(name: str, folder: str) -> Turn:
  """A contestant's turn: {"batch": B} prompts are continued."""
  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    job = json.load(f)
  generate = CONTESTANTS[name](folder, job)

  def turn(batch: int) -> dict[str, Any]:
    given = prompts(batch, job["prompt"], job["model"]["vocab_size"])
    ids = generate(given, job["new"])
    return {"tokens": sum(map(len, ids)), "first": [x[:16] for x in ids]}

  return turn


if __name__ == "__main__":
  serve(lambda: start(*sys.argv[1:]))
