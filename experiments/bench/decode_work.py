"""What the contestants of `bench.decode` do: decode a random model on its device.

  PYTHON -m experiments.bench.decode_work CONTESTANT FOLDER  (bench.decode starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from experiments.bench.rollout_work import JOB, Turns, play, prompts
from experiments.bench.worker import Turn, own_peak_mb, serve


def ours(job: dict[str, Any]) -> Turn:
  """This project's scheduler and sampler."""
  import numpy as np

  from coa_jax.model.config import ModelConfig
  from coa_jax.model.transformer import init_params
  from coa_jax.protocol.grammar.automaton import Automaton
  from coa_jax.rollout.replicas import ReplicaPool
  from coa_jax.rollout.types import RolloutConfig

  half = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  cfg = ModelConfig(**job["model"] | half)
  params = init_params(cfg, 0)
  nothing = np.zeros((1, 1), np.int32)
  stops = Automaton(np.zeros(cfg.vocab_size, int), nothing, nothing, ())
  new, length = job["new"], job["prompt"] + job["new"]
  made: dict[int, ReplicaPool] = {}

  def turn(batch: int) -> dict[str, Any]:
    if batch not in made:
      config = RolloutConfig(slots=batch, max_len=length, window=64)
      made[batch] = ReplicaPool(cfg, stops, config)
    given = prompts(batch, job["prompt"], cfg.vocab_size)
    episodes = [Turns(i, ids, new) for i, ids in enumerate(given)]
    play(made[batch], params, episodes)
    return {"tokens": sum(len(e.new[0]) for e in episodes)}

  return turn


def our_peak_mb() -> float:
  """Of the GPU's memory; without one the process's own."""
  import jax

  stats = jax.devices()[0].memory_stats()
  return stats["peak_bytes_in_use"] / 2**20 if stats else own_peak_mb()


def torch(job: dict[str, Any]) -> Turn:
  """transformers' own `generate`, with its default cache and attention."""
  import torch
  import transformers

  device = "cuda" if torch.cuda.is_available() else "cpu"
  config = transformers.AutoConfig.for_model(**job["hf"])
  with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
  model.eval()

  def turn(batch: int) -> dict[str, Any]:
    given = prompts(batch, job["prompt"], job["model"]["vocab_size"])
    ids = torch.tensor(given, device=device)
    with torch.inference_mode():
      out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=job["new"],
        max_new_tokens=job["new"],
        pad_token_id=0,
      )
    return {"tokens": out[:, ids.shape[1] :].cpu().numel()}

  return turn


def torch_peak_mb() -> float:
  """As `our_peak_mb`."""
  import torch

  on_gpu = torch.cuda.is_available()
  return torch.cuda.max_memory_allocated() / 2**20 if on_gpu else own_peak_mb()


CONTESTANTS = {"ours": (ours, our_peak_mb), "torch": (torch, torch_peak_mb)}

if __name__ == "__main__":
  who, folder = sys.argv[1:]
  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    asked = json.load(f)
  start, peak_mb = CONTESTANTS[who]
  serve(lambda: start(asked), peak_mb)
