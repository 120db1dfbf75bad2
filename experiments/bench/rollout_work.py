"""Contestants for `bench.rollout`: greedy generation from the same prompts.

  PYTHON -m experiments.bench.rollout_work CONTESTANT FOLDER  (bench.rollout starts it)

A peer's interpreter runs this file too: it imports neither JAX nor our code at the top.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.bench.peers import Turn, read_job, serve
from experiments.bench.train_work import architecture, tunix_config

MODEL = "model"  # in the contestants' folder

# (prompts, number of new tokens) -> each prompt's new ids.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
  """Random ids, equal for all contestants."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, vocab_size, (count, length)).tolist()


def write_work(folder: str) -> None:
  """Writes the contestants' model folder with random weights, as the job says."""
  from coa_jax.model.hf.io import save_model
  from coa_jax.model.transformer import init_params

  job = read_job(folder)
  cfg = architecture(job["model"], param_dtype=job["dtype"])
  save_model(os.path.join(folder, MODEL), cfg, init_params(cfg, 0))


def use_cores(job: dict[str, Any]) -> None:
  """Splits the CPU into the job's `devices`, by default one per core."""
  from coa_jax.cli.launch import prepare

  prepare("", job.get("devices") or len(os.sched_getaffinity(0)))


def our_model(folder: str, job: dict[str, Any]) -> tuple[Any, Any, Any]:
  """Architecture, parameters, and an automaton that no token stops."""
  from coa_jax.model.config import LoadConfig
  from coa_jax.model.hf.io import load_model

  load = LoadConfig(dtype=job["dtype"], param_dtype=job["dtype"])
  cfg, params = load_model(os.path.join(folder, MODEL), load)
  return cfg, params, endless(cfg.vocab_size)


def endless(vocab_size: int) -> Any:
  """A one-state automaton: no token leaves the state."""
  from coa_jax.protocol.grammar.automaton import Automaton

  stay = np.zeros((1, 1), np.int32)
  return Automaton(np.zeros(vocab_size, int), stay, stay, ())


def our_engine(
  model: Any, params: Any, automaton: Any, rows: int, **config: int
) -> tuple[Any, Any]:
  """Returns an engine and its parameters, on a device count that divides `rows`.

  Args:
    model, params, automaton: from `our_model`.
    rows: sequences decoded together, on all devices.
    **config: fields of RolloutConfig except `slots`.
  """
  import jax

  from coa_jax.model.sharding import MeshConfig, make_partitioner
  from coa_jax.rollout.replicas import ReplicaPool
  from coa_jax.rollout.types import RolloutConfig

  # Every replica gets equally many rows.
  replicas = math.gcd(rows, jax.device_count())
  partitioner = make_partitioner(MeshConfig(), jax.devices()[:replicas])
  params = jax.device_put(params, partitioner.tree(params))
  config = RolloutConfig(slots=rows // replicas, **config)
  return ReplicaPool(model, automaton, config, partitioner.decoding()), params


def ours(folder: str, job: dict[str, Any]) -> Generate:
  """This project's engine, as rollouts use it."""
  cfg, loaded, automaton = our_model(folder, job)
  engines: dict[tuple[int, int], tuple[Any, Any]] = {}

  def generate(prompt_ids: list[list[int]], new: int) -> list[list[int]]:
    rows = len(prompt_ids)
    length = max(map(len, prompt_ids)) + new
    # An engine is compiled for its rows and length; turns of one shape share it.
    if (rows, length) not in engines:
      engines.clear()  # one cache at a time
      engines[rows, length] = our_engine(
        cfg,
        loaded,
        automaton,
        rows,
        max_len=length,
        window=64,
        prefill_rows=min(rows, 16),
      )
    engine, params = engines[rows, length]
    return play_turns(engine, params, prompt_ids, new)

  return generate


def play_turns(
  engine: Any, params: Any, prompt_ids: list[list[int]], new: int
) -> list[list[int]]:
  """Continues every prompt by one turn of `new` tokens; returns the new ids."""
  episodes = [GreedyEpisode(i, ids, new) for i, ids in enumerate(prompt_ids)]
  play(engine, params, episodes)
  return [e.new[0] for e in episodes]


def play(engine: Any, params: Any, episodes: Sequence[Any]) -> None:
  """Plays episodes to their ends."""
  engine.set_policy(params, 0)
  with engine.batch():
    futures = [engine.submit(episode) for episode in episodes]
  for future in futures:
    future.result()


class GreedyEpisode:
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
    """Args: `new`: tokens per turn; `tools`: each starts a call for a future of ids."""
    self.sequence = sequence
    self.prompt = prompt
    self.tools = list(tools)
    self.turn = new
    self.limit = len(prompt) + new
    self.new: list[list[int]] = []  # ids per turn

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
  """vLLM's offline engine, without text."""
  os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
  # By default vLLM keeps a core for its scheduler: only one of two would compute.
  os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
  import vllm

  options = {"max_num_seqs": 64} | options
  return vllm.LLM(
    os.path.join(folder, MODEL),
    dtype=job["dtype"],
    skip_tokenizer_init=True,
    **options,
  )


def vllm_sampling(new: int) -> Any:
  """Samples `new` tokens greedily."""
  import vllm

  return vllm.SamplingParams(
    temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
  )


def vllm(folder: str, job: dict[str, Any]) -> Generate:
  """vLLM, all prompts at once, without a prefix cache: turns repeat their prompts."""
  os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4" if job["uneven"] else "1"  # GiB
  engine = vllm_engine(
    folder,
    job,
    max_model_len=job["prompt"] + job["new"],
    max_num_seqs=max(64, job["rows"]),
    enable_prefix_caching=False,
  )
  return lambda prompt_ids, new: vllm_continue(engine, prompt_ids, new)


def vllm_continue(
  engine: Any, prompt_ids: list[list[int]], new: int
) -> list[list[int]]:
  """Continues every prompt by `new` tokens; returns the new ids."""
  requests = [{"prompt_token_ids": ids} for ids in prompt_ids]
  out = engine.generate(requests, vllm_sampling(new), use_tqdm=False)
  return [list(o.outputs[0].token_ids) for o in out]


class NumberTokenizer:
  """Writes ids as numbers, for tunix; no sequence contains `end` or `pad`."""

  def __init__(self, end: int, pad: int):
    self.end = end
    self.pad = pad

  def encode(self, text: str, **unused: Any) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Any, **unused: Any) -> str:
    return " ".join(str(int(i)) for i in ids)

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return self.end

  def pad_id(self) -> int:
    return self.pad


def tunix_engine(folder: str, job: dict[str, Any], size: int) -> Any:
  """tunix's sampler over its Qwen3, with a cache of `size` positions."""
  import jax.numpy as jnp
  from tunix.generate import sampler
  from tunix.models.qwen3 import params as loading

  path = os.path.join(folder, MODEL)
  config = tunix_config(path, "NONE")
  config.dtype = getattr(jnp, job["dtype"])
  model = loading.create_model_from_safe_tensors(path, config, dtype=config.dtype)
  cache = sampler.CacheConfig(
    cache_size=size + 1,
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
  )
  # No token is the end or padding, so every sequence gets its full length.
  past = config.vocab_size + 1
  return sampler.Sampler(model, NumberTokenizer(past, past), cache)


def tunix_generate(
  engine: Any, prompt_ids: list[list[int]], new: int
) -> list[list[int]]:
  """Continues every prompt, padded to the longest prompt."""
  texts = [" ".join(map(str, ids)) for ids in prompt_ids]
  longest = max(map(len, prompt_ids))
  out = engine(texts, max_generation_steps=new, max_prompt_length=longest)
  return [np.asarray(ids)[:new].tolist() for ids in out.tokens]


def tunix(folder: str, job: dict[str, Any]) -> Generate:
  """tunix's sampler."""
  engine = tunix_engine(folder, job, job["prompt"] + job["new"])
  return lambda prompt_ids, new: tunix_generate(engine, prompt_ids, new)


def torch(folder: str, job: dict[str, Any]) -> Generate:
  """transformers' `generate`; all prompts have one length."""
  import torch
  from transformers import AutoModelForCausalLM

  dtype = getattr(torch, job["dtype"])
  model = AutoModelForCausalLM.from_pretrained(os.path.join(folder, MODEL), dtype=dtype)

  def generate(prompt_ids: list[list[int]], new: int) -> list[list[int]]:
    ids = torch.tensor(prompt_ids)
    out = model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      do_sample=False,
      max_new_tokens=new,
      pad_token_id=0,
      eos_token_id=None,
    )
    return out[:, ids.shape[1] :].tolist()

  return generate


CONTESTANTS = {"ours": ours, "vllm": vllm, "tunix": tunix, "torch": torch}


def uneven_lengths(count: int, longest: int) -> list[int]:
  """Log-normal lengths with an eighth of the longest on average; one is the longest."""
  sigma = 1.2
  mu = np.log(longest / 8) - sigma**2 / 2  # the mean is exp(mu + sigma^2 / 2)
  drawn = np.random.default_rng(0).lognormal(mu, sigma, count)
  lengths = np.clip(drawn.astype(int), 1, longest)
  lengths[0] = longest
  return lengths.tolist()


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A contestant's turn: {"batch": B} continues B prompts."""
  if name == "ours":
    use_cores(job)
  generate = CONTESTANTS[name](folder, job)

  def turn(batch: int) -> dict[str, Any]:
    prompt_ids = prompts(batch, job["prompt"], job["model"]["vocab_size"])
    if job["uneven"]:
      lengths = uneven_lengths(batch, job["prompt"])
      prompt_ids = [ids[:n] for ids, n in zip(prompt_ids, lengths, strict=True)]
    ids = generate(prompt_ids, job["new"])
    return {"tokens": sum(map(len, ids)), "first": [x[:16] for x in ids]}

  return turn


if __name__ == "__main__":
  serve(start)
