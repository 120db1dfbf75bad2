r"""Converts external agent traces into trajectories for SFT.

  coa import --file=WebAgentSFTDataset.json --variant=web \
    --out=runs/web/trajectories.jsonl
  coa import --file=oagents.jsonl --variant=web \
    --out=runs/web/trajectories.jsonl --workers=8 --convert.score_right \
    --convert.missing_think='Go on.' --filter --filters.min_calls=2 \
    --filters.benchmarks=gaia.jsonl,webwalker.json --filters.max_similarity=0.8 \
    --formats.copies=1
  coa sft --config=configs/X.py --workdir=runs/web/sft \
    --config.data.trajectories=runs/web/trajectories.jsonl
  coa import --file=gs://BUCKET/runs.jsonl --variant=web \
    --out=gs://BUCKET/web/trajectories.jsonl --shard=0/8

Reads released Chain-of-Agents SFT records, OAgents, smolagents and LangChain runs,
conversations with tool calls (messages of OpenAI, Anthropic, Hermes, LangChain and
LLaMA-Factory, ShareGPT, verifiers, ATIF, Responses; each question of a record becomes a
trajectory), ReAct and Search-R1 text, our own runs and trajectories; from JSON,
parquet, `hf:` and `tfds:` sources. Released RL rows are tasks: see `tasks.uri`.
A row with a call unknown to all importers is dropped (unread_call).
--formats.copies writes each trajectory in other tool formats too; --described_tools
makes prompts describe only the tools of the later run. Unmapped fields and dropped rows
are printed with the reason on standard output, then a remedy for each reason; the last
line has the counts. Next to OUT it writes OUT's manifest (flags, commit, counts per
stage, statistics before and after, the file's hash) and pictures of the funnel and the
statistics. With --shard=I/N each process reads every N-th row from the I-th on; the
last of these N processes joins all (`coa_jax.cli.shards`; parts stay in OUT.work).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from coa_jax.cli.launch import SCRATCH, fetch_inputs, run_program, stop
from coa_jax.cli.shards import read_shard, run_shard
from coa_jax.data.importers import hints, importers
from coa_jax.data.importers.importers import FORMATS, RL, Importer, Record
from coa_jax.data.importers.pipeline import ImportedRow, ImportJob, RowPipeline
from coa_jax.data.tasks.rows import list_uris
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.teacher import filters
from coa_jax.data.teacher.convert import ConvertConfig, Dropped
from coa_jax.data.teacher.tool_augmentation import ToolAugmentation
from coa_jax.protocol.origin import Dialect
from coa_jax.protocol.prompts import STYLES
from coa_jax.protocol.roles import VARIANTS, Variant, get_variant
from coa_jax.protocol.storage import suffix_of, write_lines
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.report import plots
from coa_jax.runtime.bucket import inputs
from coa_jax.runtime.bucket.objects import Bucket, is_uri
from coa_jax.runtime.config import fill_defaults, read_config
from coa_jax.runtime.lock import hold
from coa_jax.runtime.record import hash_files, write_manifest
from coa_jax.runtime.shard import Shard

# Most external agents: thoughts, calls and an answer.
_ALONE = "unified-plan-reflection-suggested_answer-double_check"


def _define_section(name: str, cls: type) -> Any:
  """Defines flags --NAME.FIELD for a dataclass's fields."""
  config = ml_collections.ConfigDict()
  fill_defaults(config, cls)
  return config_flags.DEFINE_config_dict(name, config)


_FILE = flags.DEFINE_string("file", None, "A file, or a source by URI.", required=True)
_OUT = flags.DEFINE_string(
  "out", None, "What to write: .jsonl or .parquet.", required=True
)
_VARIANT = flags.DEFINE_string(
  "variant",
  None,
  f"Dialect of the trajectories: {', '.join(VARIANTS)}. A hyphen removes an agent: "
  f"web-plan is web without plans, and {_ALONE} is thoughts, calls and an answer.",
  required=True,
)
_DESCRIBED_TOOLS = flags.DEFINE_multi_string(
  "described_tools",
  [],
  "A tool that the prompts describe, as TAG, TAG=WORDS or tool:NAME=WORDS; repeat it "
  "for each tool of the later run (config.tools). By default all of the variant.",
)
_PARALLEL = flags.DEFINE_integer(
  "parallel",
  1,
  "Maximum calls in one `tool` span, for calls that were made together; as "
  "config.tools.parallel of the later run.",
  1,
  8,
)
_FORMAT = flags.DEFINE_enum(
  "format",
  "auto",
  ["auto", *FORMATS],
  "Format of the rows; auto: by the first.",
)
_KEEP_ILLEGAL = flags.DEFINE_bool(
  "keep_illegal",
  False,
  "Keep records that can be read but break the dialect's order rules.",
)
_PROMPT = flags.DEFINE_enum("prompt", "full", STYLES, "Style of the prompts.")
_TOOLS = flags.DEFINE_list(
  "tools", [], "Our tags for their tools' names: theirs=web_search,other=code."
)
_TASKS = flags.DEFINE_string("tasks", "", "The tasks of the runs (format runs).")
_TOKENIZER = flags.DEFINE_string(
  "tokenizer", "", "Folder of the model's tokenizer; it writes the token ids."
)
_WORKERS = flags.DEFINE_integer("workers", 0, "Processes besides this one.", 0)
_SHARD = flags.DEFINE_string(
  "shard", "", "Read part I of N alone, as 0/8; the last one joins. auto/8: by index."
)
_ROWS = "rows.jsonl"  # a shard's result
_FILTER = flags.DEFINE_bool("filter", False, "Apply the filters (--filters.FIELD).")
_FILTERS = _define_section("filters", filters.FiltersConfig)
_CONVERT = _define_section("convert", ConvertConfig)
_FORMATS = _define_section("formats", ToolAugmentation)


def main() -> None:
  """Imports FILE, or one shard of its rows."""
  shard = read_shard(_SHARD.value) if _SHARD.value else None
  suffix_of(_OUT.value)  # refused before any work

  # --- The rows; files in a bucket are read from copies.
  cache = os.path.join(SCRATCH.value, "inputs")
  for name in ("file", "tasks", "tokenizer"):
    flags.FLAGS[name].value = inputs.localized(flags.FLAGS[name].value, cache)
  fetch_inputs(_FILTERS.value)
  asked = "" if _FORMAT.value == "auto" else _FORMAT.value
  for file in list_uris(_FILE.value):
    there = os.path.exists(file) and os.path.exists(_OUT.value)
    if there and os.path.samefile(file, _OUT.value):
      raise ValueError(f"--out={_OUT.value} is a file that is read; name another")
  chosen, records = importers.records(_FILE.value, asked)
  if not asked:
    print(f"{inputs.named(_FILE.value)}: format {chosen}, by its first row")
  if chosen == RL:
    raise ValueError(
      f"{_FILE.value}: these rows are tasks, without trajectories; use the file as "
      "tasks.uri"
    )

  # --- Import all rows, or this shard's rows; the last shard joins all.
  pipeline = _pipeline(chosen)
  job = ImportJob(pipeline, _WORKERS.value)
  if not shard:
    with _output() as out:
      _write(out, pipeline, job, functools.partial(job.lines, records))
    return

  def run(folder: str, part: Shard | None) -> dict[str, Any]:
    rows = os.path.join(folder, _ROWS)
    if part:
      with hold(folder):
        return {"rows": job.write_part(rows, records, part)}
    with _output() as out:
      lines = functools.partial(job.joined_lines, rows)
      return {"rows": _write(out, pipeline, job, lines)}

  hashes = [hash_files(uri) for uri in list_uris(_FILE.value)]
  settings = {**_settings(pipeline), "sha256": hashes}
  work = f"{_OUT.value}.work"
  run_shard(run, inputs.named(settings), work, shard, (_ROWS,), SCRATCH.value)


@contextlib.contextmanager
def _output() -> Iterator[str]:
  """Yields a path for OUT and the files next to OUT; locks out other processes."""
  folder, _, name = _OUT.value.rpartition("/")
  if not is_uri(_OUT.value):
    with hold(os.path.abspath(folder), f".{name}.lock"):
      yield _OUT.value
    return
  bucket = Bucket(folder)
  os.makedirs(SCRATCH.value, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=SCRATCH.value) as local:
    yield os.path.join(local, name)
    # The manifest comes last, after the files that the manifest names.
    for file in sorted(os.listdir(local), key=lambda file: file.endswith(".json")):
      bucket.put(os.path.join(local, file), file)


def _write(
  out: str,
  pipeline: RowPipeline,
  job: ImportJob,
  lines_of: Callable[..., Iterator[str]],
) -> int:
  """Writes and reports `lines_of`'s trajectories; returns their number.

  `lines_of` takes callbacks for dropped and imported rows; `job` counts the rows.
  """
  # --- The kept rows.
  unit = "tokens" if _TOKENIZER.value else "characters"
  dropped_first: dict[str, tuple[Dropped, Record]] = {}  # by reason
  before = plots.Statistics(unit)
  after = plots.Statistics(unit)

  def on_dropped(row: Dropped, record: Record) -> None:
    _print(f"{row.task_id}: {row.reason}: {row.detail}")
    dropped_first.setdefault(row.reason, (row, record))

  def on_imported(row: ImportedRow, copies: int) -> None:
    for text in row.lost:
      _print(f"{row.task_id}: lost: {text}")
    before.add(row.stats.length, row.stats.roles)
    after.add(row.stats.length, row.stats.roles, copies)

  try:
    lines = lines_of(on_dropped, on_imported)
    num_rows = write_lines(out, lines, at_least_one=True)
  except EOFError:
    # An empty file would only fail later, in training.
    dropped, filtered = _dropped(job.counts())
    for reasons in filtered.values():
      dropped.update(reasons)
    message = f"{_FILE.value}: no record is left to train on ({_counted(dropped)})"
    if dropped_first:  # one line: the commonest reason's remedy
      most = max(dropped_first, key=lambda reason: dropped[reason])
      message += f"; {hints.hint(pipeline.importer, *dropped_first[most])}"
    stop(message)

  # --- Report the outcome.
  counts = job.counts()
  _report(out, _settings(pipeline), pipeline, counts, before, after)
  dropped, filtered = _dropped(counts)
  for reason, first in sorted(dropped_first.items()):
    _print(f"hint: {reason}: {hints.hint(pipeline.importer, *first)}")
  for stage, reasons in filtered.items():
    if reasons:
      print(f"filter {stage}: {reasons.total()} dropped ({_counted(reasons)})")
  last_line = f"{num_rows} kept"
  if counts["augmented"]:
    last_line += f", {counts['augmented']} of them augmented"
  last_line += f", {dropped.total()} dropped"
  if dropped:
    last_line += f" ({_counted(dropped)})"
  print(last_line)
  return num_rows


def _dropped(counts: dict[str, Any]) -> tuple[Counter[str], dict[str, Counter[str]]]:
  """Returns the counts of dropped rows by reason: at import, and in each filter."""
  filtered = {}
  if "filters" in counts:
    for stage in filters.STAGES:
      filtered[stage] = Counter(counts["filters"][stage]["dropped"])
  return Counter(counts["import"]["dropped"]), filtered


def _pipeline(chosen: str) -> RowPipeline:
  # --- Flags contradicting the format, or each other.
  if _KEEP_ILLEGAL.value and chosen not in hints.VERBATIM:
    verbatim = " and ".join(hints.VERBATIM)
    raise ValueError(
      f"--keep_illegal is for formats {verbatim}; records of {chosen} must obey the "
      "order rules"
    )
  table = dict(pair.partition("=")[::2] for pair in _TOOLS.value)
  formats = read_config(_FORMATS.value, ToolAugmentation, "formats")
  if formats.copies and _PROMPT.value == "brief":
    raise ValueError("--formats.copies: only --prompt=full describes formats")
  if formats.copies and _PARALLEL.value > 1:
    raise ValueError("--formats.copies: other tool formats have no lists of calls")

  # --- The rows' reader.
  tasks = {}
  if _TASKS.value:
    tasks = {task.id: task for task in load_tasks(_TASKS.value)}
  importer = Importer(
    format=chosen,
    variant=_variant(),
    prompt=_PROMPT.value,
    stem=importers.stem(_FILE.value),
    tools=table,
    convert=read_config(_CONVERT.value, ConvertConfig, "convert"),
    keep_illegal=_KEEP_ILLEGAL.value,
    tasks=tasks,
  )

  # --- The filters.
  config = read_config(_FILTERS.value, filters.FiltersConfig, "filters")
  if not _FILTER.value:
    if config != filters.FiltersConfig():
      raise ValueError("--filters.FIELD is given without --filter, which applies them")
    return RowPipeline(importer, tokenizer=_TOKENIZER.value, formats=formats)
  benchmarks = filters.load_benchmarks(config)
  return RowPipeline(importer, config, benchmarks, _TOKENIZER.value, formats)


def _variant() -> Variant:
  variant = get_variant(_VARIANT.value)
  if _PARALLEL.value > 1 and FUNCTION_TAG not in variant.tools:
    raise ValueError(
      f"--parallel={_PARALLEL.value}: variant {variant.name!r} has no {FUNCTION_TAG!r} "
      "span for several calls; unified has"
    )
  descriptions = dict.fromkeys(variant.tools, "")
  if _DESCRIBED_TOOLS.value:
    descriptions = dict(tool.partition("=")[::2] for tool in _DESCRIBED_TOOLS.value)
    if _PARALLEL.value > 1:
      descriptions.setdefault(FUNCTION_TAG, "")
  variant = variant.with_tools(descriptions)
  return dataclasses.replace(variant, parallel=_PARALLEL.value)


def _print(text: str) -> None:
  """Prints one line, with terminal control characters escaped."""
  print("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def _counted(reasons: Counter[str]) -> str:
  return ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))


def _report(
  out: str,
  settings: dict[str, Any],
  pipeline: RowPipeline,
  counts: dict[str, Any],
  before: plots.Statistics,
  after: plots.Statistics,
) -> None:
  """Writes the manifest and the pictures next to the output."""
  # --- Pictures: each stage's counts, and statistics of the trajectories.
  imported = counts["import"]
  bars = {"import": (imported["kept"], imported["dropped"])}
  if pipeline.filters:
    bars |= filters.stages(counts["filters"])
  plots.write_filter_figures(f"{out}.", bars, before, after)

  # --- The manifest.
  importer = pipeline.importer
  varied = bool(pipeline.formats.copies)
  dialect = Dialect.of(importer.variant, importer.prompt, varied)
  write_manifest(
    f"{out}.manifest.json",
    out,
    settings,
    counts=counts,
    before=before.summary(),
    after=after.summary(),
    dialects=[dataclasses.asdict(dialect)],
  )


def _settings(pipeline: RowPipeline) -> dict[str, Any]:
  """Returns the settings that reproduce the file."""
  return {
    "file": _FILE.value,
    "format": pipeline.importer.format,
    "variant": pipeline.importer.variant.name,
    "prompt": pipeline.importer.prompt,
    "described_tools": _DESCRIBED_TOOLS.value,
    "parallel": pipeline.importer.variant.parallel,
    "tools": dict(pipeline.importer.tools),
    "tasks": _TASKS.value,
    "keep_illegal": pipeline.importer.keep_illegal,
    "tokenizer": pipeline.tokenizer,
    "convert": dataclasses.asdict(pipeline.importer.convert),
    "filters": dataclasses.asdict(pipeline.filters) if pipeline.filters else None,
    "formats": dataclasses.asdict(pipeline.formats),
  }


def command() -> None:
  """Runs the command line."""
  run_program(main)
