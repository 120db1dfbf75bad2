"""What the ablation says: results.json, table.md, report.html, plot.png."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import rich

from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Trajectory, read_trajectories
from coa_jax.report import plots, scores
from coa_jax.report.metrics import duration, write_json
from coa_jax.report.tables import Table, markdown_table, rich_table
from coa_jax.report.viewer import write_page

Folders = Mapping[str, Sequence[str]]  # "test", "unseen" -> evaluations of the models
FULL = "full"
# Figure -> (part of the tasks, figure of `scores.summary`, heading).
FIGURES = {
  "greedy": ("test", "pass1_greedy", "greedy"),
  "sampled": ("test", "pass1_sampled", "sampled"),
  "pass3": ("test", "pass3", "pass@3"),
  "unseen": ("unseen", "pass1_greedy", "unseen kinds, greedy"),
  "unseen_sampled": ("unseen", "pass1_sampled", "unseen kinds, sampled"),
}
_COST = {
  "malformed": ("test", "malformed_rate", "malformed calls"),
  "well_formed": ("test", "protocol_ok", "well-formed"),
  "tokens": ("test", "tokens_per_task", "tokens a task"),
  "calls": ("test", "tool_calls_per_task", "tool calls a task"),
}
_NOTE = (
  "Mean over seeds \N{PLUS-MINUS SIGN} standard deviation over seeds, and the 95 % "
  "interval over the tasks of all seeds together. Sampled: temperature 1, 3 attempts."
)
_INTRO = """\
What each part of the recipe is worth: every arm is the whole journey with the few
fields changed that its name says, on the generated world, evaluated with real tools on
worlds that no training text names."""
_SHOWN = 4  # trajectories of each arm in the report


def write(
  workdir: str,
  titles: Mapping[str, tuple[str, str]],
  done: Mapping[tuple[str, int], Folders],
  failed: Mapping[str, str],
  budget: str,
  seconds: Mapping[str, float],
) -> dict[str, Any]:
  """Writes everything of what is done and prints the tables.

  Args:
    workdir: where to.
    titles: arm -> what it is called, and what it changes; in the order of the table.
    done: (arm, seed) -> its evaluations.
    failed: who failed -> why.
    budget: its name.
    seconds: by journey.

  Returns:
    What results.json holds.
  """
  # --- What every arm played, by seed, and its figures beside the full recipe's.
  played: dict[str, dict[int, ArmAttempts]] = {arm: {} for arm in (FULL, *titles)}
  for (arm, seed), folders in done.items():
    played[arm][seed] = _played(folders)
  arms = {}
  for arm, (title, changes) in titles.items():
    full = played[FULL]
    if arm == FULL:
      full = {}
    if played[arm]:
      figures = figures_of(played[arm], full)
      arms[arm] = {"title": title, "changes": changes, **figures}
  results = {
    "budget": budget,
    "arms": arms,
    "failed": dict(failed),
    "seconds": dict(seconds),
    "open": [title for arm, (title, _) in titles.items() if arm not in arms],
  }
  write_json(os.path.join(workdir, "results.json"), results)

  # --- Show it: on the terminal, as text, as a page.
  tables = _tables(results)
  for table in tables[:-1]:  # the last is too wide
    rich.print(rich_table(table))
  text = [f"# Ablation, budget {budget}", ""]
  for t in tables:
    text += [f"## {t.title}", "", markdown_table(t.rows, t.columns), t.note, ""]
  text += [f"Failed: {who}: {why}" for who, why in failed.items()]
  with open(os.path.join(workdir, "table.md"), "w", encoding="utf-8") as f:
    f.write("\n".join(text))
  _write_page(workdir, results, tables, played)
  rich.print(
    f"{duration(sum(seconds.values()))} of work in all; report: "
    f"[bold]{os.path.abspath(os.path.join(workdir, 'report.html'))}[/bold]"
  )
  return results


ArmAttempts = Mapping[str, tuple[list[Trajectory], list[Trajectory]]]


def _played(folders: Folders) -> ArmAttempts:
  """Part -> greedy and sampled trajectories of all models of the arm."""

  out = {}
  for part, models in folders.items():
    greedy: list[Trajectory] = []
    sampled: list[Trajectory] = []
    for folder in models:
      greedy += read_trajectories(os.path.join(folder, "greedy.jsonl"))
      sampled += read_trajectories(os.path.join(folder, "sampled.jsonl"))
    out[part] = (greedy, sampled)
  return out


def figures_of(
  of: Mapping[int, ArmAttempts], full: Mapping[int, ArmAttempts]
) -> dict[str, Any]:
  """The figures of an arm.

  Args:
    of: seed -> what it played.
    full: the same of the full recipe; {} for no comparison.

  Returns:
    `seeds`, and figure -> {"by_seed", "mean", "sd" (None of one seed), "ci95" over the
    tasks of all seeds}; of the accuracies also "against" and "against_ci95": the mean
    difference from the full recipe over the same tasks and seeds.
  """
  seeds = sorted(of)
  out: dict[str, Any] = {"seeds": seeds}

  # --- Every seed alone, and the tasks of all seeds together.
  by_seed: dict[str, dict[int, dict[str, Any]]] = {}
  together = {}
  for part in ("test", "unseen"):
    by_seed[part] = {seed: scores.summary(*of[seed][part]) for seed in seeds}
    greedy = _of_all_seeds(of, part, 0)
    sampled = _of_all_seeds(of, part, 1)
    together[part] = scores.summary(greedy, sampled)
  for name, (part, figure, _) in {**FIGURES, **_COST}.items():
    values = {seed: by_seed[part][seed][figure] for seed in seeds}
    known = [v for v in values.values() if v is not None]
    out[name] = {
      "by_seed": values,
      "mean": None,
      "sd": None,
      "ci95": together[part]["ci95"][figure],
    }
    if known:
      out[name]["mean"] = statistics.fmean(known)
    if len(known) > 1:
      out[name]["sd"] = statistics.stdev(known)

  # --- Against the full recipe, task by task.
  for name in ("greedy", "sampled", "unseen", "unseen_sampled"):
    part, figure, _ = FIGURES[name]
    which = 0 if figure == "pass1_greedy" else 1
    mine = _accuracy(of, part, which)
    theirs = _accuracy(full, part, which)
    differences = [mine[k] - theirs[k] for k in mine if k in theirs]
    if differences:
      out[name]["against"] = statistics.fmean(differences)
      out[name]["against_ci95"] = scores.interval(differences)
  return out


def _of_all_seeds(
  of: Mapping[int, ArmAttempts], part: str, which: int
) -> list[Trajectory]:
  """Attempts with their seed in the task's id: the seeds' tasks have the same ids."""
  out = []
  for seed, parts in of.items():
    for t in parts[part][which]:
      out.append(dataclasses.replace(t, task_id=f"{seed}/{t.task_id}"))
  return out


def _accuracy(of: Mapping[int, ArmAttempts], part: str, which: int) -> dict[str, float]:
  """Task -> share of right attempts, of all seeds."""
  groups = scores.by_task(scores.graded(_of_all_seeds(of, part, which)))
  return {k: statistics.fmean(map(scores.correct, v)) for k, v in groups.items()}


def _spread(figure: Mapping[str, Any]) -> str:
  if figure["mean"] is None:
    return "-"
  text = f"{figure['mean']:.3f}"
  if figure["sd"] is not None:
    text += f" \N{PLUS-MINUS SIGN} {figure['sd']:.3f}"
  low, high = figure["ci95"] or (figure["mean"], figure["mean"])
  return f"{text} [{low:.2f}, {high:.2f}]"


def _against(figure: Mapping[str, Any]) -> str:
  if "against" not in figure:
    return "-"
  low, high = figure["against_ci95"]
  return f"{figure['against']:+.3f} [{low:+.2f}, {high:+.2f}]"


def _tables(results: Mapping[str, Any]) -> list[Table]:
  arms = list(results["arms"].values())
  head = {"arm": "", "seeds": "seeds"}

  def rows(text: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    out = []
    for arm in arms:
      row = {"arm": arm["title"], "seeds": len(arm["seeds"])}
      for name in names:
        row[name] = text(arm[name])
      out.append(row)
    return out

  # --- Accuracy, and what it is against the full recipe's.
  heads = {n: h for n, (_, _, h) in FIGURES.items()}
  accuracy = Table(
    "Accuracy on held-out worlds", rows(_spread, list(heads)), head | heads, _NOTE
  )
  compared = {n: heads[n] for n in ("greedy", "sampled", "unseen", "unseen_sampled")}
  against = Table(
    "Difference from the full recipe",
    [r for r in rows(_against, list(compared)) if r["arm"] != "full recipe"],
    head | compared,
    "Over the same tasks and seeds, with the 95 % interval over tasks of the paired "
    "difference: one that holds 0 says that these tasks do not tell the arms apart.",
  )

  # --- What it costs, and what the arms are.
  costs = Table(
    "Cost and form, greedy attempts",
    rows(lambda figure: figure["mean"], list(_COST)),
    head | {n: h for n, (_, _, h) in _COST.items()},
    "Malformed: share of tool calls; well-formed: share of all attempts. Tokens: all "
    "that the model read and wrote.",
  )
  changes = Table(
    "What each arm changes",
    arms,
    {"title": "arm", "changes": "fields"},
    "Of the full recipe. No filtering is told of the SFT model, beside SFT only; with "
    "RL it is RL from unfiltered SFT. RL only begins with fresh parameters.",
  )
  return [accuracy, against, costs, changes]


def _write_page(
  workdir: str,
  results: Mapping[str, Any],
  tables: Sequence[Table],
  played: Mapping[str, Mapping[int, ArmAttempts]],
) -> None:
  """The plot, and the page with the tables, the plot and some trajectories."""
  # --- The plot, by the names that readers know.
  arms = {arm["title"]: arm for arm in results["arms"].values()}
  figure = plots.seed_points(
    arms, {n: FIGURES[n][2] for n in ("greedy", "sampled", "pass3", "unseen")}
  )
  os.makedirs(workdir, exist_ok=True)
  title = f"Ablation, budget {results['budget']}: share of held-out tasks solved"
  plots.write_png(os.path.join(workdir, "plot.png"), figure, title)

  # --- Some greedy attempts of each arm's first seed.
  examples = []
  for arm, by_seed in played.items():
    if 0 not in by_seed:
      continue
    greedy, _ = by_seed[0]["test"]
    for t in greedy[:_SHOWN]:
      t.meta["model"] = results["arms"][arm]["title"]
      examples.append(t)
  write_page(
    os.path.join(workdir, "report.html"),
    "Chain-of-Agents ablation",
    {"": examples},
    variant=get_variant("unified"),
    intro=_INTRO,
    headline={title: f"{arm['sampled']['mean']:.1%}" for title, arm in arms.items()},
    tables=tables,
    figures={"Mean over seeds, its interval over tasks, and each seed.": figure},
  )
