"""What the contestants of `bench.decode` do: decode a random model on its device.

  PYTHON -m experiments.bench.decode_work CONTESTANT FOLDER  (bench.decode starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

from typing import Any

from experiments.bench.peers import Turn, own_peak_mb, serve
from experiments.bench.rollout_work import endless, play_turns, prompts


def ours(job: dict[str, Any]) -> Turn:
  """This project's scheduler and sampler."""
  from coa_jax.model.config import ModelConfig
  from coa_jax.model.transformer import init_params
  from coa_jax.rollout.replicas import ReplicaPool
  from coa_jax.rollout.types import RolloutConfig

  half = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  cfg = ModelConfig(**job["model"] | half)
  params = init_params(cfg, 0)
  automaton = endless(cfg.vocab_size)
  length = job["prompt"] + job["new"]
  engines: dict[int, ReplicaPool] = {}

  def turn(batch: int) -> dict[str, Any]:
    if batch not in engines:
      config = RolloutConfig(slots=batch, max_len=length, window=64)
      engines[batch] = ReplicaPool(cfg, automaton, config)
    prompt_ids = prompts(batch, job["prompt"], cfg.vocab_size)
    ids = play_turns(engines[batch], params, prompt_ids, job["new"])
    return {"tokens": sum(map(len, ids))}

  return turn


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
    prompt_ids = prompts(batch, job["prompt"], job["model"]["vocab_size"])
    ids = torch.tensor(prompt_ids, device=device)
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


CONTESTANTS = {"ours": ours, "torch": torch}


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A contestant's turn: {"batch": B} prompts are continued."""
  return CONTESTANTS[name](job)


def _peak_mb(name: str) -> float:
  """The most memory so far: of the GPU; without one of the process."""
  if name == "torch":
    import torch

    if torch.cuda.is_available():
      return torch.cuda.max_memory_allocated() / 2**20
    return own_peak_mb()
  import jax

  stats = jax.devices()[0].memory_stats()
  return stats["peak_bytes_in_use"] / 2**20 if stats else own_peak_mb()


if __name__ == "__main__":
  serve(start, _peak_mb)
