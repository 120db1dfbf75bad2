"""What a `tool` span holds: a tool that the config names, and its arguments."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol import roles


@dataclasses.dataclass(frozen=True)
class NamedCall:
  """What a `tool` span asks for: a tool by its name, and its arguments."""

  name: str
  arguments: Mapping[str, Any]


NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)  # of a tool; MCP's names too


def parse(content: str) -> NamedCall | None:
  """Reads a `tool` span: one JSON object of a `name` and an object `arguments`.

  Returns None where the content is anything else.
  """
  try:
    value = json.loads(content.strip(roles.WHITE))  # ours is wider than JSON's
  except (ValueError, RecursionError):
    return None
  if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
    return None
  name, arguments = value["name"], value["arguments"]
  if not isinstance(name, str) or not NAME.fullmatch(name):
    return None
  return NamedCall(name, arguments) if isinstance(arguments, dict) else None


def render(name: str, arguments: Mapping[str, Any]) -> str:
  """The content of a `tool` span; `parse` reads it back."""
  return json.dumps({"name": name, "arguments": dict(arguments)})
