"""Tool naming: the tools' names and call formats in a prompt.

A model trained on one tool format breaks on another; the paper names this limitation
(arXiv 2508.13167: models trained on web tools fail on the exact code fences).
`ToolSpec.augmentation` has the names and formats for augmented trajectories.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tool_bodies import ArgumentFormat, unchanged
from coa_jax.protocol.tools import SPECS, accept_any


@dataclasses.dataclass(frozen=True)
class ToolNaming:
  """One run's tool names and call formats.

  Attributes:
    names: tag -> its name.
    formats: tag -> its call format.
    purposes: tag -> its purpose in the prompt.
  """

  names: Mapping[str, str]
  formats: Mapping[str, ArgumentFormat]
  purposes: Mapping[str, str]

  @property
  def record(self) -> dict[str, list[str]]:
    """Tag -> its name and its format in words."""
    out = {}
    for tag, name in self.names.items():
      out[tag] = [name, self.formats[tag].description]
    return out

  def apply(self, variant: Variant) -> Variant:
    """Returns the variant with these tool names and descriptions."""
    descriptions = {}
    for tag, name in self.names.items():
      form = self.formats[tag].description
      descriptions[name] = f"{self.purposes[tag]}; write {form}"

    # Roles have no other names.
    def rename(tags: frozenset[str]) -> frozenset[str]:
      return frozenset(self.names.get(t, t) for t in tags)

    return dataclasses.replace(
      variant,
      tools=tuple(self.names[t] for t in variant.tools),
      follows={self.names.get(k, k): rename(v) for k, v in variant.follows.items()},
      think_required=rename(variant.think_required),
      think_allowed=rename(variant.think_allowed),
      tool_descriptions=descriptions,
    )


def draw_naming(
  variant: Variant,
  rng: random.Random,
  bodies: Mapping[str, list[str]] | None = None,
) -> ToolNaming | None:
  """Draws a name, a purpose and a format for each of the variant's tools.

  Args:
    variant: reduced to the run's tools.
    rng: the random generator.
    bodies: tag -> the bodies its format must be able to hold.

  Returns:
    The naming; None if no format can hold the bodies.
  """
  names: dict[str, str] = {}
  formats: dict[str, ArgumentFormat] = {}
  purposes: dict[str, str] = {}
  for tag in variant.tools:
    spec = SPECS[tag]
    choices = spec.choices
    needed = (bodies or {}).get(tag, [])
    able = [
      each
      for each in choices.formats
      if all(each.write(body) is not None for body in needed)
    ]
    if not able:
      return None
    names[tag] = rng.choice(choices.names)
    if names[tag] == tag and spec.find_fault is not accept_any:
      # A call under its own tag must have the protocol's own format.
      able = [unchanged(spec.body)]
    formats[tag] = rng.choice(able)
    purposes[tag] = rng.choice(choices.purposes)
  return ToolNaming(names, formats, purposes)
