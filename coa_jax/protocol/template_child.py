"""Renders chat templates; `chat_template` starts it as a separate process.

A template comes from a stranger's model folder, and Jinja's sandbox bounds neither time
nor memory: here the operating system bounds both. Each line of standard input is a JSON
object with a template and its variables; each line of standard output is an object with
`text` or `error`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

SECONDS = 3  # processor time per line
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


@functools.cache
def _compiled(template: str) -> list[jinja2.Template]:
  # Twice: a memory address in the text would differ.
  return [_environment().from_string(template) for _ in range(2)]


def render(template: str, variables: dict[str, Any]) -> dict[str, str]:
  """Returns a template's rendered `text`, or its `error`."""
  try:
    texts = [compiled.render(variables) for compiled in _compiled(template)]
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


def _limit_seconds() -> None:
  """Gives the next line its own processor time."""
  used = resource.getrusage(resource.RUSAGE_SELF)
  seconds = int(used.ru_utime + used.ru_stime) + 1 + SECONDS
  _, hard = resource.getrlimit(resource.RLIMIT_CPU)
  resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


if __name__ == "__main__":
  with contextlib.suppress(ValueError, OSError):  # macOS has none
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
  for line in sys.stdin:
    _limit_seconds()
    print(json.dumps(render(**json.loads(line))), flush=True)
