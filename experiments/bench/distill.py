r"""Rows a second of conversion, filtering and tokenisation, memory, and scaling.

  python -m experiments.bench.distill [--rows=100000] [--processes=1,2] [--quick] \
    [--folder=DIR] [--out=FILE.json]

Writes runs of OAgents (JSON lines; about 4,000 tokens each under a tokenizer trained on
such text; one in twenty wrong, one in ten nearly as the one before, one in a hundred of
an evaluation set), then refines them as `experiments.import_traces` does, all filters
on, ids and all to JSON lines: with each number of processes beside the reader (0: the
reader does all), and with the last of them a fifth of the rows. Each case runs in a
fresh process and shows its progress. What is dropped is checked against what was put
in. Memory is bounded where a fifth of the rows takes about as much as all; what grows
is the signatures of the duplicates filter, some 2.2 kB a row. 100,000 rows take 9 GB of
disk (in a temporary folder of --folder).

Expect 22 minutes on two cores of a Xeon, 2 of them to write the rows: 148 rows/s with
one process, 216 with two, when both cores are full; 110 to 130 rows a CPU second. With
10,000 rows each process peaks near 110 MB, 1.0 times what it has with a fifth of them,
and the reader at 1.2 times.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from absl import flags

from coa_jax.importers import importers
from coa_jax.importers.importers import Importer, Record
from coa_jax.importers.pipeline import ImportedRow, ImportJob, RowPipeline
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.storage import write_lines
from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.report.metrics import Metrics
from coa_jax.teacher import filters
from coa_jax.teacher.convert import ConvertConfig
from coa_jax.teacher.filters import FiltersConfig
from experiments.bench import program as bench
from experiments.launch import run_program

_ROWS = flags.DEFINE_integer("rows", 100_000, "Trajectories.", 200)
_QUICK_ROWS = 400
_PROCESSES = flags.DEFINE_list("processes", ["1", "2"], "Beside the reader, by case.")
_FOLDER = flags.DEFINE_string("folder", None, "Where the rows lie; the system's, else.")
_VOCAB = 8192
_SEARCHES, _WORDS = 6, 480  # of a row; words of an observation
_WRONG, _NEAR, _LEAKED = 20, 10, 100  # one in so many
_LEAK = "which of the nine rivers of the northern valley did the mayor bridge first"
_COLUMNS = {
  "rows": "rows",
  "workers": "processes",
  "rows_per_s": "rows/s",
  "tokens_per_s": "tokens/s",
  "rows_per_cpu_s": "rows/CPU s",
  "main_ms": "CPU ms/row, reader",
  "worker_ms": "CPU ms/row, others",
  "main_mb": "peak MB, reader",
  "worker_mb": "peak MB, each other",
}


def vocabulary() -> list[str]:
  """Twenty thousand made-up words, the frequent ones short."""
  rng = random.Random(0)
  syllables = itertools.product("bdfgklmnprstvz", ("a", "e", "i", "o", "u", "er"))
  parts = list(map("".join, syllables))
  words = []
  for i in range(20_000):
    count = 1 + min(3, i.bit_length() // 5)
    words.append("".join(rng.choices(parts, k=count)))
  return words


def text(rng: random.Random, words: list[str], count: int) -> str:
  """Words with the frequencies of a language (Zipf's law)."""
  picks = (int(len(words) ** rng.random()) - 1 for _ in range(count))
  return " ".join(words[i] for i in picks)


def make_row(n: int, words: list[str]) -> dict[str, Any]:
  """Row n: one run of OAgents."""
  # The last of each _NEAR is drawn as the one before it; only its question differs.
  own = n
  if n % _NEAR == _NEAR - 1:
    own = n - 1
  rng = random.Random(own)
  steps: list[dict[str, Any]] = [
    {"facts": text(rng, words, 60), "plan": text(rng, words, 30)}
  ]
  for _ in range(_SEARCHES):
    query = {"query": text(rng, words, 6)}
    steps.append(
      {
        "model_output": "Thought: " + text(rng, words, 40) + "\nCode:",
        "tool_calls": [{"name": "google_search", "arguments": query}],
        "observations": text(rng, words, _WORDS),
      }
    )
  if n % _LEAKED == 1:
    steps[1]["observations"] += f" Forum: {_LEAK}?"
  return {
    "task_id": f"t{n}",
    "question": text(rng, words, 20) + f" {n}?",
    "prediction": "no" if n % _WRONG == 0 else "yes",
    "true_answer": "yes",
    "intermediate_steps": steps,
  }


def expected(rows: int) -> dict[str, int]:
  """How many rows each filter must drop."""
  out = {"wrong": 0, "benchmark": 0, "near_duplicate": 0}
  before_is_in = False  # whether the row before was not dropped
  for n in range(rows):
    near = n % _NEAR == _NEAR - 1
    if n % _WRONG == 0:
      out["wrong"] += 1
      before_is_in = False
    elif n % _LEAKED == 1:
      out["benchmark"] += 1
      before_is_in = False
    else:
      out["near_duplicate"] += near and before_is_in
      before_is_in = True
  return out


def measure(folder: str, rows: int, workers: int) -> dict[str, Any]:
  """One case; in a process of its own, whose peak memory is its.

  budget: one run: data, work, checks, figures.
  """
  # --- What is done with a row.
  config = FiltersConfig(
    keep_unreflected=1.0,
    max_similarity=0.8,
    benchmarks=(os.path.join(folder, "eval.jsonl"),),
    blocked=("huggingface.co/datasets",),
  )
  importer = Importer(
    "oagents",
    get_variant("web"),
    convert=ConvertConfig(missing_think="Go on.", score_right=True),
  )
  tokenizer = os.path.join(folder, "tokenizer")
  benchmarks = filters.load_benchmarks(config)
  work = ImportJob(RowPipeline(importer, config, benchmarks, tokenizer), workers)
  tokens = 0

  def on_imported(found: ImportedRow, copies: int) -> None:
    nonlocal tokens
    tokens += found.stats.length

  def counted(all_of: Iterator[Record]) -> Iterator[Record]:
    stage = f"{workers} beside the reader"
    every = max(1, rows // 1000)
    with Metrics(folder, stage, rows, unit="row") as metrics:
      for done, record in enumerate(all_of, 1):
        yield record
        if done % every == 0 or done == rows:
          pace = done / (time.perf_counter() - start)
          metrics.log(done, {"rows_per_s": pace}, f"{pace:,.0f} rows/s")

  # --- Do it, and compare what was dropped with what was put in.
  _, records = importers.records(os.path.join(folder, f"{rows}.jsonl"))
  out = os.path.join(folder, "out.jsonl")
  start = time.perf_counter()
  num_rows = write_lines(out, work.lines(counted(records), on_imported=on_imported))
  seconds = time.perf_counter() - start
  counts = work.counts()
  funnel = counts["filters"]
  dropped = {
    "wrong": sum(counts["import"]["dropped"].values()),
    "benchmark": sum(funnel["contamination"]["dropped"].values()),
    "near_duplicate": sum(funnel["duplicates"]["dropped"].values()),
  }
  if dropped != expected(rows) or num_rows != rows - sum(dropped.values()):
    raise AssertionError(f"{num_rows} kept, dropped {dropped}, not {expected(rows)}")
  # --- What it took.
  mine = resource.getrusage(resource.RUSAGE_SELF)
  others = resource.getrusage(resource.RUSAGE_CHILDREN)
  my_cpu_s = mine.ru_utime + mine.ru_stime
  others_cpu_s = others.ru_utime + others.ru_stime
  os.remove(out)
  row = {
    "rows": rows,
    "workers": workers,
    "rows_per_s": rows / seconds,
    "tokens_per_s": tokens / seconds,
    "rows_per_cpu_s": rows / (my_cpu_s + others_cpu_s),
    "main_ms": 1000 * my_cpu_s / rows,
    "main_mb": _peak_mb(),
    "tokens_per_row": tokens / (rows - dropped["wrong"]),
  }
  if workers:
    row["worker_ms"] = 1000 * others_cpu_s / rows
    row["worker_mb"] = others.ru_maxrss / 1024
  return row


def _peak_mb() -> float:
  """Of this process; `ru_maxrss` would begin with what its parent held."""
  with open("/proc/self/status", encoding="ascii") as f:
    (line,) = (line for line in f if line.startswith("VmHWM"))
  return int(line.split()[1]) / 1024


def write_rows(folder: str, sizes: set[int]) -> None:
  """Writes a file of rows per size, their tokenizer, and an evaluation set."""
  words = vocabulary()
  sample = [text(random.Random(-n), words, 4000) for n in range(1, 40)]
  train_tokenizer(sample, _VOCAB).save(os.path.join(folder, "tokenizer"))
  with open(os.path.join(folder, "eval.jsonl"), "w", encoding="ascii") as f:
    f.write(json.dumps({"question": f"{_LEAK}?", "answer": "x"}) + "\n")

  def rows(count: int) -> Iterator[dict[str, Any]]:
    return (make_row(n, words) for n in range(count))

  for size in sizes:
    write_lines(os.path.join(folder, f"{size}.jsonl"), rows(size))


def run() -> dict[str, Any]:
  """Every case, and the ratios."""
  rows = _QUICK_ROWS if bench.QUICK.value else _ROWS.value
  few = rows // 5
  try:
    counts = [int(count) for count in _PROCESSES.value]
  except ValueError:
    counts = []
  if not counts or min(counts) < 0:
    raise ValueError(f"--processes={','.join(_PROCESSES.value)}: give numbers, as 1,2")
  cases = [*((rows, count) for count in counts), (few, counts[-1])]
  table = []
  with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
    write_rows(folder, {rows, few})
    # Each in a fresh process: a peak of memory is that of a process's whole life.
    for size, workers in cases:
      with concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn")
      ) as fresh:
        table.append(fresh.submit(measure, folder, size, workers).result())

  # --- More processes over the first number; all rows over a fifth of them, the last.
  first, *others, fifth = table
  whole = table[-2]
  ratios = {}
  for row in others:
    name = f"rows/s, {row['workers']} processes over {first['workers']}"
    ratios[name] = row["rows_per_s"] / first["rows_per_s"]
  for name in ("main_mb", "worker_mb"):
    if name in fifth:
      ratios[f"{name}, {rows} rows over {few}"] = whole[name] / fifth[name]
  return {"table": table, "ratios": ratios, "tokens_per_row": whole["tokens_per_row"]}


if __name__ == "__main__":
  run_program(
    bench.program(
      run,
      "Conversion, filtering and tokenisation",
      _COLUMNS,
      "MB are peaks of resident memory, libraries included.",
    )
  )
