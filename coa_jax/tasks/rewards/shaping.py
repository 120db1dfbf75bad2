"""From the parts of a reward to the number that is trained on."""

from __future__ import annotations

from collections.abc import Mapping

from coa_jax.protocol.parser import Parse


def format_reward(parse: Parse) -> float:
  """1.0 where the whole text obeys its variant, else 0.0."""
  return 1.0 if parse.ok else 0.0


def total(parts: Mapping[str, float]) -> float:
  """Answer reward times format reward (arXiv 2508.13167, reward of the code agent).

  A right answer in a broken trajectory earns nothing, and neither does a well-formed
  wrong one. Other parts are for the record only.

  Raises:
    ValueError: `answer` or `format` is not among the parts.
  """
  missing = [name for name in ("answer", "format") if name not in parts]
  if missing:
    raise ValueError(
      f"reward part {missing[0]!r} is missing; there are {', '.join(parts) or 'none'}"
    )
  return parts["answer"] * parts["format"]
