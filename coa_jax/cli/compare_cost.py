"""Compares a multi-agent system's and one model's costs on the same tasks and tools.

Reductions are shown as played, and with instructions in both prompts (`report.cost`).
If an endpoint counted the team's tokens itself (including hidden reasoning), a second
comparison uses the endpoint's counts.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import rich

from coa_jax.data.teacher.token_meter import encoder
from coa_jax.protocol.roles import get_variant
from coa_jax.protocol.trajectory import Trajectory, read_trajectories
from coa_jax.report.cost import cost, cost_tables, instruction_tokens
from coa_jax.report.metrics import write_json
from coa_jax.rollout.types import RolloutConfig
from coa_jax.runtime.config import read_config
from coa_jax.runtime.record import read_run
from coa_jax.tools.tools import ToolsConfig

# Fields of `config.tools` that change a tool's abilities or answers.
_TOOLS = ("tools", "corpus", "top_k", "max_chars", "enabled")


def compare_costs(multi: str, single: str) -> dict[str, Any]:
  """Compares the costs of two trajectory files.

  The config.json beside each file names its tools and tokenizer.

  Returns:
    `metered`: `report.cost.cost` by the team's own meter; `reported`: the same by the
    endpoint's counts, None if an attempt has none; `notes`: reservations.

  Raises:
    FileNotFoundError, ValueError: a file is missing or malformed; the two have no task
      in common, or their tools differ.
  """
  team = _config(multi)
  model = _config(single)
  notes = _notes(team, model)
  instructions = _instructions(team, model)
  theirs = read_trajectories(multi)
  ours = read_trajectories(single)
  counted = [_reported(t) for t in theirs]
  whole = [t for t in counted if t is not None]
  return {
    "metered": cost(theirs, ours, instructions),
    "reported": cost(whole, ours, instructions) if len(whole) == len(theirs) else None,
    "notes": notes,
  }


def _instructions(multi: dict[str, Any], single: dict[str, Any]) -> int | None:
  """Counts the instruction tokens missing in the model's prompt; None if unknown."""
  if not multi or not single:
    return None
  rollout = read_config(single.get("rollout"), RolloutConfig, "rollout")
  tools = read_config(single.get("tools"), ToolsConfig, "tools")
  variant = get_variant(rollout.variant).with_tools(tools.tool_descriptions)
  encode = encoder(multi.get("teacher", {}).get("tokenizer"))
  return instruction_tokens(variant, rollout.style, encode)


def _config(path: str) -> dict[str, Any]:
  """Reads the config.json beside a trajectory file; {} if there is none."""
  beside = os.path.join(os.path.dirname(path), "config.json")
  if not os.path.exists(beside):
    return {}
  return read_run(beside)


def _notes(multi: dict[str, Any], single: dict[str, Any]) -> list[str]:
  if not multi or not single:
    return ["no config.json beside one of the files: the tools were not compared"]
  both = [
    read_config(config.get("tools"), ToolsConfig, "tools") for config in (multi, single)
  ]
  for field in _TOOLS:
    one, other = (getattr(tools, field) for tools in both)
    if one != other:
      raise ValueError(
        f"the tools differ: tools.{field} is {one!r} for the multi-agent system and "
        f"{other!r} for the one model"
      )
  counted = multi.get("teacher", {}).get("tokenizer") or "words, digits and marks"
  return [f"the team's tokens are counted by: {counted}; the model's by: its tokenizer"]


def _reported(attempt: Trajectory) -> Trajectory | None:
  """Returns an attempt with the endpoint's own counts; None without such counts."""
  counts = attempt.meta.get("reported")
  if not counts:
    return None
  prompt, cached, completion = counts
  usage = dataclasses.replace(
    attempt.usage, prompt=prompt, cached=cached, generated=completion
  )
  return dataclasses.replace(attempt, usage=usage)


def print_costs(multi: str, single: str, out: str = "") -> None:
  """Prints `compare_costs` as tables, and writes the figures to `out` as JSON."""
  results = compare_costs(multi, single)
  for name in ("metered", "reported"):
    if results[name] is not None:
      for table in cost_tables(results[name]):
        title = f"{table.title}, tokens as {name}"
        rich.print(dataclasses.replace(table, title=title))
  rich.print(*results["notes"], sep="\n")
  if out:
    write_json(out, results)
