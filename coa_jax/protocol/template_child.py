"""Renders one chat template; `chat_template` starts it as a separate process.

A template comes from a stranger's model folder, and Jinja's sandbox bounds neither time
nor memory: here the operating system bounds both. Standard input is a JSON object with
the template and its variables; standard output is an object with `text` or `error`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

SECONDS = 3  # processor time
BYTES = 1 << 30
MAX_CHARS = 1_000_000
# The date in every prompt: Llama 3's default.
TODAY = datetime.datetime(2024, 7, 26)


class _Generation(jinja2.ext.Extension):
  """Transformers' block around a model's reply; renders only its content."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
  """Returns Transformers' Jinja environment, without randomness and without a clock."""
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  # Both draw at random.
  del env.filters["random"]
  del env.globals["lipsum"]

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  def refuse(message: Any) -> None:
    raise jinja2.TemplateError(f"it says {str(message)!r:.200}")

  env.filters["tojson"] = to_json
  env.globals["raise_exception"] = refuse
  env.globals["strftime_now"] = TODAY.strftime
  return env


def render(template: str, variables: dict[str, Any]) -> dict[str, str]:
  """Returns a template's rendered `text`, or its `error`."""
  # Rendered twice: a memory address in the text would differ.
  environments = [_environment(), _environment()]
  try:
    texts = [e.from_string(template).render(variables) for e in environments]
  except jinja2.TemplateSyntaxError as e:
    return {"error": f"it is not Jinja: {e.message} in line {e.lineno}"}
  except MemoryError:
    return {"error": f"it takes more than {BYTES >> 20} MB of memory"}
  except Exception as e:  # a template can raise anything
    return {"error": f"it fails: {type(e).__name__}: {str(e)[:300]}"}
  if texts[0] != texts[1]:
    return {"error": "it does not render the same text twice"}
  if len(texts[0]) > MAX_CHARS:
    return {"error": f"it renders {len(texts[0])} characters around one message"}
  return {"text": texts[0]}


if __name__ == "__main__":
  resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
  with contextlib.suppress(ValueError, OSError):  # macOS has none
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
  json.dump(render(**json.load(sys.stdin)), sys.stdout)
