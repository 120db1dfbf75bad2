r"""Compiles the real programs for TPU slices, without a TPU: do they fit, how fast?

  pip install 'jax[tpu]'   (the compiler, libtpu, in the version that this jax reads)
  python -m experiments.bench.compile_check [--cases=REGEX] [--quick] [--list] \
    [--out=FILE]

A case lowers one program for a slice by ahead-of-time compilation: the step of SFT
(`Learner.jitted`: micro-batches, AdamW, bf16 over float32 master weights), the prefill
of given tokens (`sampler.extend`) or one token of decoding (`sampler.window`). The
compiler says what memory it takes and which collectives it has; they are counted with
the trips of the loops around them. Arithmetic and HBM traffic come from the formulas of
`flops` and `hbm_bytes`, for XLA counts a loop's body once (its own count stands
beside). Each case has a process of its own: the compiler keeps what it allocates.

The roofline is a lower bound: the three kinds of work overlap perfectly and every link
of the interconnect is busy. Exit status 1 when a program does not fit or compile.
Expect every case to fit; 1 to 6 minutes and 3 GB a case on two cores, all in an hour.

budget: the formulas beside the figures that are made of them.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from coa_jax.model.config import ModelConfig
from coa_jax.model.flops import products
from coa_jax.report.metrics import write_json
from coa_jax.report.tables import markdown_table
from experiments.bench import program as bench
from experiments.bench.hlo_text import collectives, cycles
from experiments.bench.program import OUT, QUICK
from experiments.bench.tpu_programs import CASES, SMALLEST, Case, architecture, lower
from experiments.launch import run_program, stop

_LIST = flags.DEFINE_bool("list", False, "Print the cases' names and stop.")
_TEXT = flags.DEFINE_string("text", "", "Folder to write compiled programs' text to.")
_CHILD = flags.DEFINE_string("child", "", "Used by the program itself: one case.")


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip: bf16 FLOP/s, HBM's bytes and bytes/s, bytes/s that its links send, Hz."""

  flops: float
  hbm: float
  hbm_rate: float
  ici_rate: float
  clock: float


# cloud.google.com/tpu/docs/v5e, /v5p and /v6e, tables of key specifications: ICI is
# given there as 1600, 4800 and 3200 Gbps a chip. HBM in decimal GB leaves a few percent
# of reserve: the compiler itself may use 15.75, 95.74 and 31.25 GiB.
# The clocks are those at which the matrix units (v5e 4 of 128 x 128, v5p 8) have the
# peak; v6e's is taken to be v5p's.
CHIPS = {
  "v5e": Chip(197e12, 16e9, 819e9, 200e9, 1.5e9),
  "v5p": Chip(459e12, 95e9, 2765e9, 600e9, 1.75e9),
  "v6e": Chip(918e12, 32e9, 1640e9, 400e9, 1.75e9),
}


def flops(case: Case, cfg: ModelConfig) -> tuple[float, float]:
  """Arithmetic of one step on all chips: the model's, and with what is done again.

  Two per scalar of a matrix and token, and 4 N H per layer, token and key read. A
  training row is one segment whose tokens read half of it on average. Training costs
  the model three forward passes; the chips a fourth (`remat`), and in attention 4.5:
  forward, again, and five products backward for two forward. Where a row is split the
  last device, which all wait for, has 2 - 1 / pieces times the mean work in attention.
  Decoding and prefill read the whole cache, masked.
  """
  layers, head = products(cfg)
  read = 4 * cfg.layers * cfg.heads * cfg.head_dim * case.length
  if case.program == "train":
    tokens = case.count * case.rows * case.length
    uneven = 2 - 1 / case.mesh.get("context", 1)
    matrices, attention = 2 * (layers + head) * tokens, read / 2 * tokens
    return 3 * (matrices + attention), 4 * matrices + 4.5 * uneven * attention
  if case.program == "prefill":
    one = (2 * layers + read) * case.rows * case.count
  else:
    one = (2 * (layers + head) + read) * case.rows
  return one, one


def hbm_bytes(case: Case, cfg: ModelConfig) -> float:
  """Traffic of one step between a chip and its HBM, in bytes.

  Training, per micro-batch: bf16 weights read in three passes (forward, again,
  backward) and their gradient written; activations (x and its norm twice; q, k, v, out;
  gate, up, hidden) and logits written and read in four; per step 28 bytes a parameter:
  weights, moments and gradient read in float32, all but the gradient written.
  Decoding reads weights and cache once. Prefill reads weights, copies its rows of the
  cache, and has scores: float32 written and read twice, bf16 written and read.
  """
  layers, head = products(cfg)
  weights = layers + head
  ways = case.mesh.get("tensor", 1)
  cache = 4 * cfg.layers * cfg.kv_heads * cfg.head_dim * case.length / case.chips
  if case.program == "train":
    tokens = case.rows * case.length / (case.chips / ways)
    inner = (2 * cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim + 3 * cfg.ff
    activations = cfg.layers * (4 * cfg.width + inner / ways) + cfg.vocab_size / ways
    micro = 4 * 2 * weights / ways + 4 * 4 * activations * tokens
    return case.count * micro + 28 * weights / case.chips
  if case.program == "prefill":
    scores = cfg.layers * cfg.heads * case.rows * case.count * case.length / case.chips
    return 2 * layers / ways + 4 * case.rows * cache + 16 * scores
  return 2 * weights / ways + case.rows * cache


def fits(used: float, chip: Chip) -> tuple[bool, float]:
  """Whether so many bytes fit a chip's HBM, and the share of it that is left."""
  return used <= chip.hbm, 1 - used / chip.hbm


def advice(program: str) -> str:
  """What to change when a program does not fit."""
  if program == "train":
    return (
      "more chips for fsdp or context, fewer rows or tokens of a row, a smaller "
      "model.logit_chunk, remat='full'"
    )
  return "more tensor ways, fewer rollout.slots or inject_rows, a smaller max_len"


def measure(case: Case) -> dict[str, Any]:
  """Compiles a case; all its figures, per step and, where not said, per chip.

  budget: one program: built, compiled, read.
  """
  # --- Compile.
  chip = CHIPS[case.topology.partition(":")[0]]
  cfg = architecture(case)
  start = time.monotonic()
  compiled = lower(case).compile()
  seconds = time.monotonic() - start
  text = compiled.as_text()
  if _TEXT.value:
    os.makedirs(_TEXT.value, exist_ok=True)
    file = re.sub(r"\W+", "-", case.name) + ".txt"
    with open(os.path.join(_TEXT.value, file), "w", encoding="utf-8") as f:
      f.write(text)
  # --- Memory, as the compiler says.
  m = compiled.memory_analysis()
  memory = {
    "arguments": m.argument_size_in_bytes,
    "temporaries": m.temp_size_in_bytes,
    "outputs": m.output_size_in_bytes - m.alias_size_in_bytes,
    "code": m.generated_code_size_in_bytes,
  }
  used = sum(memory.values())
  # --- Time: the largest of arithmetic, HBM and interconnect at their peaks.
  model_flops, all_flops = flops(case, cfg)
  traffic = collectives(text, case.chips, case.turns())
  kinds: dict[str, dict[str, float]] = {}
  for c in traffic:
    kind = kinds.setdefault(c.kind, {"count": 0, "size": 0, "sent": 0})
    kind["count"] += c.count
    kind["size"] += c.count * c.size
    kind["sent"] += c.sent
  terms = {
    "compute": all_flops / case.chips / chip.flops,
    "hbm": hbm_bytes(case, cfg) / chip.hbm_rate,
    "ici": sum(c.sent for c in traffic) / chip.ici_rate,
  }
  # A window's tokens share what is done once around its loop.
  tokens_of = case.count if case.program == "decode" else 1
  estimate = cycles(text, tokens_of * case.turns()) / tokens_of / chip.clock
  step = max(terms.values())
  tokens = case.rows * (1 if case.program == "decode" else case.count)
  tokens *= case.length if case.program == "train" else 1
  good, margin = fits(used, chip)
  return {
    "fits": good,
    "margin": margin,
    "used": used,
    "hbm": chip.hbm,
    "memory": memory,
    "flops": all_flops / case.chips,
    "xla_flops": (compiled.cost_analysis() or {}).get("flops"),
    "hbm_bytes": hbm_bytes(case, cfg),
    "xla_bytes": (compiled.cost_analysis() or {}).get("bytes accessed"),
    "collectives": kinds,
    "largest": [{**dataclasses.asdict(c), "sent": c.sent} for c in traffic[:8]],
    "terms": terms,
    "seconds": step,
    "xla_seconds": estimate,
    "bound": max(terms, key=terms.get),
    "tokens_per_s": tokens / step,
    "mfu": model_flops / case.chips / chip.flops / step,
    "compile_seconds": seconds,
  }


_COLUMNS = {
  "case": "case",
  "used": "GB a chip",
  "hbm": "of",
  "left": "left",
  "tflop": "TFLOP",
  "xla_tflop": "XLA's",
  "gathered": "gather",
  "reduced": "reduce",
  "scattered": "scatter",
  "moved": "other GB",
  "compute": "compute ms",
  "traffic": "HBM ms",
  "ici": "ICI ms",
  "xla": "XLA ms",
  "rate": "tokens/s",
  "mfu": "MFU",
  "compile": "compile s",
}

_NOTE = """
Per chip and step; for decode and its tokens/s, one token of every slot. gather, reduce,
scatter, other: GB that a chip sends, loops counted. XLA's TFLOP count a loop once. XLA
ms: its own estimate without collectives and attention kernels. A step takes at least
the largest of the three other times; MFU and tokens/s (of all chips) are of that bound.
"""


def row_of(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
  """A row of the table; GB are decimal, collectives' are what a chip sends."""
  sent = collections.Counter(
    {k: v["sent"] / 1e9 for k, v in figures["collectives"].items()}
  )
  terms = {k: 1e3 * v for k, v in figures["terms"].items()}
  return {
    "case": name,
    "used": figures["used"] / 1e9,
    "hbm": f"{figures['hbm'] / 1e9:.0f}",
    "left": f"{figures['margin']:.0%}",
    "tflop": figures["flops"] / 1e12,
    "xla_tflop": (figures["xla_flops"] or 0) / 1e12,
    "gathered": sent["all-gather"],
    "reduced": sent["all-reduce"],
    "scattered": sent["reduce-scatter"],
    "moved": sent["all-to-all"] + sent["collective-permute"],
    "compute": terms["compute"],
    "traffic": terms["hbm"],
    "ici": terms["ici"],
    "xla": 1e3 * figures["xla_seconds"],
    "rate": figures["tokens_per_s"],
    "mfu": figures["mfu"],
    "compile": figures["compile_seconds"],
  }


def compile_apart(name: str) -> dict[str, Any]:
  """`measure` in a process of its own; {"error": one line} where it fails."""
  command = [sys.executable, "-m", "experiments.bench.compile_check", f"--child={name}"]
  if _TEXT.value:
    command.append(f"--text={_TEXT.value}")
  settings = {
    "JAX_PLATFORMS": "cpu",  # where the host's own small arrays go
    # No cloud is asked which TPU this is, and none is claimed.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # any; the topology of the case decides
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }
  done = subprocess.run(
    command, env={**os.environ, **settings}, capture_output=True, text=True
  )
  lines = done.stderr.splitlines()
  if done.returncode == 0:
    out = json.loads(done.stdout.splitlines()[-1])
    out["warnings"] = [x for x in lines if "nvoluntary full remat" in x]
    return out
  is_reason = re.compile(r"Ran out of memory|Exceeded|Error\b|Error:")
  reasons = [x.strip() for x in lines if is_reason.search(x)] or lines[-1:]
  return {"error": " ".join(reasons[-2:])[:600] or f"exit status {done.returncode}"}


def run(names: list[str]) -> dict[str, Any]:
  """Every case's figures by name, and the share of HBM that each takes."""
  table: dict[str, dict[str, Any]] = {}
  for i, name in enumerate(names, 1):
    print(f"[{i}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    figures = compile_apart(name)
    table[name] = figures
    seconds = f"{time.monotonic() - start:.0f} s"
    print(f"  {verdict(name, figures)} ({seconds})", file=sys.stderr, flush=True)
  ratios = {k: v["used"] / v["hbm"] for k, v in table.items() if "used" in v}
  return {"table": table, "ratios": ratios}


def verdict(name: str, figures: Mapping[str, Any]) -> str:
  """One line: it fits with so much to spare, or what to change."""
  change = f"try {advice(CASES[name].program)}"
  if "error" in figures:
    short = "memory" in figures["error"]
    return f"DOES NOT {'FIT' if short else 'COMPILE'}: {figures['error']}" + (
      f"; {change}" if short else ""
    )
  used, hbm = figures["used"] / 1e9, figures["hbm"] / 1e9
  if not figures["fits"]:
    return f"DOES NOT FIT: {used:.1f} GB of {hbm:.0f}, {used - hbm:.1f} over; {change}"
  return f"fits: {used:.1f} GB of {hbm:.0f}, {figures['margin']:.0%} left"


def main() -> None:
  """Prints the table and what is wrong; writes the figures where --out says."""
  names = [SMALLEST] if QUICK.value else list(CASES)
  names = [name for name in names if re.search(bench.CASES.value, name)]
  if not names:
    stop(f"--cases={bench.CASES.value!r} finds none; --list prints their names")
  if _LIST.value:
    print("\n".join(names))
    return
  if importlib.util.find_spec("libtpu") is None:
    stop("this needs the compiler for TPUs: pip install 'jax[tpu]'")
  if _CHILD.value:
    print(json.dumps(measure(CASES[_CHILD.value])))
    return
  figures = run(names)
  rows = [row_of(k, v) for k, v in figures["table"].items() if "used" in v]
  print(markdown_table(rows, _COLUMNS) + _NOTE)
  if OUT.value:
    write_json(OUT.value, figures)
  bad = [k for k, v in figures["table"].items() if not v.get("fits")]
  for name in bad:
    print(f"{name}: {verdict(name, figures['table'][name])}", file=sys.stderr)
  sys.exit(bool(bad))


if __name__ == "__main__":
  run_program(main)
