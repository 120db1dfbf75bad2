"""Translates other systems' tool calls into this protocol's tags and bodies.

A foreign call has a name and named arguments; here a call has a tag and one text body.
Arguments without a place in the body are reported, never dropped silently.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.data.importers.call_text import read_value
from coa_jax.data.importers.row import Recorder, RowRefused
from coa_jax.protocol import roles
from coa_jax.protocol.tool_bodies import FUNCTION_NAME, render_function_call
from coa_jax.protocol.tools import FUNCTION_TAG, SPECS, Body


def _tags_by_name() -> dict[str, str]:
  tags = {}
  for spec in SPECS.values():
    if spec.tag == FUNCTION_TAG:
      continue  # has no default names: `--tools` lists such functions
    for name in (spec.tag, *spec.aliases):
      tags[name] = spec.tag
  # `answer` and `suggested_answer` are not tools here, but calls in OAgents (arXiv
  # 2508.13167).
  for name in ("final_answer", "finish", "answer", "submit"):
    tags[name] = roles.ANSWER
  tags["suggested_answer"] = roles.SUGGESTED_ANSWER
  return tags


# Foreign tool name in lower case -> our tag.
TOOLS: Mapping[str, str] = _tags_by_name()
# Argument names for an answer's text, the most specific first.
_ANSWER_NAMES = ("answer", "final_answer", "result", "output", "text")


@dataclasses.dataclass(frozen=True)
class Call:
  """A call in this protocol's terms.

  Attributes:
    tag: a tool's tag, or `answer` or `suggested_answer`.
    body: the span's content.
    lost: arguments without a place in the body, as `name=value`.
  """

  tag: str
  body: str
  lost: tuple[str, ...] = ()


def translate_and_note(
  recorder: Recorder, where: str, name: str, arguments: Any, table: Mapping[str, str]
) -> Call:
  """Translates a call, and notes each lost argument; see `translate`."""
  recorder.calls_read += 1
  call = translate(name, arguments, table)
  for argument in call.lost:
    recorder.note(where, f"argument {argument} of {name}")
  return call


def translate(name: str, arguments: Any, table: Mapping[str, str]) -> Call:
  """Translates one call into this protocol's terms.

  The arguments are an object, its JSON string, or a plain string; lower-case names in
  `table` extend or override `TOOLS`.

  Raises:
    RowRefused: no table has the name, or the arguments hold no body for the tag.
  """
  # --- The tag. The user's table comes first, to override ours.
  tag = table.get(name.lower()) or TOOLS.get(name.lower())
  if tag is None:
    raise RowRefused(
      "unknown_tool", f"no tag for the tool {name!r}; name one with --tools"
    )
  fields = _object(arguments, tag)
  if fields is None and tag == FUNCTION_TAG and arguments in (None, ""):
    fields = {}  # a function without parameters

  # --- A function tool keeps its own name and arguments.
  if tag == FUNCTION_TAG:
    if fields is None or not FUNCTION_NAME.fullmatch(name):
      raise RowRefused("bad_arguments", f"{name}: {arguments!r:.80}")
    return Call(tag, render_function_call(name, fields))

  # --- The argument for the body.
  keys = SPECS[tag].argument_names if tag in SPECS else _ANSWER_NAMES
  if fields is None:  # a plain string: the call's only argument
    if not isinstance(arguments, str):
      raise RowRefused("bad_arguments", f"{name}: {arguments!r:.80}")
    fields = {keys[0]: arguments}
  main = _main_argument(fields, keys)
  if main is None:
    raise RowRefused("bad_arguments", f"{name}: none of {', '.join(keys)} is given")
  value = fields[main]

  # --- The body, which may include other arguments; the remaining ones are lost.
  others = {key: other for key, other in fields.items() if key != main}
  body, also = _body(tag, value, others)
  if body is None:
    raise RowRefused("bad_arguments", f"{name}: {main} is {value!r:.80}")
  lost = []
  for key, other in others.items():
    if key not in also and other not in (None, "", [], {}):
      lost.append(f"{key}={other!r:.80}")
  return Call(tag, body, tuple(lost))


def _main_argument(fields: Mapping[str, Any], names: Sequence[str]) -> str | None:
  """Returns the first name among the arguments, else a single argument's name."""
  for name in names:
    if fields.get(name) is not None:
      return name
  if len(fields) == 1:
    return next(iter(fields))
  return None


def _object(arguments: Any, tag: str) -> dict[str, Any] | None:
  """Reads arguments as an object; None for a plain string or another value."""
  if isinstance(arguments, str):
    # A program may be a Python literal.
    arguments = read_value(arguments, python=tag != "code")
  if not isinstance(arguments, dict):
    return None
  try:
    json.dumps(arguments, allow_nan=False)
  except (ValueError, RecursionError):
    raise RowRefused(
      "bad_arguments", f"{arguments!r:.80}: NaN and Infinity are not JSON"
    ) from None
  return arguments


def _body(tag: str, value: Any, others: Mapping[str, Any]) -> Body:
  """Returns the span's body (None if impossible) and the other arguments inside."""
  if tag in SPECS:
    return SPECS[tag].body_of_call(value, others)
  if value is None or isinstance(value, str):
    return value, ()
  return json.dumps(value, ensure_ascii=False), ()
