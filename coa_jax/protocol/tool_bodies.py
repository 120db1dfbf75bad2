"""The bodies of tool spans: structured formats, and alternative formats.

Most tools take plain text. `code` takes a program, `visual_inspector` a JSON block and
`tool` a JSON object with a function's name and arguments; each has a reader and writer
here. An `ArgumentFormat` writes a body in another way, for `tool_naming`.

budget: each body's reader, writer and other formats are read together.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Here and in `parser`, only ASCII white space, digits and letters count, so that a byte
# table (`grammar`) has the same rules.
WHITE = " \t\n\r\f\v"


def _read_json(text: str) -> Any:
  """Reads `text` as JSON; None if invalid or nested too deep."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError):
    return None


# Programs.


@dataclasses.dataclass(frozen=True)
class CodeCall:
  """A `code` span's request: a program and its standard input."""

  program: str
  stdin: str = ""


_CR_FENCE = re.compile(r"```\w*[ \t]*\r")


def _json(value: Any) -> str:
  """Writes JSON as the policy should: letters as they are, not as escapes."""
  return json.dumps(value, ensure_ascii=False)


def _unix_lines(content: str) -> str:
  """Converts all line ends to line feeds, if the fence's has a carriage return."""
  if _CR_FENCE.search(content) is None:
    return content
  return content.replace("\r\n", "\n").replace("\r", "\n")


_CODE = re.compile(
  r"\s*```(?:py|python)[ \t]*\n(?P<program>.*?)\n?```"
  r"(?:\s*```sh[ \t]*\n(?P<stdin>.*?)\n?```)?\s*",
  re.DOTALL | re.ASCII,
)


def parse_code(content: str) -> CodeCall | None:
  """Reads a `code` span: one `py` fence, then at most one `sh` fence, nothing else.

  Returns None for any other content, so a caller never guesses. The released code agent
  trains on `py` and the released general agent on `python`; both are accepted, this
  project writes `py`.
  """
  # The expression takes quadratic time in the number of fences.
  if content.count("```") > 4:
    return None
  match = _CODE.fullmatch(_unix_lines(content))
  if match is None:
    return None
  program = match["program"]
  stdin = match["stdin"] or ""
  # The expression reads two programs as one program with a fence inside.
  if not program.strip(WHITE) or "```" in program or "```" in stdin:
    return None
  return CodeCall(program, stdin)


def render_code(program: str, stdin: str = "") -> str:
  """Writes a `code` span's content; `parse_code` reads it back."""
  text = f"```py\n{program}\n```"
  if stdin:
    text += f"\n```sh\n{stdin}\n```"
  return text


# Functions called by name in the tag `tool`.


@dataclasses.dataclass(frozen=True)
class FunctionCall:
  """A `tool` span's request: a function's name, and its arguments."""

  name: str
  arguments: Mapping[str, Any]


FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)  # MCP's names too


def parse_function_call(content: str) -> FunctionCall | None:
  """Reads a `tool` span: one JSON object with a `name` and an object `arguments`.

  Returns None for any other content.
  """
  return _function_call(_read_json(content.strip(WHITE)))  # wider than JSON's


def parse_function_calls(content: str) -> list[FunctionCall] | None:
  """Reads a `tool` span with a call or a JSON list of calls; None for other content."""
  value = _read_json(content.strip(WHITE))
  if isinstance(value, dict):
    value = [value]
  if not isinstance(value, list) or not value:
    return None
  calls = [call for item in value if (call := _function_call(item))]
  return calls if len(calls) == len(value) else None


def _function_call(value: Any) -> FunctionCall | None:
  if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
    return None
  name = value["name"]
  arguments = value["arguments"]
  if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
    return None
  if not isinstance(arguments, dict):
    return None
  return FunctionCall(name, arguments)


def render_function_call(name: str, arguments: Mapping[str, Any]) -> str:
  """Writes a `tool` span's content; `parse_function_call` reads it back."""
  return _json({"name": name, "arguments": dict(arguments)})


def number_results(results: Iterable[str]) -> str:
  """Writes the observation of a span with several calls; results in call order."""
  return "\n".join(f"{n}. {text}" for n, text in enumerate(results, 1))


# Questions about an image.

_JSON_FENCE = re.compile(r"\s*```json[ \t]*\n(.*?)\n?```\s*", re.DOTALL | re.ASCII)


def parse_image_request(content: str) -> dict[str, Any] | None:
  """Reads a `visual_inspector` span: one `json` fence, an object with a file_path.

  Returns None for any other content.
  """
  value = _read_json(_unfence_json(content) or "")
  if not isinstance(value, dict) or not isinstance(value.get("file_path"), str):
    return None
  return value


def render_image_request(request: Mapping[str, Any]) -> str:
  """Writes a `visual_inspector` span's content."""
  return f"```json\n{_json(dict(request))}\n```"


def _unfence_json(body: str) -> str | None:
  match = _JSON_FENCE.fullmatch(_unix_lines(body))
  return match[1] if match else None


def _fence_json(text: str) -> str | None:
  text = text.strip()
  body = f"```json\n{text}\n```"
  # Content that could not be read back is not written.
  if not text or _unfence_json(body) != text:
    return None
  return body


# Other ways to write a body.


@dataclasses.dataclass(frozen=True)
class ArgumentFormat:
  """One way to write a tool's arguments.

  Attributes:
    description: its description in the prompt, after "write".
    write: the protocol's body -> the same in this format; None if impossible.
    read: text in this format -> the protocol's body; None for another format.
  """

  description: str
  write: Callable[[str], str | None]
  read: Callable[[str], str | None]


def unchanged(description: str) -> ArgumentFormat:
  """The protocol's own body."""
  return ArgumentFormat(description, lambda body: body, lambda text: text)


def after_prefix(prefix: str, description: str) -> ArgumentFormat:
  """The body after a prefix word."""

  def read(text: str) -> str | None:
    head, separator, body = text.partition(prefix)
    if not separator or head.strip():
      return None
    return body.removeprefix(" ")

  return ArgumentFormat(description, lambda body: f"{prefix} {body}", read)


def json_field(key: str) -> ArgumentFormat:
  """The body under a JSON object's only key."""

  def read(text: str) -> str | None:
    row = _read_texts(text, key)
    if row is None:
      return None
    return row[key]

  return ArgumentFormat(
    f"a JSON object with {key}", lambda body: _json({key: body}), read
  )


def _read_texts(text: str, *keys: str) -> dict[str, str] | None:
  """Reads a JSON object with texts under exactly these keys; None for anything else."""
  row = _read_json(text)
  if not isinstance(row, dict) or set(row) != set(keys):
    return None
  if not all(isinstance(v, str) for v in row.values()):
    return None
  return row


def code_fences(fence: str) -> ArgumentFormat:
  """A program in a code block with another language name."""

  def write(body: str) -> str | None:
    call = parse_code(body)
    if call is None:
      return None
    return f"```{fence}" + render_code(call.program, call.stdin).removeprefix("```py")

  def read(text: str) -> str | None:
    head, opening, rest = _unix_lines(text).partition(f"```{fence}\n")
    body = f"```py\n{rest}"
    if not opening or head.strip() or parse_code(body) is None:
      return None
    return body

  description = (
    f"one ```{fence} block, then, if it reads standard input, one ```sh block"
  )
  return ArgumentFormat(description, write, read)


def bare_program() -> ArgumentFormat:
  """A program without fences, and so without standard input."""

  def write(body: str) -> str | None:
    call = parse_code(body)
    if call is None or call.stdin:
      return None
    return call.program

  return ArgumentFormat("the program and nothing else", write, _code_body)


def code_object(program: str, stdin: str) -> ArgumentFormat:
  """A JSON object with a program and its standard input under these keys."""

  def write(body: str) -> str | None:
    call = parse_code(body)
    if call is None:
      return None
    return _json({program: call.program, stdin: call.stdin})

  def read(text: str) -> str | None:
    row = _read_texts(text, program, stdin)
    if row is None:
      return None
    return _code_body(row[program], row[stdin])

  return ArgumentFormat(f"a JSON object with {program} and {stdin}", write, read)


def _code_body(program: str, stdin: str = "") -> str | None:
  """Writes a program in the protocol's format; None if it could not be read back."""
  body = render_code(program, stdin)
  if parse_code(body) != CodeCall(program, stdin):
    return None
  return body


def image_block() -> ArgumentFormat:
  """The protocol's own block; any other text is refused."""

  def read(text: str) -> str | None:
    if parse_image_request(text) is None:
      return None
    return text

  description = "a ```json block with file_path and question"
  return ArgumentFormat(description, lambda body: body, read)


def image_object() -> ArgumentFormat:
  """The JSON object in the protocol's block, without the fence."""
  description = "a JSON object with file_path and question"
  return ArgumentFormat(description, _unfence_json, _fence_json)


def function_object(name: str, arguments: str) -> ArgumentFormat:
  """A function call as a JSON object with other keys."""

  def write(body: str) -> str | None:
    call = parse_function_call(body)
    if call is None:
      return None
    return _json({name: call.name, arguments: call.arguments})

  def read(text: str) -> str | None:
    row = _read_json(text)
    if not isinstance(row, dict) or set(row) != {name, arguments}:
      return None
    body = _json({"name": row[name], "arguments": row[arguments]})
    if parse_function_call(body) is None:
      return None
    return body

  description = f"a JSON object with {name}, what the tool is called, and {arguments}"
  return ArgumentFormat(description, write, read)
