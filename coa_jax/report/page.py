"""Pages of trusted markup that are inert towards the text in them.

`viewer.py` describes the walls between text and browser.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import os
from typing import Any

from coa_jax.protocol import roles
from coa_jax.runtime.disk import atomic_write


def role_kinds() -> dict[str, str]:
  """Returns tag -> kind, which sets the colour: one per role, one for all tools."""
  kinds = {r: r for r in (*roles.ROLES, roles.OBSERVATION)}
  kinds[roles.CONTEXT_SUMMARY] = roles.REFLECTION
  return kinds | dict.fromkeys(roles.TOOLS, "tool")


def static_text(name: str) -> str:
  """Reads a file from `static/`."""
  folder = importlib.resources.files("coa_jax.report") / "static"
  return (folder / name).read_text(encoding="utf-8")


def page_html(
  title: str,
  body: str,
  script: str,
  css_class: str,
  style: str = "",
  connect: str = "'none'",
) -> str:
  """Returns a complete page around `body`, which must be trusted markup.

  `title` is plain text, `script` the only script that may run, `style` CSS after
  `style.css`. `connect` lists allowed request targets, in Content-Security-Policy
  syntax.
  """
  # The policy names the page's own script by its hash; no other script runs.
  script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  policy = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{script_hash}'; connect-src {connect}; base-uri 'none'; "
    "form-action 'none'"
  )
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{html.escape(title)}</title><style>{static_text('style.css')}"
    f"{style}</style></head>"
    f'<body class="{css_class}">{body}'
    f"<script>{script}</script></body></html>\n"
  )


def inert_json(value: Any) -> str:
  """Formats JSON for a script element; no text can end the element or open one.

  HTML parsers look for `</script` and `<!--` before JSON is parsed, so `<`, `>` and `&`
  are written as escapes. In JSON they occur only in strings.
  """
  text = json.dumps(value, allow_nan=False, separators=(",", ":"))
  for character in "<>&":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return text


def write(path: str | os.PathLike[str], page: str) -> None:
  """Writes a page atomically.

  Raises:
    ValueError: the path holds another file, and no page to replace.
  """
  if os.path.exists(path):
    with open(path, "rb") as existing:
      head = existing.read(15).lower()
    if head not in (b"", b"<!doctype html>"):
      raise ValueError(f"{os.fspath(path)} is another file, and no page to replace")
  with atomic_write(path) as f:
    f.write(page)
