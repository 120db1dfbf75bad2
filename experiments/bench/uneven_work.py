"""What the contestants of `bench.uneven` do: continue prompts of uneven lengths.

  PYTHON -m experiments.bench.uneven_work CONTESTANT FOLDER  (bench.uneven starts it)

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from experiments.bench import rollout_work as work
from experiments.bench.peers import Turn, serve

_SIGMA = 1.2  # of the logarithm of lengths


def prompt_lengths(count: int, mean: int, longest: int) -> list[int]:
  """Log-normal lengths of prompts, cut off at the longest, which one of them has.

  Args:
    count: of prompts.
    mean: of the lengths before they are cut off.
    longest: tokens of a prompt at most.
  """
  # A log-normal mean is exp(mu + sigma^2 / 2).
  mu = np.log(mean) - _SIGMA**2 / 2
  drawn = np.random.default_rng(0).lognormal(mu, _SIGMA, count)
  lengths = np.clip(drawn.astype(int), 1, longest)
  lengths[0] = longest
  return lengths.tolist()


def ours(folder: str, job: dict[str, Any], length: int) -> work.Generate:
  """This project's engine, with a slot for every prompt."""
  work.use_cores(job)
  cfg, loaded, automaton = work.our_model(folder, job)
  engine, params = work.our_engine(
    cfg, loaded, automaton, job["slots"], max_len=length, window=64, inject_rows=16
  )
  return functools.partial(work.play_turns, engine, params)


def vllm(folder: str, job: dict[str, Any], length: int) -> work.Generate:
  """vLLM; none of the prompts has to wait for another."""
  os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"  # GiB
  engine = work.vllm_engine(
    folder,
    job,
    max_model_len=length,
    max_num_seqs=job["slots"],
    enable_prefix_caching=False,
  )
  return functools.partial(work.vllm_continue, engine)


CONTESTANTS = {"ours": ours, "vllm": vllm}


def start(name: str, folder: str, job: dict[str, Any]) -> Turn:
  """A contestant's turn: {"new": N} continues every prompt by so many tokens."""
  lengths = prompt_lengths(job["slots"], job["mean"], job["longest"])
  whole = work.prompts(job["slots"], job["longest"], job["model"]["vocab_size"])
  prompt_ids = [ids[:n] for ids, n in zip(whole, lengths, strict=True)]
  generate = CONTESTANTS[name](folder, job, job["longest"] + job["new"])

  def turn(new: int) -> dict[str, Any]:
    ids = generate(prompt_ids, new)
    return {"prompted": sum(lengths), "first": [x[:16] for x in ids]}

  return turn


if __name__ == "__main__":
  serve(start)
