"""Stages for `bench.gpu`, one process each.

python -m experiments.bench.gpu_work STAGE DIR TORCH_PYTHON SIZE...
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model import decode_params
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.model.flops import peak_flops, train_flops
from coa_jax.model.hf.config import to_hf_config
from coa_jax.model.transformer import init_params, param_shapes
from coa_jax.model.variants import variant
from coa_jax.rollout import sampler
from coa_jax.rollout.replicas import ReplicaPool
from coa_jax.rollout.types import RolloutConfig
from experiments.bench import peers, train
from experiments.bench.rollout_work import endless, play_turns, prompts
from experiments.bench.train_work import Size, segments

_HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
_TINY = ModelConfig(
  vocab_size=512, width=128, ff=256, layers=2, heads=4, kv_heads=2, head_dim=64
)
_PAGE = 256  # tokens
_PRODUCTS = 20  # in a row
_STEPS = 16  # per window


class Figures:
  """A stage's rows, each written to its file at once."""

  def __init__(self, stage: str, out: str):
    self._file = pathlib.Path(out, f"{stage}.json")
    self.rows: list[dict[str, Any]] = []

  def add(self, **row: Any) -> None:
    self.rows.append(row)
    print(row, flush=True)
    self._file.write_text(json.dumps(self.rows, indent=1))


def seconds_of(run: Callable[[], Any], rounds: int = 5, warm: int = 3) -> float:
  """Median seconds of a call with array results, after `warm` calls to compile."""
  seconds = []
  for _ in range(warm + rounds):
    began = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds[warm:])


def model(size: str) -> ModelConfig:
  return _TINY if size == "tiny" else variant(f"qwen2.5-{size}")


def is_tiny(sizes: list[str]) -> bool:
  return sizes == ["tiny"]


# --- rates


def copy_rate(megabytes: int) -> float:
  """Bytes per second read and written by a copy."""
  x = jax.random.normal(jax.random.key(0), (megabytes << 18,))
  negate = jax.jit(jnp.negative)
  return 2 * x.nbytes / seconds_of(lambda: negate(x))


def product_rate(size: int, dtype: str, precision: str) -> float:
  """FLOP/s for products of random square matrices."""

  @jax.jit
  def run(a: jax.Array, b: jax.Array) -> jax.Array:
    # Each product needs the previous product; the scale keeps numbers bounded.
    scaled = b * jnp.asarray(size**-0.5, b.dtype)
    multiply = lambda _, x: jnp.matmul(x, scaled, precision=precision)  # noqa: E731
    return jax.lax.fori_loop(0, _PRODUCTS, multiply, a)

  keys = jax.random.split(jax.random.key(0))
  a, b = (jax.random.normal(k, (size, size), dtype) for k in keys)
  return 2 * size**3 * _PRODUCTS / seconds_of(lambda: run(a, b))


def rates(figures: Figures, torch: str, sizes: list[str]) -> None:
  device = jax.devices()[0]
  figures.add(what=f"{device.device_kind}, jax {jax.__version__}")
  figures.add(
    what="copy, TB/s", figure=copy_rate(64 if is_tiny(sizes) else 4_096) / 1e12
  )
  size = 512 if is_tiny(sizes) else 8_192
  for dtype, precision in (
    ("bfloat16", "default"),
    ("float32", "default"),
    ("float32", "highest"),
  ):
    rate = product_rate(size, dtype, precision)
    figures.add(what=f"{dtype} product, {precision}, TFLOP/s", figure=rate / 1e12)


# --- window


def step_bytes(cfg: ModelConfig, rows: int, length: float) -> float:
  """Bytes a bfloat16 decoding step must read: the weights and the rows' cache.

  A separate input embedding counts only its used rows; a tied embedding counts whole,
  as the output matrix.
  """
  weights = sum(x.size for x in jax.tree.leaves(param_shapes(cfg)))
  if not cfg.tie_embeddings:
    weights -= (cfg.vocab_size - rows) * cfg.width
  cache = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * length * rows
  return 2.0 * (weights + cache)


def window_step(cfg: ModelConfig, rows: int, length: int) -> tuple[float, float]:
  """Seconds to compile a sampling window, and seconds per step.

  All `rows` slots are active, with `length` cached tokens; weights are random.
  """
  # --- The model and a full random cache.
  cfg = decode_params.architecture(dataclasses.replace(cfg, **_HALF))
  (params,) = decode_params.decoding_views(cfg, init_params(cfg, 0))
  blocks = -(-(length + _STEPS) // _PAGE)
  cache = KVCache.empty(cfg, rows * blocks, _PAGE)
  keys = iter(jax.random.split(jax.random.key(1), 2 * cfg.layers))
  draw = jax.jit(lambda key, x: jax.random.normal(key, x.shape, x.dtype))
  cache = jax.tree.map(lambda x: draw(next(keys), x), cache)
  table_BC = jnp.arange(rows * blocks, dtype=jnp.int32).reshape(rows, blocks)
  # --- Slots in the middle of their trajectories.
  zero_B = jnp.zeros(rows, jnp.int32)
  state = sampler.SamplerState(
    length_B=zero_B + length,
    pending_B=zero_B,
    limit_B=zero_B + length + _STEPS + 2,
    seed_B=jnp.zeros(rows, jnp.uint32),
    sequence_B=jnp.arange(rows, dtype=jnp.uint32),
    temperature_B=jnp.ones(rows),
    automaton_B=zero_B,
    active_B=jnp.ones(rows, bool),
    grammar_B=zero_B,
  )
  stops = endless(cfg.vocab_size)
  tables = sampler.Tables(
    *map(jnp.asarray, (stops.class_V, stops.next_SC, stops.stop_SC))
  )
  draws_BW = jnp.full((rows, _STEPS), -1, jnp.int32)

  def sample() -> sampler.Sampled:
    nonlocal cache
    cache, _, out = sampler.window(
      cfg, params, cache, table_BC, state, tables, draws_BW
    )
    return out

  # --- The first call compiles.
  began = time.perf_counter()
  assert int(sample().count_B.sum()) == rows * _STEPS
  compiling = time.perf_counter() - began
  return compiling, seconds_of(sample, warm=4) / _STEPS


def window(figures: Figures, torch: str, sizes: list[str]) -> None:
  bandwidth = copy_rate(64 if is_tiny(sizes) else 4_096)
  length = 256 if is_tiny(sizes) else 1_024
  for name in sizes:
    cfg = model(name)
    for rows in (4,) if is_tiny(sizes) else (64, 1, 256):
      compiling, seconds = window_step(cfg, rows, length)
      figures.add(
        case=f"{name}, {rows} rows",
        compile_s=compiling,
        ms_a_step=seconds * 1e3,
        tokens_s=rows / seconds,
        of_bandwidth=step_bytes(cfg, rows, length) / bandwidth / seconds,
      )


# --- train

_MODEL = (
  "vocab_size",
  "width",
  "layers",
  "heads",
  "kv_heads",
  "head_dim",
  "ff",
  "rope_theta",
  "tie_embeddings",
  "attention_bias",
  "qk_norm",
)
# One row fills a GPU. torch recomputes layers only if it must.
_SETTINGS: dict[str, dict[str, Any]] = {
  "ours": {"rows": 1, "scan": True, "remat": "attention", "logit_chunk": 2_048},
  "torch": {"rows": 1, "attention": "sdpa", "compile": True, "remat": False},
}


def train_stage(figures: Figures, torch: str, sizes: list[str]) -> None:
  """SFT steps; first losses must agree to 1 %."""
  peak = product_rate(512 if is_tiny(sizes) else 8_192, "bfloat16", "default")
  datasheet = peak_flops(jax.devices()[0].device_kind) or peak
  pythons = peers.available({"torch": torch})
  length, rows = (1_024, 2) if is_tiny(sizes) else (4_096, 8)
  for name in sizes:
    cfg = model(name)
    fields = {field: getattr(cfg, field) for field in _MODEL}
    size = Size(fields, rows, steps=2, length=length, dtype="bfloat16")
    first, turns = train.race(
      size, pythons, _SETTINGS, 1 if is_tiny(sizes) else 3, checked=1, tolerance=1e-2
    )
    flops = train_flops(cfg, segments(size) * rows, False)
    for who, answers in turns.items():
      seconds = peers.median(answers) / size.steps
      figures.add(
        case=name,
        who=who,
        loss=first[who][0],
        tokens_s=rows * length / seconds,
        mfu=flops / seconds / peak,
        mfu_datasheet=flops / seconds / datasheet,
        peak_gb=answers[-1]["peak_mb"] / 1024,
      )


# --- decode


def decode(figures: Figures, torch: str, sizes: list[str]) -> None:
  """The scheduler, then transformers' `generate` in a separate process."""
  pythons = peers.available({"torch": torch})
  prompt, new = (32, 32) if is_tiny(sizes) else (128, 256)
  for name in sizes:
    cfg = model(name)
    params = init_params(dataclasses.replace(cfg, **_HALF), 0)
    for rows in (2,) if is_tiny(sizes) else (64, 1, 256):
      seconds = _our_turn(dataclasses.replace(cfg, **_HALF), params, rows, prompt, new)
      case = {"case": f"{name}, {rows} rows"}
      figures.add(**case, who="ours", tokens_s=rows * new / seconds)
    del params
    for python in pythons.values():
      with tempfile.TemporaryDirectory() as folder:
        job = {"hf": to_hf_config(cfg), "prompt": prompt, "new": new}
        peers.write_job(folder, job)
        module = "experiments.bench.generate_work"
        with peers.start_worker("torch", folder, module, python) as worker:
          for rows in (2,) if is_tiny(sizes) else (64, 1):
            turns = peers.warm_turns({"torch": worker}, 1, rows=rows)["torch"]
            rate = rows * new / peers.median(turns)
            figures.add(case=f"{name}, {rows} rows", who="torch", tokens_s=rate)


def _our_turn(cfg: ModelConfig, params: Any, rows: int, prompt: int, new: int) -> float:
  config = RolloutConfig(slots=rows, max_len=prompt + new, window=32)
  engine = ReplicaPool(cfg, endless(cfg.vocab_size), config)
  seconds = []
  for turn in range(3):
    began = time.perf_counter()
    play_turns(engine, params, prompts(rows, prompt, cfg.vocab_size, turn), new)
    seconds.append(time.perf_counter() - began)
  return min(seconds[1:])


# --- compile


def compile_stage(figures: Figures, torch: str, sizes: list[str]) -> None:
  """Compiles the programs of a 0.5B run's first rollout."""
  cfg = dataclasses.replace(model(sizes[0]), **_HALF)
  params = init_params(cfg, 0)
  config = RolloutConfig(slots=4 if is_tiny(sizes) else 64, max_len=1_536, window=8)
  engine = ReplicaPool(cfg, endless(cfg.vocab_size), config)
  began = time.perf_counter()
  play_turns(engine, params, prompts(1, 16, cfg.vocab_size), 8)
  figures.add(
    what="first rollout, everything compiled, s",
    figure=time.perf_counter() - began,
    flags=os.environ.get("XLA_FLAGS", ""),
  )


# --- correct


def correct(figures: Figures, torch: str, sizes: list[str]) -> None:
  """Runs tests/test_gpu.py; one row per test."""
  with tempfile.TemporaryDirectory() as folder:
    report = os.path.join(folder, "report.xml")
    command = [sys.executable, "-m", "pytest", "-n", "0", f"--junitxml={report}"]
    subprocess.run([*command, "tests/test_gpu.py"], cwd=peers.ROOT, check=False)
    cases = xml.etree.ElementTree.parse(report).iter("testcase")
  for case in cases:
    ended = [c.tag for c in case if c.tag in ("failure", "error", "skipped")]
    figures.add(
      test=case.get("name"),
      ended=ended[0] if ended else "passed",
      seconds=float(case.get("time")),
    )


STAGES = {
  "rates": rates,
  "window": window,
  "train": train_stage,
  "decode": decode,
  "compile": compile_stage,
  "correct": correct,
}

if __name__ == "__main__":
  name, folder, python = sys.argv[1:4]
  STAGES[name](Figures(name, folder), python, sys.argv[4:])
