"""Model FLOP utilisation of the SFT step on a GPU, torch with transformers beside it.

  python -m experiments.bench.mfu [--quick] [--out=FILE.json] [--cases=REGEX]
    [--torch_python=python3]   pip install torch transformers peft

Qwen2.5 0.5B, 1.5B (full fine-tuning: float32 parameters, bfloat16 computation) and 7B
(bfloat16 weights, LoRA of rank 64), rows of 4,096 and 16,384 tokens with five segments
each, 32,768 tokens a step, AdamW. Random weights from one Hugging Face folder; first
losses must agree to 1 %. Contestants are processes of their own that take turns, both
on the first GPU; see `bench.train`, whose workers these are.

MFU: the model's arithmetic (`coa_jax.model.flops`; nothing computed again, nothing
masked) over seconds and over the rate of a bfloat16 matrix product measured first, of
8,192 x 8,192 random numbers. Without a GPU: a tiny model, to see the script work.
"""

from __future__ import annotations

import time
from typing import Any

from coa_jax.model.config import ModelConfig
from coa_jax.model.flops import train_flops
from coa_jax.model.variants import variant
from experiments.bench import peers
from experiments.bench import program as bench
from experiments.bench.train import race, ratios, setting_text
from experiments.bench.train_work import Size, segments
from experiments.launch import run_program

TOLERANCE = 1e-2  # relative, between losses in bfloat16
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


def case(cfg: ModelConfig, length: int, lora: int = 0, tokens: int = 32_768) -> Size:
  """A model trained on `tokens` tokens a step, in rows of `length`."""
  model = {name: getattr(cfg, name) for name in _MODEL}
  return Size(model, tokens // length, 2, length, "bfloat16", lora)


CASES = {
  f"{name} {length // 1024}k": case(variant(f"qwen2.5-{name}"), length, lora)
  for name, lora in (("0.5b", 0), ("1.5b", 0), ("7b", 64))
  for length in (4_096, 16_384)
}
_TINY_MODEL = ModelConfig(
  vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, ff=128
)
TINY = {
  "tiny 1k": case(_TINY_MODEL, 1_024, tokens=2_048),
  "tiny LoRA 1k": case(_TINY_MODEL, 1_024, lora=4, tokens=2_048),
}
# One row at a time fills a GPU. torch keeps whole logits, so it recomputes its layers
# where memory would not do; ours never has logits of more than a chunk.
SETTINGS: dict[str, dict[str, Any]] = {
  "ours": {"rows": 1, "scan": True, "remat": "attention", "logit_chunk": 2_048},
  "torch": {"rows": 1, "attention": "sdpa", "compile": False, "remat": True},
}


def matmul_rate(size: int = 8_192, products: int = 20) -> float:
  """FLOP/s of bfloat16 products of two square matrices of random numbers, by JAX."""
  import jax
  import jax.numpy as jnp

  @jax.jit
  def run(a: jax.Array, b: jax.Array) -> jax.Array:
    # Each product needs the one before; the scale keeps numbers of one size.
    scaled = b * jnp.bfloat16(size**-0.5)
    return jax.lax.fori_loop(0, products, lambda _, x: x @ scaled, a)

  keys = jax.random.split(jax.random.key(0))
  a, b = (jax.random.normal(k, (size, size), jnp.bfloat16) for k in keys)
  seconds = []
  for _ in range(6):
    began = time.perf_counter()
    run(a, b).block_until_ready()
    seconds.append(time.perf_counter() - began)
  return 2 * size**3 * products / min(seconds[1:])


def measure(
  name: str, size: Size, pythons: dict[str, str], peak: float, rounds: int
) -> list[dict[str, Any]]:
  """Rows of the table: every contestant in one case, ours first.

  Args as of `train.race`, the case's name, and FLOP/s of a matrix product.

  Raises:
    ValueError: losses differ, or a worker ended.
  """
  first, turns = race(size, pythons, SETTINGS, rounds, checked=1, tolerance=TOLERANCE)
  per_row = segments(size.length)
  flops = train_flops(ModelConfig(**size.model), per_row * size.rows, size.lora > 0)
  rows = []
  for who, answers in turns.items():
    seconds = peers.median(answers) / size.steps
    rows.append(
      {
        "case": name,
        "contestant": who,
        "first_loss": first[who][0],
        "seconds_per_step": seconds,
        "tokens_per_second": size.rows * size.length / seconds,
        "tflops_per_second": flops / seconds / 1e12,
        "mfu": flops / seconds / peak,
        "peak_gb": answers[-1]["peak_mb"] / 1024,
        "setting": setting_text(SETTINGS.get(who, SETTINGS["ours"])),
      }
    )
  return rows


_COLUMNS = {
  "case": "case",
  "contestant": "who",
  "tokens_per_second": "tokens/s",
  "tflops_per_second": "TFLOP/s",
  "mfu": "MFU",
  "peak_gb": "peak GB",
  "setting": "setting",
}


def run() -> dict[str, Any]:
  """Everything the flags ask for: the table and the ratios."""
  # In a process of its own: this one must not hold memory of the GPU.
  code = (
    "import jax; from experiments.bench import mfu as b; gpu = "
    "jax.default_backend() == 'gpu'; print(gpu, b.matmul_rate(8192 if gpu else 512))"
  )
  gpu, rate = peers.run_apart(code)[-2:]
  peak = float(rate)
  cases = CASES if gpu == "True" else TINY
  print(f"a bfloat16 matrix product: {peak / 1e12:.1f} TFLOP/s", flush=True)
  pythons = bench.available("torch")
  rows = []
  for name, size in bench.chosen(cases).items():
    rows += measure(name, size, pythons, peak, bench.rounds())
  return {
    "matmul_flops_per_second": peak,
    "table": rows,
    "ratios": ratios(rows, "case", "peak_gb"),
  }


NOTE = "MFU: the model's own arithmetic over that of a matrix product, measured."

if __name__ == "__main__":
  run_program(bench.program(run, "SFT step", _COLUMNS, NOTE))
