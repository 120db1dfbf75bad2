r"""Evaluates a model on a suite of benchmarks, and writes one table.

  coa benchmark --suite=afm --data=DIR --workdir=runs/benchmark \
    -- --config=configs/evaluate_afm.py:{agent} --config.init=MODEL_FOLDER

Finds the suite's files below --data by their names (--files=gaia=PATH,... names others)
and says which are missing and where they are published. `coa evaluate` then plays the
sets of each agent together, with the flags after --; {agent} in them is web, mhqa, code
or math. Writes benchmark.md, .csv, .html and .json into the workdir: a score with its
95 % interval, tokens, calls and seconds per task, and the paper's figures. The same
command resumes; another --limit_per_source needs another workdir. --shard=I/N plays
part I of N (from 0) in the common workdir.

--overlap=sft.jsonl plays nothing: it counts the rows of training data (trajectories or
tasks) that hold a question of each set, into overlap.json.

Suites: afm (the paper's), math, code, mhqa, web, more (sets that the paper does not
have), and offline (math and code, without any service).
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import html
import io
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import rich
from absl import flags

from coa_jax.cli.launch import run_program
from coa_jax.cli.shards import read_shard
from coa_jax.data import suites
from coa_jax.data.suites import BenchmarkSet
from coa_jax.data.tasks.sources import TasksConfig, load_tasks, select_tasks
from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.overlap import count_overlaps
from coa_jax.protocol.trajectory import CallStatus, iter_trajectories, write_jsonl
from coa_jax.report.metrics import say, write_json
from coa_jax.report.tables import Table, cell, html_table, markdown_table
from coa_jax.runtime.config import ConfigError
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.record import hash_files

_AGENT = "{agent}"
_KINDS = {"math": "math", "mhqa": "qa", "web": "qa"}  # of rows without a kind
_COLUMNS = {
  "set": "benchmark",
  "tasks": "tasks",
  "score": "score %",
  "interval": "95 %",
  "metric": "metric",
  "tokens": "tokens",
  "calls": "calls",
  "seconds": "s",
  "chosen": "chosen",
  "recall": "recall",
  "paper_7b": "paper 7B",
  "paper_32b": "paper 32B",
}
_PACKAGES = ("coa-jax", "jax", "jaxlib", "flax")
# The last line of web_search; a fault of crawl_page and visual_inspector.
_HIDDEN = re.compile(r"(?:^|\n)\(results on blocked sites, not shown: \d+\)\Z")
_REFUSED = re.compile(r"\bthe site \S+ is blocked")
_OPTIONAL = {
  "chosen": "chosen: the model of eval.selector chose one of k samples.",
  "recall": "recall: percent of the evidence that the tools showed.",
}


def choose_files(
  suite: str, data: str | None, files: Sequence[str]
) -> tuple[dict[str, str], list[BenchmarkSet]]:
  """Finds a suite's files; returns set name -> path, and the missing sets.

  Raises:
    ConfigError: `files` names no set or file, or nothing is found.
  """
  sets = [s for s in suites.SETS if s.name in suites.SUITES[suite]]
  found = suites.find_files(data, sets) if data else {}
  for word in files:
    name, _, path = word.partition("=")
    known = [s.name for s in suites.SETS]
    if name not in known or not path:
      raise ConfigError(f"--files={word}: write NAME=PATH, NAME of {', '.join(known)}")
    if not os.path.exists(path):
      raise ConfigError(f"--files={word}: {path} does not exist")
    found[name] = path
  if not found and data is None:
    raise ConfigError("--data is missing; name the folder with the benchmarks' files")
  if not found:
    names = ", ".join(f"{s.name} ({s.hub})" for s in sets)
    raise ConfigError(f"--data={data}: none of suite {suite} is there: {names}")
  return found, [s for s in sets if s.name not in found]


def write_tasks(
  found: Mapping[str, str], limit: int, seed: int, workdir: str
) -> dict[str, str]:
  """Writes each agent's tasks to one file; returns agent -> path."""
  tasks: dict[str, list[Task]] = collections.defaultdict(list)
  for one in suites.SETS:
    if one.name not in found:
      continue
    config = TasksConfig(
      found[one.name],
      limit=limit,
      seed=seed if limit else None,
      kind=_KINDS.get(one.agent, ""),
    )
    for task in select_tasks(config):
      # Two sets may share an id.
      new_id = f"{one.name}-{task.id}"
      tasks[one.agent].append(dataclasses.replace(task, id=new_id, source=one.name))
  paths = {}
  for agent, chosen in tasks.items():
    paths[agent] = os.path.join(workdir, f"{agent}_tasks.jsonl")
    write_jsonl(paths[agent], (task.to_json() for task in chosen))
  return paths


def evaluate(
  agent: str, tasks: str, sets: Iterable[BenchmarkSet], words: Sequence[str], out: str
) -> None:
  """Runs `coa evaluate` on an agent's tasks.

  Raises:
    ConfigError: it failed; its own message is on standard error.
  """
  flags_ = [word.replace(_AGENT, agent) for word in words]
  flags_ += [f"--config.tasks.uri={tasks}", f"--workdir={out}", "--json"]
  graders = {s.name: s.grader for s in sets if s.grader}
  if graders and not any("reward.graders" in word for word in words):
    flags_ += [f"--config.reward.graders.{n}={g}" for n, g in graders.items()]
  command = [sys.executable, "-m", "coa_jax.cli.main", "evaluate", *flags_]
  done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
  if done.returncode:
    raise ConfigError(
      f"coa evaluate ended with status {done.returncode} on {tasks}; the same command "
      "resumes"
    )


def rows_of(
  agent: str, out: str, sets: Iterable[BenchmarkSet], seconds: Mapping[str, float]
) -> Iterable[dict[str, Any]]:
  """Yields a row of the table for each of an agent's sets, then their average.

  `seconds`: set name -> mean per attempt.
  """
  results = read_object(os.path.join(out, "results.json"))
  by_source = results["by_source"]
  config = read_object(os.path.join(out, "config.json"))["config"]
  rows = []
  for one in sets:
    figures = by_source.get(one.name)
    if figures is None:
      continue
    # Several samples are averaged (avg@k); otherwise the greedy answer counts.
    sampled = figures["pass1_sampled"] is not None
    name = "pass1_sampled" if sampled else "pass1_greedy"
    score = figures[name]
    low, high = figures["ci95"][name] or (None, None)
    row = {
      "agent": agent,
      "set": one.name,
      "tasks": figures["tasks"],
      "score": None if score is None else 100 * score,
      "interval": None if low is None else [100 * low, 100 * high],
      "metric": f"avg@{config['eval']['samples']}" if sampled else "greedy",
      "tokens": figures["tokens_per_task"],
      "calls": figures["tool_calls_per_task"],
      "seconds": seconds.get(one.name),
      **_chosen(figures),
      **_recall(figures),
      "paper_7b": one.paper.get("7b"),
      "paper_32b": one.paper.get("32b"),
    }
    rows.append(row)
  yield from rows
  if len(rows) > 1:
    average: dict[str, Any] = {"agent": agent, "set": f"{agent}, average"}
    average["tasks"] = sum(row["tasks"] for row in rows)
    names = ("score", "tokens", "calls", "seconds", "chosen", "paper_7b", "paper_32b")
    for name in names:
      values = [row.get(name) for row in rows]
      if None not in values:
        average[name] = statistics.fmean(values)
    yield average


def _chosen(figures: Mapping[str, Any]) -> dict[str, float]:
  """Returns the selector's percent, of the largest k; {} without `eval.selector`."""
  names = [name for name in figures if name.startswith("selected_of_")]
  if not names:
    return {}
  return {"chosen": 100 * figures[max(names, key=lambda n: int(n.rpartition("_")[2]))]}


def _recall(figures: Mapping[str, Any]) -> dict[str, float]:
  """Returns the evidence's recall in percent; {} without evidence or tool calls."""
  if "evidence_recall" not in figures or not figures["tool_calls_per_task"]:
    return {}
  return {"recall": 100 * figures["evidence_recall"]}


def read_attempts(out: str) -> tuple[dict[str, float], int]:
  """Returns each source's mean seconds, and the number of calls to blocked sites."""
  spent: dict[str, list[float]] = collections.defaultdict(list)
  blocked = 0
  for name in ("greedy.jsonl", "sampled.jsonl"):
    path = os.path.join(out, name)
    if os.path.exists(path):
      for t in iter_trajectories(path):
        spent[t.meta.get("source", "")].append(t.usage.seconds)
        for call in t.calls:
          pattern = _HIDDEN if call.status == CallStatus.OK else _REFUSED
          blocked += bool(pattern.search(call.result))
  seconds = {source: statistics.fmean(values) for source, values in spent.items()}
  return seconds, blocked


def _agent_card(out: str) -> dict[str, Any]:
  """Returns an evaluation's inputs, model and judge."""
  record = read_object(os.path.join(out, "config.json"))
  config = record["config"]
  judge = config["reward"].get("judge")
  endpoint = (config.get("agent") or {}).get("endpoint")
  return {
    **{k: record[k] for k in ("git_commit", "inputs")},
    "model": endpoint["model"] if endpoint else config["init"],
    "judge": judge and f"{judge['chat']['model']}, {judge['style']}",
  }


def write_table(workdir: str, table: Table, card: Mapping[str, Any]) -> None:
  """Writes the table as Markdown, CSV and HTML, and the run's card as JSON."""
  texts = {
    "benchmark.md": f"# {table.title}\n\n"
    f"{markdown_table(table.rows, table.columns)}\n{table.note}\n",
    "benchmark.csv": _csv(table),
    "benchmark.html": "<!doctype html><meta charset='utf-8'>"
    f"<title>{html.escape(table.title)}</title>{html_table(table)}",
  }
  for name, text in texts.items():
    with atomic_write(os.path.join(workdir, name)) as f:
      f.write(text)
  write_json(os.path.join(workdir, "benchmark.json"), dict(card))


def _csv(table: Table) -> str:
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(table.columns)
  for row in table.rows:
    writer.writerow([cell(row.get(key)) for key in table.columns])
  return out.getvalue()


def overlap_table(files: Sequence[str], found: Mapping[str, str], words: int) -> Table:
  """Counts each file's rows that hold a question of each set."""
  questions = {
    name: [task.question for task in load_tasks(path)] for name, path in found.items()
  }
  rows = []
  for file in files:
    total, overlaps = count_overlaps(file, questions, words)
    for name, one in overlaps.items():
      row = {"file": file, "set": name, "questions": len(questions[name])}
      share = 100 * one.rows / total if total else 0.0
      rows.append({**row, "rows": one.rows, "share": share, "example": one.example})
  columns = {
    "file": "training data",
    "set": "benchmark",
    "questions": "questions",
    "rows": "rows",
    "share": "% of rows",
    "example": "first",
  }
  note = f"Rows that share {words} words in a row with a question, or a shorter one."
  return Table("Overlap of training data and benchmarks", rows, columns, note)


def run(
  words: Sequence[str], found: Mapping[str, str], missing: Sequence[BenchmarkSet]
) -> None:
  """Plays the sets at hand and writes the table; of shards, the last one writes it."""
  values = flags.FLAGS
  workdir = values.workdir
  tasks = write_tasks(found, values.limit_per_source, values.seed, workdir)
  of_agent = {
    agent: [s for s in suites.SETS if s.agent == agent and s.name in found]
    for agent in tasks
  }

  # --- Each agent's sets, in one evaluation.
  words = list(words)
  shard = [f"--shard={values.shard}"] if values.shard else []
  for agent, path in tasks.items():
    say(f"{agent}: {', '.join(s.name for s in of_agent[agent])}")
    out = os.path.join(workdir, agent)
    evaluate(agent, path, of_agent[agent], words + shard, out)
  outs = [os.path.join(workdir, agent, "results.json") for agent in tasks]
  if not all(map(os.path.exists, outs)):
    say(f"shard {values.shard} is done; the last one writes the table")
    return

  # --- The table.
  rows: list[dict[str, Any]] = []
  agents = {}
  for agent, sets in of_agent.items():
    out = os.path.join(workdir, agent)
    seconds, blocked_calls = read_attempts(out)
    rows += rows_of(agent, out, sets, seconds)
    agents[agent] = {**_agent_card(out), "blocked_calls": blocked_calls}
  note = (
    "Score: percent of tasks answered rightly; avg@k: the mean of k samples. tokens, "
    "calls, s: per attempt. paper: Chain-of-Agents after RL (arXiv 2508.13167), whose "
    "7B code and math models are Coder models."
  )
  if missing:
    note += f" Missing: {', '.join(one.name for one in missing)}."
  if training := suites.training_sets(found):
    note += f" Training rows, for want of a test file: {', '.join(training)}."
  columns = dict(_COLUMNS)
  for name, text in _OPTIONAL.items():
    if any(name in row for row in rows):
      note += f" {text}"
    else:
      del columns[name]
  table = Table(f"Benchmarks: {values.suite}", rows, columns, note)
  card = {
    "suite": values.suite,
    "limit_per_source": values.limit_per_source,
    "seed": values.seed,
    "evaluate": words,
    "files": {k: "".join(map(hash_files, v.split(","))) for k, v in found.items()},
    "missing": [one.name for one in missing],
    "versions": {name: metadata.version(name) for name in _PACKAGES},
    "agents": agents,
    "rows": rows,
  }
  write_table(workdir, table, card)
  rich.print(table)


def main(words: list[str]) -> None:
  """Runs the benchmarks with the words after --, or compares training data."""
  values = flags.FLAGS
  if not values.overlap and not any(word.startswith("--config=") for word in words):
    raise ConfigError(
      "no config for the evaluations; give it after --: "
      "-- --config=configs/evaluate_afm.py:{agent} --config.init=MODEL_FOLDER"
    )
  if values.shard:
    read_shard(values.shard)
  os.makedirs(values.workdir, exist_ok=True)
  found, missing = choose_files(values.suite, values.data, values.files)
  for one in missing:
    say(f"missing: {one.name}; published as {one.hub}")
  if not values.overlap:
    run(words, found, missing)
    return
  table = overlap_table(values.overlap, found, values.overlap_words)
  write_json(os.path.join(values.workdir, "overlap.json"), {"rows": table.rows})
  rich.print(table)


def _define_flags() -> None:
  flags.DEFINE_enum("suite", "afm", list(suites.SUITES), "The benchmarks.")
  flags.DEFINE_string("data", None, "Folder with the benchmarks' files.")
  flags.DEFINE_list("files", [], "Files by name: gaia=PATH,nq=PATH.")
  flags.DEFINE_integer(
    "limit_per_source", 0, "Tasks of each benchmark; 0 for all.", lower_bound=0
  )
  flags.DEFINE_list("overlap", [], "Training data to compare with the benchmarks.")
  flags.DEFINE_integer("overlap_words", 8, "n of a common n-gram.", lower_bound=1)
  flags.DEFINE_string(
    "shard", "", "Do part I of N alone, as 0/8; the last one writes the table."
  )
  flags.DEFINE_integer("seed", 0, "With a limit: which tasks.")
  flags.DEFINE_string(
    "workdir", None, "The folder that the run writes, and resumes from.", required=True
  )


def command() -> None:
  """Runs the command line."""
  _define_flags()
  run_program(main, takes_words=True)
