"""The same trajectory under other tool names, layouts of arguments and descriptions.

A restyled copy says in its prompt what its tools are called and how they are written
to, and is consistent with it; roles, order and observations stay. Why: see
`protocol.tool_formats`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tool_formats import STYLES, Layout, draw_format
from coa_jax.protocol.trajectory import Author, Segment, Trajectory


@dataclasses.dataclass(frozen=True)
class FormatsConfig:
  """Config section `formats`.

  Attributes:
    copies: restyled copies of every trajectory, beside itself.
    seed: of what is drawn.
  """

  copies: int = 0
  seed: int = 0

  def __post_init__(self):
    if self.copies < 0:
      raise ValueError("copies must be at least 0")


def restyle(
  trajectory: Trajectory, variant: Variant, number: int, seed: int
) -> tuple[Trajectory, Variant] | None:
  """One restyled copy.

  Args:
    trajectory: with `meta["question"]`; left as it is.
    variant: its dialect, with the tools of its prompt.
    number: which copy; each draws anew.
    seed: of the draw, which depends on nothing else but the trajectory's name.

  Returns:
    The copy, without ids, its prompt the full one, with `meta["format"]` (tag -> name
    and layout) and `meta["copy"]`; and its variant, in which it is well formed if it
    was. None where no layout can hold a call, a call is not one span, or nobody noted
    what was asked.
  """
  question = trajectory.meta.get("question")
  if not question:
    return None
  rng = random.Random(f"{seed}/{trajectory.task_id}/{trajectory.sample}/{number}")
  bodies: dict[str, list[str]] = {}
  for call in trajectory.calls:
    bodies.setdefault(call.name, []).append(call.arguments)
  drawn = draw_format(variant, rng, STYLES, bodies)
  if drawn is None:
    return None
  names, layouts, other = drawn.names, drawn.layouts, drawn.variant(variant)
  segments = prompt_segments(other, str(question), "full")
  for s in trajectory.segments:
    if s.author == Author.PROMPT:
      continue
    text, role = s.text, s.role
    if s.author == Author.POLICY and role in names:
      rewritten = _span(text, role, names[role], layouts[role])
      if rewritten is None:
        return None
      text, role = rewritten, names[role]
    segments.append(Segment(s.author, role, text))
  calls = [
    dataclasses.replace(
      c, name=names[c.name], arguments=layouts[c.name].write(c.arguments) or ""
    )
    if c.name in names
    else c
    for c in trajectory.calls
  ]
  meta: dict[str, Any] = {**trajectory.meta, "format": drawn.told, "copy": number}
  copy = dataclasses.replace(trajectory, segments=segments, calls=calls, meta=meta)
  return copy, other


def restyled_copies(
  kept: Iterable[Trajectory], variant: Variant, config: FormatsConfig
) -> list[Trajectory]:
  """`config.copies` restyled copies of each that is not a second copy itself."""
  out = []
  for t, number in itertools.product(kept, range(1, config.copies + 1)):
    copy = None if "copy" in t.meta else restyle(t, variant, number, config.seed)
    out += [copy[0]] if copy else []
  return out


def _span(text: str, tag: str, name: str, layout: Layout) -> str | None:
  head, opening, rest = text.partition(roles.open_tag(tag))
  content, closing, tail = rest.rpartition(roles.close_tag(tag))
  if not opening or not closing or head.strip() or tail.strip():
    return None
  body = layout.write(content.removeprefix(" "))
  return None if body is None else f"{head}{roles.wrap(name, body)}{tail}"
