"""Computes the training reward from an answer's verdict.

reward = base + overlong + repetition + tool_cost: base combines answer and format, and
each of the others is an optional penalty, at most 0. Every part is recorded with its
contribution, so the record's penalties and base sum to the reward.
"""

from __future__ import annotations

import dataclasses

from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.runtime.fields import bounded, check_fields, choice

FORMATS = ("product", "weighted", "none")
# The maximum total tool cost: below 1, so a right answer is worth any number of calls.
MAX_TOOL_COST = 0.5


@dataclasses.dataclass(frozen=True)
class OverlongConfig:
  """Config section `reward.shaping.overlong`: DAPO's soft penalty, in tokens.

  Attributes:
    limit: tokens after the prompt (observations too) at which the penalty is -1.
    buffer: tokens before the limit over which the penalty grows from 0.
  """

  limit: int
  buffer: int

  def __post_init__(self):
    if not 0 < self.buffer <= self.limit:
      raise ValueError(
        f"buffer={self.buffer} must be from 1 to limit={self.limit}: the penalty "
        "starts at limit - buffer tokens"
      )


@dataclasses.dataclass(frozen=True)
class RepetitionConfig:
  """Config section `reward.shaping.repetition`.

  Attributes:
    weight: subtracted if a tool call, think or plan is written twice (the released
      web agent's term).
  """

  weight: float = bounded(0.5, above=0)

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True)
class ToolCostConfig:
  """Config section `reward.shaping.tool_cost`.

  Attributes:
    per_call: subtracted for each call; all calls together cost at most 0.5.
    by_turn: True charges calls made at once only once: the longest chain of calls.
  """

  per_call: float = bounded(above=0, most=MAX_TOOL_COST)
  by_turn: bool = False

  def __post_init__(self):
    check_fields(self)


@dataclasses.dataclass(frozen=True)
class ShapingConfig:
  """Config section `reward.shaping`.

  Attributes:
    format: product: answer x format (the released code agent's reward); weighted: (1 -
      format_weight) x answer + format_weight x format; none: the answer alone (the
      released web agent's), with the format only recorded.
    format_weight: for `weighted`, between 0 and 1.
    overlong: soft penalty for long trajectories; None for none.
    repetition: penalty for repetition; None for none.
    tool_cost: penalty for tool calls; None for none.
  """

  format: str = choice("product", of=FORMATS)
  format_weight: float = 0.0
  overlong: OverlongConfig | None = None
  repetition: RepetitionConfig | None = None
  tool_cost: ToolCostConfig | None = None

  def __post_init__(self):
    check_fields(self)
    weighted = self.format == "weighted"
    if weighted and not 0 < self.format_weight < 1:
      raise ValueError("format='weighted' needs a format_weight between 0 and 1")
    if not weighted and self.format_weight:
      raise ValueError(
        f"format_weight={self.format_weight:g} and format={self.format!r}: the format "
        "would count twice or not at all; format_weight belongs to format='weighted'"
      )


def correctness(config: ShapingConfig, parts: dict[str, float]) -> float:
  """Returns how right an attempt is, from 0 to 1, given its reward parts.

  Penalties and a weighted format do not count. With format='product' an answer in a
  broken format earns nothing, so the attempt is not right.
  """
  if config.format == "product":
    return parts["answer"] * parts["format"]
  return parts["answer"]


def shape(
  config: ShapingConfig, answer: float, trajectory: Trajectory, variant: Variant
) -> tuple[float, dict[str, float]]:
  """Returns a trajectory's reward and its parts; `answer` is the verdict, 0 to 1.

  The parts are `answer` and `format`, from 0 to 1, and the config's penalties
  `overlong`, `repetition` and `tool_cost`, each at most 0.
  """
  # --- The base: answer and format. One slip anywhere breaks the whole format.
  form = float(parse(trajectory.text, variant).ok)
  weight = config.format_weight
  base = {
    "product": answer * form,
    "weighted": (1 - weight) * answer + weight * form,
    "none": answer,
  }[config.format]
  # --- The config's penalties.
  penalties: dict[str, float] = {}
  if config.overlong is not None:
    penalties["overlong"] = overlong(config.overlong, trajectory)
  if config.repetition is not None:
    penalties["repetition"] = repetition(config.repetition, trajectory)
  if config.tool_cost is not None:
    penalties["tool_cost"] = tool_cost(config.tool_cost, trajectory)
  parts = {"answer": answer, "format": form, **penalties}
  return base + sum(penalties.values()), parts


def overlong(config: OverlongConfig, trajectory: Trajectory) -> float:
  """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

  0 up to limit - buffer tokens, then linear down to -1 at the limit and beyond.
  """
  # The policy's calls cause the observations; the prompt is not the policy's doing.
  length = trajectory.usage.generated + trajectory.usage.observation
  over = (length - (config.limit - config.buffer)) / config.buffer
  return -min(max(over, 0.0), 1.0)


def repetition(config: RepetitionConfig, trajectory: Trajectory) -> float:
  """The repetition term; see `RepetitionConfig`."""
  # A repeated call, thought or plan, ignoring blanks. No other span counts: giving the
  # same score twice is not repetition.
  spans = [(call.name, call.arguments) for call in trajectory.calls]
  for segment in trajectory.segments:
    if segment.author == Author.POLICY and segment.role in (roles.THINK, roles.PLAN):
      spans.append((segment.role, segment.text))
  different = {(role, " ".join(text.split())) for role, text in spans}
  return -config.weight if len(different) < len(spans) else 0.0


def tool_cost(config: ToolCostConfig, trajectory: Trajectory) -> float:
  """The tool-cost term; see `ToolCostConfig`."""
  count = trajectory.usage.tool_turns if config.by_turn else len(trajectory.calls)
  return -min(config.per_call * count, MAX_TOOL_COST)
