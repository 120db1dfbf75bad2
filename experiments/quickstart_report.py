"""Reports a quickstart: results.json, a table, an HTML page."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import rich

from coa_jax import distill
from coa_jax.data.teacher.token_meter import word_ids
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Trajectory, read_trajectories
from coa_jax.report import plots, scores
from coa_jax.report.cost import (
  INSTRUCTED,
  PAPER_REDUCTION,
  REDUCTIONS,
  cost,
  cost_tables,
  instruction_tokens,
)
from coa_jax.report.metrics import duration, read_metrics, write_json
from coa_jax.report.tables import Table
from coa_jax.report.viewer import write_page

FIGURES = {
  "pass1_greedy": "greedy",
  "pass1_sampled": "sampled",
  "pass3": "pass@3",
  "best_of_3": "best of 3",
}
_COST_FIGURES = {
  "tool_calls_per_task": "tool calls",
  "generated_tokens_per_task": "generated tokens",
  "tokens_per_task": "all tokens",
  "malformed_rate": "malformed calls",
  "protocol_ok": "well-formed",
}
_TITLES = {
  "teacher": "team",
  "sft": "SFT",
  "rl": "RL",
  "tools_off": "RL, tools off",
}
_INTRO = """\
One language model that plays a whole multi-agent team in one decoding stream, made from
scratch on a CPU. A scripted multi-agent team with real tools (search, Python) solved
tasks in an offline world; its runs became trajectories; a model of half a million
parameters was trained on them and then improved by reinforcement learning with the same
tools. Everything below was measured on worlds whose names no training text contains.

The team knows things that the model can not know: it sometimes recalls a fact or
computes in its head. Imitation alone teaches the model to make such facts up;
reinforcement learning teaches it to use the tools."""
_NATS = "loss (nats)"
_SHOWN = 12  # trajectories per model in the report


def write(workdir: str, seconds: dict[str, Any]) -> dict[str, Any]:
  """Writes and returns `results.json`, writes `report.html`, and prints the tables.

  `seconds` has each stage's seconds and its flag `NAME_done`.
  """
  # --- The team's and the model's costs and scores.
  meters = read_trajectories(os.path.join(workdir, "eval_teacher", distill.TEACHER))
  team = [t for t in meters if t.sample == 0]
  retries = [t for t in meters if t.sample > 0]
  greedy = _played(workdir, "eval_rl", "greedy")
  with open(os.path.join(workdir, "eval_rl", "config.json")) as f:
    played = json.load(f)["config"]
  variant = get_variant("unified").with_tools(played["tools"]["tools"])
  instructions = instruction_tokens(variant, played["rollout"]["style"], word_ids)
  table = cost(team, greedy, instructions)
  teacher = scores.summary(team, retries)
  teacher["protocol_ok"] = None  # a team writes messages, not the protocol

  # --- All figures.
  stages = {k: v for k, v in seconds.items() if not k.endswith("_done")}
  ood: dict[str, dict[str, Any]] = {}
  for model in ("sft", "rl"):
    for family, summary in _results(workdir, f"eval_ood_{model}")["by_family"].items():
      ood.setdefault(family, {})[model] = summary
  results = {
    "seconds": round(sum(stages.values()), 1),
    "seconds_by_stage": stages,
    "teacher": teacher,
    "sft": _results(workdir, "eval_sft"),
    "rl": _results(workdir, "eval_rl"),
    "tools_off": _results(workdir, "eval_tools_off"),
    "cost": table,
    "ood": ood,
    "paper_reduction": PAPER_REDUCTION,
  }
  write_json(os.path.join(workdir, "results.json"), results)

  # --- Show them.
  tables = _tables(results)
  for t in tables:
    rich.print(t)
  print(_saved(results["cost"]))
  path = os.path.abspath(os.path.join(workdir, "report.html"))
  _write_page(path, workdir, results, tables)
  print(f"{duration(results['seconds'])} in all")
  print(f"report: {path}")
  print(f"figures: {os.path.join(workdir, 'results.json')}")
  print(_invitation(workdir, played["tools"]["sandbox"]))
  return results


def _invitation(workdir: str, sandbox: str) -> str:
  """Returns a line with the command to chat with the trained model."""
  command = (
    "ask it: python -m experiments.chat --config=configs/evaluate_world.py "
    f"--config.init={workdir}/rl/model "
    f"--config.tools.corpus={workdir}/world/test_pages.jsonl"
  )
  # If the run had no jail, the chat needs the same back-end.
  if sandbox != "jail":
    command += f" --config.tools.sandbox={sandbox}"
  return command


def _results(workdir: str, name: str) -> dict[str, Any]:
  with open(os.path.join(workdir, name, "results.json")) as f:
    return json.load(f)


def _played(workdir: str, name: str, kind: str) -> list[Trajectory]:
  return read_trajectories(os.path.join(workdir, name, f"{kind}.jsonl"))


def _tables(results: dict[str, Any]) -> list[Table]:
  """Returns the tables for the terminal and the report."""
  # --- Accuracy on trained and untrained families.
  rows = [_row(_TITLES[name], results[name]) for name in _TITLES]
  columns = {"model": "", **{figure + "_ci": t for figure, t in FIGURES.items()}}
  main = Table(
    f"Accuracy (pass@1 and more) on {results['rl']['tasks']} held-out tasks",
    rows,
    columns,
    "In parentheses 95 % intervals: Wilson's where a task is right or wrong, by a "
    "bootstrap over tasks where it has several attempts. Team: the multi-agent system, "
    "whose greedy attempt is its first run; SFT, RL: the one model. Sampled: at "
    "temperature 1, 3 attempts. Best of 3: majority vote, ties by mean log-prob.",
  )
  per_task = Table(
    "Per task",
    rows,
    {"model": "", **_COST_FIGURES},
    "All tokens: prompt, observations and generated; the team sends its context again "
    "at every call, the one model runs every token once.",
  )
  ood = []
  for family, by_model in results["ood"].items():
    for model, summary in by_model.items():
      ood.append(_row(f"{family}, {_TITLES[model]}", summary))
  deeper = Table(
    "Families and depths never trained on",
    ood,
    columns,
    "No training text shows these kinds of questions. A row of zeros is a measurement, "
    "not a failure of the run: a model of this size does not go beyond the kinds that "
    "it has seen.",
  )

  # --- Cost.
  fewer = []
  for name, title in REDUCTIONS.items():
    interval = results["cost"]["ci95"][name]
    fewer.append({"what": title, "value": results["cost"][name], "ci": interval})
  fewer.append({"what": "the paper's, per task (n = 10)", "value": PAPER_REDUCTION})
  reductions = Table(
    "Fewer tokens than the multi-agent team",
    fewer,
    {"what": "reduction", "value": "measured", "ci": "95 %"},
    "Both sides count a word, a digit, a punctuation mark or a tag as one token. "
    + INSTRUCTED,
  )
  return [main, per_task, deeper, reductions, cost_tables(results["cost"])[0]]


def _saved(table: dict[str, Any]) -> str:
  """The sentence on the one model's token savings."""

  def percent(name: str) -> str:
    value = table[f"reduction_{name}"]
    return "-" if value is None else f"{value:.1%}"

  return (
    f"Against the team, the one model uses {percent('no_cache')} fewer tokens per task "
    f"as played, {percent('instructed')} fewer with instructions on both sides "
    f"({table['instructions']} tokens in its prompt, which is empty as played); per "
    f"solved task {percent('per_solved')} and {percent('per_solved_instructed')}."
  )


def _row(title: str, summary: dict[str, Any]) -> dict[str, Any]:
  """A table's row: each figure with its interval."""
  spread = {}
  for figure in FIGURES:
    value = summary[figure]
    spread[f"{figure}_ci"] = None  # e.g. pass@3 with fewer than 3 graded samples
    if value is not None:
      low, high = summary["ci95"][figure] or (value, value)
      spread[f"{figure}_ci"] = f"{value:.3f} ({low:.3f}-{high:.3f})"
  return {"model": title, **summary, **spread}


def _write_page(
  path: str, workdir: str, results: dict[str, Any], tables: Sequence[Table]
) -> None:
  sft = read_metrics(os.path.join(workdir, "sft"), "sft")
  rl = read_metrics(os.path.join(workdir, "rl"), "rl")
  models = {_TITLES[name]: results[name] for name in _TITLES}
  # --- The figures, by their captions.
  figures = {
    "Accuracy on held-out worlds, with 95 % intervals.": plots.score_bars(
      models, FIGURES
    ),
    "SFT: loss per policy token, on a logarithmic axis.": plots.curves(
      sft,
      {_NATS: {"loss": "training", "validation_loss": "validation"}},
      logarithmic=(_NATS,),
    ),
    "RL: rewards, greedy accuracy on development tasks, entropy.": plots.curves(
      rl, _rl_panels(rl), shares=("share", "greedy accuracy")
    ),
    "SFT: where the time of a step goes.": plots.phase_areas(sft),
    "RL: where the time of a step goes.": plots.phase_areas(rl),
    "Tokens of the team and of the one model.": plots.cost_bars(results["cost"]),
  }
  filtering, unit = _filtering(workdir)
  figures[
    f"Team runs before, trajectories after filtering: length in {unit}, spans by role."
  ] = filtering

  # --- The main figures, and the page.
  rl_summary = results["rl"]
  headline = {
    "SFT, greedy": _percent(results["sft"]["pass1_greedy"]),
    "RL, greedy": _percent(rl_summary["pass1_greedy"]),
    "RL, sampled": _percent(rl_summary["pass1_sampled"]),
    "tools off": _percent(results["tools_off"]["pass1_greedy"]),
    "fewer tokens than the team, instructions on both sides": _percent(
      results["cost"]["reduction_instructed"]
    ),
    "fewer tokens than the team, as played": _percent(
      results["cost"]["reduction_no_cache"]
    ),
    "whole run": duration(results["seconds"]),
  }
  write_page(
    path,
    "Chain-of-Agents quickstart",
    {"": _examples(workdir)},
    variant=get_variant("unified"),
    intro=f"{_INTRO}\n\n{_made_by(workdir)}",
    headline=headline,
    tables=tables,
    figures=figures,
    choice="Chosen to be read: right and wrong ones alternately, as far as there are "
    "both. Their mean reward is not the accuracy of a model; the tables have that.",
  )


def _made_by(workdir: str) -> str:
  """How the page was made: date, command, seed, commit, machine; how to browse RL."""
  with open(os.path.join(workdir, "rl", "config.json")) as f:
    record = json.load(f)
  command = shlex.join(["python", "-m", "experiments.quickstart", *sys.argv[1:]])
  return (
    f"Made on {time.strftime('%d %B %Y')} by `{command}`: seed "
    f"{record['config'].get('rollout', {}).get('seed', '-')}, "
    f"commit {(record.get('git_commit') or '-')[:12]}, on "
    f"{platform.system()} {platform.machine()} with {os.cpu_count()} cores.\n\n"
    "Some trajectories stand at the end of this page. To browse all of RL: `python -m "
    f"experiments.browse --workdir={shlex.quote(os.path.join(workdir, 'rl'))}`"
  )


def _percent(share: float | None) -> str:
  return "-" if share is None else f"{share:.1%}"


def _rl_panels(rl: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
  panels = {
    # The reward is 1 for a right answer in a well-formed trajectory.
    "share": {"reward": "reward", "format": "well-formed"},
    "greedy accuracy": {"dev_accuracy": "development"},
  }
  # A short run without mixed groups has no update.
  if any("entropy" in row for row in rl):
    panels["entropy per token (nats)"] = {"entropy": "entropy"}
  return panels


def _filtering(workdir: str) -> tuple[Any, str]:
  """Plots lengths and roles before and after filtering; returns the unit, too."""
  data = read_trajectories(os.path.join(workdir, "distill", distill.TRAJECTORIES))
  unique = {(t.task_id, t.sample): t for t in data}
  sets = (list(unique.values())[:2000], data[:2000])
  tokens = all(t.num_tokens for one in sets for t in one)
  before, after = (plots.Statistics.of(s, tokens) for s in sets)
  return plots.filter_statistics(before, after), before.unit


def _examples(workdir: str) -> list[Trajectory]:
  """Picks trajectories to read: right and wrong ones per model, from many families."""
  out = []
  for model, name in (("rl", "eval_rl"), ("sft", "eval_sft"), ("rl", "eval_ood_rl")):
    played = _played(workdir, name, "greedy")
    right = [t for t in played if t.reward_parts.get("answer")]
    wrong = [t for t in played if not t.reward_parts.get("answer")]
    # Right and wrong ones alternate.
    mixed = itertools.chain.from_iterable(itertools.zip_longest(right, wrong))
    for t in list(filter(None, mixed))[:_SHOWN]:
      t.meta["model"] = _TITLES[model]
      out.append(t)
  return out
