"""Bounds for config fields, stored as field metadata, and their one check.

  rows: int = bounded(16, least=1)
  ratio: str = choice("token", of=("token", "sequence"))

A dataclass calls `check_fields(self)` in `__post_init__`, before its own checks that
involve several fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
from collections.abc import Sequence
from typing import Any

# `module:name`, a config's way to name a user's function or class.
PYTHON_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def import_named(path: str, field: str) -> Any:
  """Imports a user's function or class, given as `module:name`.

  Raises:
    ValueError: it does not exist or cannot be called; the message begins with `field`.
  """
  module, _, name = path.partition(":")
  try:
    found = getattr(importlib.import_module(module), name)
  except Exception as e:  # a user's module may raise anything
    message = f"{field} {path!r} cannot be imported: {type(e).__name__}: {e}"
    raise ValueError(message) from e
  if not callable(found):
    raise ValueError(f"{field} {path!r} is no function")
  return found


def plain(value: Any) -> Any:
  """Returns a scalar of numpy, JAX or torch as a Python number; others unchanged."""
  return value.item() if getattr(value, "shape", None) == () else value


def bounded(
  default: Any = dataclasses.MISSING,
  *,
  least: float | None = None,
  above: float | None = None,
  most: float | None = None,
  below: float | None = None,
) -> Any:
  """Returns a dataclass field for a number within bounds; required without a default.

  `least` and `most` are inclusive bounds, `above` and `below` exclusive ones.
  """
  limits = {"least": least, "above": above, "most": most, "below": below}
  metadata = {name: limit for name, limit in limits.items() if limit is not None}
  return dataclasses.field(default=default, metadata=metadata)


def choice(default: Any = dataclasses.MISSING, *, of: Sequence[str]) -> Any:
  """Returns a dataclass field for a name in `of`; required without a default."""
  return dataclasses.field(default=default, metadata={"of": tuple(of)})


def section(cls: type) -> Any:
  """Returns a dataclass field for a nested section, with default `cls()`."""
  return dataclasses.field(default_factory=cls)


def check_fields(config: Any) -> None:
  """Refuses a dataclass with a field that is out of bounds or not finite.

  Raises:
    ValueError: naming the field, its value and accepted values.
  """
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    names = field.metadata.get("of")
    if names and value not in names:
      raise ValueError(
        f"{field.name} {value!r}; accepted: {', '.join(filter(None, names))}"
      )
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f"{field.name} is {value}; it must be a finite number")
    if isinstance(value, int | float) and not _within(value, field.metadata):
      words = accepted(field.metadata)
      raise ValueError(f"{field.name} is {value}; it must be {words}")


def _within(value: float, bounds: Any) -> bool:
  if "least" in bounds and value < bounds["least"]:
    return False
  if "above" in bounds and value <= bounds["above"]:
    return False
  if "most" in bounds and value > bounds["most"]:
    return False
  return not ("below" in bounds and value >= bounds["below"])


def accepted(bounds: Any) -> str:
  """Returns bounds in words: "at least 1", "from 0 to 1", "above 0 and below 2"."""
  if "least" in bounds and "most" in bounds:
    return f"from {bounds['least']} to {bounds['most']}"
  words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
  return " and ".join(
    f"{text} {bounds[name]}" for name, text in words.items() if name in bounds
  )


def nearest(name: str, known: Any) -> str:
  """Returns `; did you mean 'x'?`, or the list of names if none is near."""
  close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
  if close:
    return f"; did you mean {close[0]!r}?"
  return f"; there are {', '.join(sorted(known))}"
