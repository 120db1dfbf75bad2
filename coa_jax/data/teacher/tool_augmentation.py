"""Copies trajectories with other tool names, argument formats and descriptions.

A copy's prompt gives its tool names and call formats, and its calls follow them; roles,
order and observations stay. For the reason, see `protocol.tool_naming`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tool_bodies import ArgumentFormat
from coa_jax.protocol.tool_naming import draw_naming
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.runtime.fields import bounded, check_fields

_SEED = 0  # for the draws


@dataclasses.dataclass(frozen=True)
class ToolAugmentation:
  """Config section `formats`.

  Attributes:
    copies: augmented copies of every trajectory, in addition to it.
  """

  copies: int = bounded(0, least=0)

  def __post_init__(self):
    check_fields(self)


def augment(
  trajectory: Trajectory, variant: Variant, number: int
) -> tuple[Trajectory, Variant] | None:
  """Makes the trajectory's copy with this number; each number has its own draw.

  Returns:
    The copy and its variant, in which the copy is well formed if the trajectory was in
    `variant`. The copy has the full prompt, no token ids, `meta["format"]` (tag -> name
    and format in words) and `meta["copy"]`. None if no format can hold a call, a call
    is not one span, or the question is not on record.
  """
  question = trajectory.meta.get("question")
  if not question:
    return None
  # --- Draw names and formats that can hold every call.
  rng = random.Random(f"{_SEED}/{trajectory.task_id}/{trajectory.sample}/{number}")
  bodies: dict[str, list[str]] = {}
  for call in trajectory.calls:
    bodies.setdefault(call.name, []).append(call.arguments)
  naming = draw_naming(variant, rng, bodies=bodies)
  if naming is None:
    return None
  names = naming.names
  formats = naming.formats

  # --- A prompt with the new tools' description, and the policy's calls rewritten.
  renamed = naming.apply(variant)
  segments = prompt_segments(renamed, str(question), "full")
  for s in trajectory.segments:
    if s.author == Author.PROMPT:
      continue  # the new prompt has the tools' names
    text = s.text
    role = s.role
    if s.author == Author.POLICY and role in names:
      rewritten = _rewrite_span(text, role, names[role], formats[role])
      if rewritten is None:
        return None
      text = rewritten
      role = names[role]
    segments.append(Segment(s.author, role, text))

  # --- The recorded calls, as now written in the text.
  calls = []
  for call in trajectory.calls:
    if call.name in names:
      arguments = formats[call.name].write(call.arguments) or ""
      call = dataclasses.replace(call, name=names[call.name], arguments=arguments)
    calls.append(call)
  meta: dict[str, Any] = {**trajectory.meta, "format": naming.record, "copy": number}
  copy = dataclasses.replace(trajectory, segments=segments, calls=calls, meta=meta)
  return copy, renamed


def augmented_copies(
  kept: Iterable[Trajectory], variant: Variant, config: ToolAugmentation
) -> list[Trajectory]:
  """Makes `config.copies` copies of each trajectory that is not itself a copy."""
  out = []
  for trajectory in kept:
    if "copy" in trajectory.meta:
      continue  # the original gets the augmented copies
    for number in range(1, config.copies + 1):
      augmented = augment(trajectory, variant, number)
      if augmented is not None:
        copy, _ = augmented
        out.append(copy)
  return out


def _rewrite_span(
  text: str, tag: str, name: str, argument_format: ArgumentFormat
) -> str | None:
  head, opening, rest = text.partition(roles.open_tag(tag))
  content, closing, tail = rest.rpartition(roles.close_tag(tag))
  if not opening or not closing or head.strip() or tail.strip():
    return None
  body = argument_format.write(content.removeprefix(" "))
  if body is None:  # this format cannot hold the content
    return None
  return f"{head}{roles.wrap(name, body)}{tail}"
