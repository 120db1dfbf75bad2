"""Decoding on a GPU against the time its memory takes, transformers beside it.

  python -m experiments.bench.decode [--quick] [--out=FILE.json] [--cases=REGEX]
    [--torch_python=python3]   pip install torch transformers
    [--bandwidth=4.8e12]       bytes/s of the card's memory; an H200's

Qwen2.5 0.5B, 1.5B and 7B in bfloat16, random weights drawn on the device, 1, 32 and 128
sequences at once: prompts of 128 random ids, 256 new tokens each, greedily. Ours is the
scheduler as rollouts use it, transformers its `generate`; both on the first GPU, one
process alive at a time. tokens/s: new tokens over wall seconds, prefill included, the
median of turns after two to compile.

`floor`: the share of that time in which the memory could have read what steps must:
the weights once, and keys and values of every sequence so far. Without a GPU: a tiny
model, to see the script work; its shares say nothing.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from absl import flags

from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.config import to_hf_config
from coa_jax.model.transformer import param_shapes
from coa_jax.model.variants import variant
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.launch import run_program

_BANDWIDTH = flags.DEFINE_float("bandwidth", 4.8e12, "Bytes/s of the GPU's memory.", 1)

PROMPT, NEW = 128, 256
CASES = {
  f"{name} {batch}": (variant(f"qwen2.5-{name}"), batch)
  for name in ("0.5b", "1.5b", "7b")
  for batch in (1, 32, 128)
}
TINY = {
  "tiny 2": (
    ModelConfig(vocab_size=512, width=64, ff=128, attention_bias=True, qk_norm=False),
    2,
  )
}


def step_bytes(cfg: ModelConfig, batch: int, length: float) -> float:
  """Bytes that a decoding step must read in bfloat16.

  All weights (of an input embedding only the rows looked up), and keys and values of
  `length` tokens of each sequence.
  """
  import jax

  weights = sum(x.size for x in jax.tree.leaves(param_shapes(cfg)))
  # A tied one is read whole, as the output matrix.
  if not cfg.tie_embeddings:
    weights -= (cfg.vocab_size - batch) * cfg.width
  cache = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * length * batch
  return 2.0 * (weights + cache)


def measure(
  name: str,
  cfg: ModelConfig,
  batch: int,
  pythons: Mapping[str, str],
  bandwidth: float,
  rounds: int,
  new: int = NEW,
) -> list[dict[str, Any]]:
  """Rows of the table: every contestant in one case, ours first.

  Args:
    name: of the case.
    cfg: what decodes.
    batch: sequences at once.
    pythons: the interpreter of every peer that takes part.
    bandwidth: bytes/s of the memory.
    rounds: timed turns of every contestant.
    new: tokens of every sequence.

  Raises:
    ValueError: a worker ended.
  """
  # --- What the memory alone would take: a cache that is half full on the mean.
  floor = new * step_bytes(cfg, batch, PROMPT + new / 2) / bandwidth
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    model = dataclasses.asdict(cfg)
    del model["windows"], model["yarn"]  # these models have neither
    job = {"model": model, "hf": to_hf_config(cfg), "prompt": PROMPT, "new": new}
    peers.write_job(folder, job)

    # --- Every contestant's turns.
    for who, python in {"ours": sys.executable, **pythons}.items():
      module = "experiments.bench.decode_work"
      # One after the other: together they would not fit a card at 7B.
      with peers.start_worker(who, folder, module, python) as worker:
        turns = peers.warm_turns({who: worker}, rounds, batch=batch)[who]
      seconds = peers.median(turns)
      rows.append(
        {
          "case": name,
          "contestant": who,
          "tokens_per_second": batch * new / seconds,
          "ms_a_step": seconds / new * 1e3,
          "floor": floor / seconds,
          "peak_gb": turns[-1]["peak_mb"] / 1024,
        }
      )
      print(f"{name} {who}: {batch * new / seconds:.0f} tokens/s", flush=True)
  return rows


_COLUMNS = {
  "case": "case",
  "contestant": "who",
  "tokens_per_second": "tokens/s",
  "ms_a_step": "ms a step",
  "floor": "floor",
  "peak_gb": "peak GB",
}


def run() -> dict[str, Any]:
  """Everything the flags ask for: the table and the ratios."""
  # In a process of its own: this one must not hold memory of the GPU.
  *_, backend = peers.run_apart("import jax; print(jax.default_backend())")
  cases = CASES if backend == "gpu" else TINY
  pythons = bench.available("torch")
  new = 32 if bench.QUICK.value else NEW
  rows = []
  for name, (cfg, batch) in bench.chosen(cases).items():
    rows += measure(name, cfg, batch, pythons, _BANDWIDTH.value, bench.rounds(), new)
  rate = "tokens_per_second"
  ratios = {}
  for row, own in bench.against_ours(rows, "case"):
    ratios[f"{row['case']} over {row['contestant']}"] = own[rate] / row[rate]
  return {"bandwidth": _BANDWIDTH.value, "table": rows, "ratios": ratios}


NOTE = "floor: the time that reading weights and cache takes at --bandwidth, over ours."

if __name__ == "__main__":
  run_program(bench.program(run, "Decoding", _COLUMNS, NOTE))
