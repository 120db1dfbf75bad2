r"""Compiles an RL run's programs for a TPU slice without one: do they fit, how fast?

  pip install 'jax[tpu]'   (the compiler, libtpu, in the version that this jax reads)
  python -m experiments.bench.compile_check --config=configs/rl_qwen.py \
    --slice=v5p:2x2x4 --config.algo.batch.rows=16 [--slices=2 --config.mesh.data=2] \
    [--model=qwen2.5-7b] [--config.SECTION.FIELD=VALUE] [--list] [--top=N]
  python -m experiments.bench.compile_check [--cases=REGEX] [--out=FILE]

With a config the command compiles that run's programs as `rl.run` builds them, for one
decoding replica. The model is the folder `init`, or a published model with --model. By
default it compiles the deciding programs: the step, the decode parameters, and the
largest cache's window and longest prefill; --cases selects others, and --list prints
all names. The command refuses the same runs as `rl.run`. Without a config it compiles
the runs in `CASES`. With --quick, models have two layers.

Columns, per device (half a chip of TPU7x), and per token of a window:
  own, beside  GB of the program; GB of the run's other arrays meanwhile.
  needed       minimum GB to read and write: weights once per pass, keys and values of
               --live tokens per slot, the state.
  moved        GB that the compiled instructions read and write, loop trips counted;
               kernels count operands and results once, and only the rows' own pages.
  copies       number and GB of copies at least half as large as a layer's pool array.
  sorts        number of sorts.
  collectives  number of collectives, number of overlapped ones, GB a device sends.
  between      number and GB of transfers between slices.
  Gcycles      10^9 cycles, by the compiler, without collectives and kernels.
  floor ms     the longest of arithmetic, needed GB and sent GB at the chip's peaks.
  estimate ms  the compiler's cycles, collectives that do not overlap, and kernels'
               traffic at HBM's peak; without kernels' arithmetic and traffic between
               slices.
Three plain programs convert cycles to seconds: a large product (for learn, score and
prefill), a product with 64 rows (for windows), a stream of multiplications (for the
rest). Nothing is measured.

--slice=h100:8 (or h200; up to a host's eight, or whole hosts) compiles for absent GPUs:
pip install 'jax[cuda13]'. Their compiler estimates no cycles.
--top=N adds each program's N longest operations, with their place in the model: by
cycles, on GPUs by traffic at HBM's peak; without kernels. XLA writes the compiled
programs' text if XLA_FLAGS has --xla_dump_to=FOLDER.

The exit status is 1 if a program does not compile or fit. Each program compiles in its
own process, because the compiler keeps its memory.

budget: the figures next to their sources.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags
from jax.sharding import SingleDeviceSharding

from coa_jax.cli.deploy.slices import read_slice
from coa_jax.cli.launch import run_program, start, stop
from coa_jax.plan.rl import RLConfig
from coa_jax.report.metrics import write_json
from coa_jax.report.tables import markdown_table
from coa_jax.runtime.config import read_config
from coa_jax.runtime.json_io import read_object
from experiments.bench import program as bench
from experiments.bench import run_programs
from experiments.bench.gpus import gpus, read_gpus
from experiments.bench.hlo_text import collectives
from experiments.bench.hlo_work import operations, work
from experiments.bench.program import OUT, QUICK
from experiments.bench.run_programs import Program

_SLICE = flags.DEFINE_string("slice", "", "As v5p:2x2x4, v5p-32, or h100:8.")
_SLICES = flags.DEFINE_integer("slices", 1, "How many of them share mesh.data.", 1)
_MODEL = flags.DEFINE_string("model", "", "A published model in place of config.init.")
_LIVE = flags.DEFINE_integer(
  "live", 0, "Tokens a slot holds on average; 0 for a quarter of rollout.max_len.", 0
)
_LIST = flags.DEFINE_bool("list", False, "Print the programs' names and stop.")
_TOP = flags.DEFINE_integer("top", 0, "Print so many of the longest operations.", 0)
_CHILD = flags.DEFINE_string("child", "", "Used by the program itself: one program.")

_QUICK_LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Chip:
  """A device's peaks.

  Attributes:
    flops: bf16 operations per second.
    hbm: bytes of memory.
    hbm_rate: memory bytes per second.
    ici_rate: bytes sent per second within a slice, or within a GPU host.
    dcn_rate: bytes sent per second between slices, or between GPU hosts.
  """

  flops: float
  hbm: float
  hbm_rate: float
  ici_rate: float
  dcn_rate: float


# cloud.google.com/tpu/docs/v5e, /v5p, /v6e and /tpu7x, tables of key specifications.
# ICI is half the figure there, which is for both directions; DCN is 25, 50, 100 and
# 100 Gb/s per chip. HBM in decimal GB leaves a reserve of a few percent: the compiler
# itself may use 15.75, 95.74 and 31.25 GiB. A TPU7x chip is two devices.
CHIPS = {
  "v5e": Chip(197e12, 16e9, 819e9, 200e9, 3.1e9),
  "v5p": Chip(459e12, 95e9, 2765e9, 600e9, 6.25e9),
  "v6e": Chip(918e12, 32e9, 1640e9, 400e9, 12.5e9),
  "tpu7x": Chip(1153.5e12, 96e9, 3690e9, 300e9, 6.25e9),
  # NVIDIA's data sheets: NVLink one way, 400 Gb/s per GPU between hosts. Memory is
  # JAX's default share, as seen on one GPU of each kind.
  "h100": Chip(989e12, 63.7e9, 3350e9, 450e9, 50e9),
  "h200": Chip(989e12, 112.6e9, 4800e9, 450e9, 50e9),
}


def _case(topology: str, model: str, length: int, **fields: Any) -> list[str]:
  """A run's command line: four micro-batches with one row per chip."""
  chips = read_slice(topology).chips
  changes = {
    "rollout.max_len": length,
    "algo.batch.length": length,
    "algo.batch.rows": chips,
    "algo.sampling.prompts": chips // 2,
    "algo.sampling.samples": 8,
    "model.scan": True,
    **fields,
  }
  words = ["--config=configs/rl_qwen.py", f"--slice={topology}", f"--model={model}"]
  return [*words, *[f"--config.{name}={value}" for name, value in changes.items()]]


CASES = {
  "qwen2.5-0.5b v5e:2x2 2k": _case("v5e:2x2", "qwen2.5-0.5b", 2_048),
  "qwen3-8b v6e:4x4 8k": _case("v6e:4x4", "qwen3-8b", 8_192, **{"rollout.tensor": 4}),
  "qwen2.5-7b v5p:2x2x4 32k": _case(
    "v5p:2x2x4", "qwen2.5-7b", 32_768, **{"rollout.tensor": 4}
  ),
  "qwen2.5-32b v5p:4x4x4 32k": _case(
    "v5p:4x4x4",
    "qwen2.5-32b",
    32_768,
    **{
      "rollout.tensor": 4,
      "mesh.context": 4,
      "algo.batch.rows": 16,
      "algo.sampling.prompts": 8,
    },
  ),
  "qwen2.5-7b tpu7x:2x2x2 32k": _case(
    "tpu7x:2x2x2",
    "qwen2.5-7b",
    32_768,
    **{"rollout.tensor": 4, "algo.batch.rows": 16},  # two devices per chip
  ),
}

_COLUMNS = {
  "program": "program",
  "own": "own GB",
  "beside": "beside",
  "hbm": "of",
  "temporaries": "of own: temporaries",
  "needed": "needed GB",
  "moved": "moved GB",
  "kernels": "kernels",
  "copies": "copies",
  "sorts": "sorts",
  "collectives": "collectives",
  "between": "between slices",
  "cycles": "Gcycles",
  "floor": "floor ms",
  "estimate": "estimate ms",
  "compile": "compile s",
}
_BY_CYCLES = ("cycles", "estimate")  # columns without values for GPUs


def measure(program: Program, chip: Chip, device: jax.Device) -> dict[str, Any]:
  """Compiles a program; returns its figures."""
  # --- Compile.
  start_time = time.monotonic()
  compiled = program.lower().compile()
  seconds = time.monotonic() - start_time
  text = compiled.as_text()

  # --- Memory, as the compiler says.
  m = compiled.memory_analysis()
  outputs = m.output_size_in_bytes - m.alias_size_in_bytes
  own = m.argument_size_in_bytes + m.temp_size_in_bytes + outputs
  own += m.generated_code_size_in_bytes

  # --- Its traffic.
  done = work(text, program.turns, program.large, program.units, program.pool_read)
  traffic = collectives(text, program.devices, program.turns)
  between = [c for c in traffic if c.between_slices]
  traffic = [c for c in traffic if not c.between_slices]
  sent = sum(c.sent for c in traffic) / program.units
  waited = sum(c.sent for c in traffic if not c.overlapped) / program.units
  sent_between = sum(c.sent for c in between) / program.units

  # --- Time.
  floors = {
    "compute": program.flops / chip.flops,
    "hbm": program.needed / chip.hbm_rate,
    "ici": sent / chip.ici_rate,
    "dcn": sent_between / chip.dcn_rate,
  }
  timed: dict[str, Any] = {}
  if device.platform == "tpu":
    rates = calibrate(device, chip)
    timed["rates"] = rates
    timed["estimate"] = (
      done.product_cycles / _product_rate(program, rates)
      + done.other_cycles / rates["stream"]
      + done.kernels_moved / chip.hbm_rate
      + waited / chip.ici_rate
    )
  if _TOP.value:
    timed["top"] = _longest(program, text, chip, timed.get("rates"))
  return {
    "fits": own + program.beside <= chip.hbm,
    "own": own,
    "beside": program.beside,
    "hbm": chip.hbm,
    "temporaries": m.temp_size_in_bytes,
    "needed": program.needed,
    **dataclasses.asdict(done),
    "collectives": sum(c.count for c in traffic) / program.units,
    "overlapped": sum(c.count for c in traffic if c.overlapped) / program.units,
    "sent": sent,
    "between": sum(c.count for c in between) / program.units,
    "sent_between": sent_between,
    "largest": [
      {**dataclasses.asdict(c), "sent": c.sent} for c in (*between, *traffic)[:8]
    ],
    "floors": floors,
    "floor": max(floors.values()),
    "bound": max(floors, key=floors.get),
    "compile_seconds": seconds,
    **timed,
  }


def _product_rate(program: Program, rates: Mapping[str, float]) -> float:
  """Cycles per second for a program's matrix products."""
  return rates["rows"] if program.units > 1 else rates["product"]


def _longest(
  program: Program, text: str, chip: Chip, rates: Mapping[str, float] | None
) -> list[dict[str, Any]]:
  """The longest operations, by cycles with `calibrate`'s rates, else by traffic."""
  rows = []
  for x in operations(text, program.turns, program.units):
    takes = x.moved / chip.hbm_rate
    if rates:
      takes = x.cycles / (
        _product_rate(program, rates) if x.product else rates["stream"]
      )
    rows.append({**dataclasses.asdict(x), "seconds": takes})
  rows.sort(key=lambda x: -x["seconds"])
  return rows[: _TOP.value]


def calibrate(device: jax.Device, chip: Chip) -> dict[str, float]:
  """The compiler's cycles per second of three plain programs at the chip's peaks.

  Arithmetic bounds a product of two 8192 x 8192 matrices; HBM bounds a product with 64
  rows, and a stream.
  """
  place = SingleDeviceSharding(device)

  def cycles(function: Any, *shapes: tuple[int, int]) -> float:
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in shapes]
    done = work(jax.jit(function).lower(*arrays).compile().as_text(), (1,))
    return done.product_cycles + done.other_cycles

  n = 8192
  product = cycles(jnp.matmul, (n, n), (n, n))
  rows = cycles(jnp.matmul, (64, n), (n, n))
  stream = cycles(lambda x: 2 * x + 1, (n, n))
  return {
    "product": product / (2 * n**3 / chip.flops),
    "rows": rows / (2 * n**2 / chip.hbm_rate),
    "stream": stream / (4 * n**2 / chip.hbm_rate),
  }


def row_of(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
  """Formats a program's figures as a table row."""
  copies = f"{figures['copies']:.3g}: {figures['copied'] / 1e9:.1f}"
  collected = f"{figures['collectives']:.0f}, {figures['overlapped']:.0f}"
  return {
    "program": name,
    "own": figures["own"] / 1e9,
    "beside": figures["beside"] / 1e9,
    "hbm": f"{figures['hbm'] / 1e9:.0f}",
    "temporaries": figures["temporaries"] / 1e9,
    "needed": figures["needed"] / 1e9,
    "moved": figures["moved"] / 1e9,
    "kernels": f"{figures['kernels']:.0f}",
    "copies": copies if figures["copies"] else "0",
    "sorts": f"{figures['sorts']:.0f}",
    "collectives": f"{collected}, {figures['sent'] / 1e9:.1f}",
    "between": f"{figures['between']:.0f}, {figures['sent_between'] / 1e9:.2f}",
    "cycles": (figures["product_cycles"] + figures["other_cycles"]) / 1e9,
    "floor": 1e3 * figures["floor"],
    "estimate": 1e3 * figures.get("estimate", 0),
    "compile": f"{figures['compile_seconds']:.0f}",
  }


def top_table(figures: Mapping[str, Any]) -> str:
  """Formats a program's longest operations as a table."""
  rows = [
    {
      "ms": 1e3 * x["seconds"],
      "GB": x["moved"] / 1e9,
      "count": x["count"],
      "kind": "product" if x["product"] else "other",
      "result": x["result"],
      # The innermost scopes: the outermost are the same for all.
      "origin": x["origin"][-80:],
    }
    for x in figures["top"]
  ]
  columns = ("origin", "result", "kind", "count", "GB", "ms")
  return markdown_table(rows, {name: name for name in columns})


def verdict(name: str, figures: Mapping[str, Any]) -> str:
  """One line: whether a program fits, by how much, and a remedy."""
  change = f"try {advice(name)}"
  if "error" in figures:
    short = "memory" in figures["error"]
    return f"DOES NOT {'FIT' if short else 'COMPILE'}: {figures['error']}" + (
      f"; {change}" if short else ""
    )
  own = figures["own"] / 1e9
  beside = figures["beside"] / 1e9
  hbm = figures["hbm"] / 1e9
  sizes = f"{own:.1f} GB and {beside:.1f} beside of {hbm:.0f}"
  if not figures["fits"]:
    return f"DOES NOT FIT: {sizes}, {own + beside - hbm:.1f} over; {change}"
  return f"fits: {sizes}"


def advice(name: str) -> str:
  """The settings to change if a program does not fit."""
  if name in ("learn", "score"):
    return (
      "more chips for mesh.fsdp or mesh.context, fewer algo.batch.rows, a smaller "
      "algo.batch.length or model.logit_chunk, model.remat='full'"
    )
  return (
    "more devices for a replica (rollout.tensor), fewer rollout.slots or "
    "rollout.prefill_rows, a smaller rollout.max_len"
  )


def _alone(words: Sequence[str]) -> dict[str, Any]:
  """Runs this command in a separate process; {"error": one line} on failure."""
  command = [sys.executable, "-m", "experiments.bench.compile_check", *words]
  done = subprocess.run(command, capture_output=True, text=True)
  lines = done.stderr.splitlines()
  if done.returncode == 0:
    return json.loads(done.stdout.splitlines()[-1])
  is_reason = re.compile(r"Ran out of memory|Exceeded|Error\b|Error:")
  reasons = [x.strip() for x in lines if is_reason.search(x)] or lines[-1:]
  return {"error": " ".join(reasons[-2:])[:600] or f"exit status {done.returncode}"}


def _devices() -> tuple[Chip, list[jax.Device]]:
  """Returns --slice's peaks per device, and its devices."""
  if found := read_gpus(_SLICE.value):
    if _SLICES.value > 1:
      raise ValueError("--slices is of TPUs; give GPUs as h100:16")
    return CHIPS[found[0]], gpus(*found)
  tpus = read_slice(_SLICE.value)
  _need_libtpu()
  return CHIPS[tpus.generation], run_programs.devices_of(tpus, _SLICES.value)


def _need_libtpu() -> None:
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("this needs the compiler for TPUs: pip install 'jax[tpu]'")


def _check_run(config: ml_collections.ConfigDict) -> None:
  """Compiles a config's programs and prints their table."""
  # --- The programs to compile.
  settings = read_config(config, RLConfig)
  chip, devices = _devices()
  layers = _QUICK_LAYERS if QUICK.value else 0
  run = run_programs.make_run(settings, devices, chip.hbm, _MODEL.value, layers)
  live = _LIVE.value or settings.rollout.max_len // 4
  programs = {p.name: p for p in run_programs.programs(run, live)}
  if _LIST.value:
    print("\n".join(programs))
    return
  if _CHILD.value:
    figures = measure(programs[_CHILD.value], chip, devices[0])
    print(json.dumps(figures))
    return
  names = [name for name, p in programs.items() if p.decides]
  if bench.CASES.value:
    names = [name for name in programs if re.search(bench.CASES.value, name)]
    if not names:
      stop(f"--cases={bench.CASES.value!r} finds none; --list prints their names")

  # --- Compile each.
  table: dict[str, dict[str, Any]] = {}
  for i, name in enumerate(names, 1):
    print(f"[{i}/{len(names)}] {name} ...", file=sys.stderr, flush=True)
    table[name] = _alone([*sys.argv[1:], f"--child={name}"])
    print(f"  {verdict(name, table[name])}", file=sys.stderr, flush=True)
  _finish(table, f"{len(programs)} programs in all")


def _check_cases() -> None:
  """Compiles the programs of --cases' runs and prints one table."""
  cases = bench.chosen(CASES)  # only the first with --quick
  if _LIST.value:
    print("\n".join(f"{name}\n  {' '.join(words)}" for name, words in cases.items()))
    return
  _need_libtpu()
  table: dict[str, dict[str, Any]] = {}
  command = [sys.executable, "-m", "experiments.bench.compile_check"]
  for name, words in cases.items():
    print(name, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
      file = os.path.join(folder, "out.json")
      more = [f"--out={file}", f"--quick={QUICK.value}", f"--top={_TOP.value}"]
      subprocess.run([*command, *words, *more], stdout=subprocess.DEVNULL)
      if os.path.exists(file):
        figures = read_object(file)["table"]
        table |= {f"{name}: {key}": value for key, value in figures.items()}
      else:
        table[name] = {"error": "refused; see above"}
  _finish(table, f"{len(cases)} runs")


def _finish(table: Mapping[str, Mapping[str, Any]], what: str) -> None:
  """Prints and writes the table; exits with status 1 if a program does not fit."""
  rows = [row_of(name, row) for name, row in table.items() if "own" in row]
  columns = dict(_COLUMNS)
  if _SLICES.value == 1:
    del columns["between"]
  if read_gpus(_SLICE.value):
    for name in _BY_CYCLES:
      del columns[name]
  print(markdown_table(rows, columns))
  print(f"\n{what}")
  for name, figures in table.items():
    if figures.get("top"):
      print(f"\n{name}: the longest operations\n\n{top_table(figures)}")
  if OUT.value:
    write_json(OUT.value, {"table": dict(table)})
  bad = [name for name, row in table.items() if not row.get("fits")]
  for name in bad:
    print(f"{name}: {verdict(name.split(': ')[-1], table[name])}", file=sys.stderr)
  sys.exit(bool(bad))


def main() -> None:
  """Checks --config's run; without --config the runs in `CASES`."""
  run_programs.prepare()
  if any(word.startswith(("--config", "-config")) for word in sys.argv[1:]):
    start(_check_run, RLConfig)
  else:
    run_program(_check_cases)


if __name__ == "__main__":
  main()
