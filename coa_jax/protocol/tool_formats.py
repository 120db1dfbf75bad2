"""Tool formats: what tools are called, and how a prompt says they are written to.

A model trained on one tool format breaks on another; the paper names it as its own
limitation (arXiv 2508.13167: models trained on web tools fail on the exact fences of
code). `STYLES` are the formats that trajectories may be restyled to for training,
`HELD_OUT` those that no training ever sees: what is measured on them is how a model
reads its prompt.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from coa_jax.protocol import function_calls, roles
from coa_jax.protocol.roles import Variant


@dataclasses.dataclass(frozen=True)
class Layout:
  """One way to write a tool's arguments.

  Attributes:
    told: how the prompt says it, after "write".
    write: the protocol's body -> this layout's; None where it cannot hold the body.
    read: this layout's body -> the protocol's; None where it is not in this layout.
  """

  told: str
  write: Callable[[str], str | None]
  read: Callable[[str], str | None]


def _same(body: str) -> str:
  return body


def _after(prefix: str, told: str) -> Layout:
  """The body after a word that stands before it."""

  def read(text: str) -> str | None:
    head, found, body = text.partition(prefix)
    return body.removeprefix(" ") if found and not head.strip() else None

  return Layout(told, lambda body: f"{prefix} {body}", read)


def _between(opening: str, closing: str, told: str) -> Layout:
  """The body between two marks."""

  def read(text: str) -> str | None:
    text = text.strip()
    inside = text.startswith(opening) and text.endswith(closing)
    long = len(text) >= len(opening) + len(closing)
    return text[len(opening) : len(text) - len(closing)] if inside and long else None

  return Layout(told, lambda body: f"{opening}{body}{closing}", read)


def _row(text: str, *keys: str) -> dict[str, str] | None:
  """A JSON object of texts under just these keys."""
  try:
    row = json.loads(text)
  except (ValueError, RecursionError):
    return None
  whole = isinstance(row, dict) and set(row) == set(keys)
  return row if whole and all(isinstance(v, str) for v in row.values()) else None


def _json(key: str) -> Layout:
  def read(text: str) -> str | None:
    row = _row(text, key)
    return row[key] if row else None

  told = f"a JSON object with {key}"
  return Layout(told, lambda body: json.dumps({key: body}), read)


def _fenced(fence: str) -> Layout:
  told = f"one ```{fence} block, then, if it reads standard input, one ```sh block"

  def write(body: str) -> str | None:
    call = roles.parse_code(body)
    text = roles.render_code(call.program, call.stdin) if call else None
    return f"```{fence}" + text.removeprefix("```py") if text else None

  def read(text: str) -> str | None:
    head, found, rest = text.partition(f"```{fence}\n")
    body = f"```py\n{rest}"
    whole = found and not head.strip() and roles.parse_code(body)
    return body if whole else None

  return Layout(told, write, read)


def _bare(body: str) -> str | None:
  call = roles.parse_code(body)
  return None if call is None or call.stdin else call.program


def _program(text: str, stdin: str = "") -> str | None:
  """The protocol's body of a program; None where it could not be read back."""
  body = roles.render_code(text, stdin)
  return body if roles.parse_code(body) == roles.CodeCall(text, stdin) else None


def _code_object(program: str, stdin: str) -> Layout:
  def write(body: str) -> str | None:
    call = roles.parse_code(body)
    return json.dumps({program: call.program, stdin: call.stdin}) if call else None

  def read(text: str) -> str | None:
    row = _row(text, program, stdin)
    return _program(row[program], row[stdin]) if row else None

  return Layout(f"a JSON object with {program} and {stdin}", write, read)


_FENCE = re.compile(r"\s*```json[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


def _unfenced(body: str) -> str | None:
  match = _FENCE.fullmatch(body)
  return match[1] if match else None


def _fence(text: str) -> str | None:
  body = f"```json\n{text.strip()}\n```"
  return body if _unfenced(body) == text.strip() and text.strip() else None


def _image_lines(body: str) -> str | None:
  row = _image(body)
  named = row is not None and set(row) <= {"file_path", "question"}
  texts = named and all(isinstance(v, str) and "\n" not in v for v in row.values())
  return f"{row['file_path']}\n{row.get('question', '')}" if texts else None


def _image_of_lines(text: str) -> str | None:
  path, _, question = text.strip("\n").partition("\n")
  row = {"file_path": path, **({"question": question} if question else {})}
  return _fence(json.dumps(row)) if path.strip() and "\n" not in question else None


def _image(body: str) -> dict[str, Any] | None:
  try:
    row = json.loads(_unfenced(body) or "")
  except (ValueError, RecursionError):
    return None
  return row if isinstance(row, dict) and "file_path" in row else None


def _named(tool: str, arguments: str) -> Layout:
  def write(body: str) -> str | None:
    call = function_calls.parse(body)
    return json.dumps({tool: call.name, arguments: call.arguments}) if call else None

  def read(text: str) -> str | None:
    try:
      row = json.loads(text)
    except (ValueError, RecursionError):
      return None
    if not isinstance(row, dict) or set(row) != {tool, arguments}:
      return None
    body = json.dumps({"name": row[tool], "arguments": row[arguments]})
    return body if function_calls.parse(body) else None

  told = f"a JSON object with {tool}, what the tool is called, and {arguments}"
  return Layout(told, write, read)


_PLAIN = Layout("the query", _same, _same)
_NAMED = _after("query:", "query: and what you look for")
_QUERIES = (_PLAIN, _NAMED, _json("query"))
_IMAGE = "with file_path and question"
# Names, what it may be said to do, layouts.
Styles = tuple[tuple[str, ...], tuple[str, ...], tuple[Layout, ...]]
# Tag -> what it may be called, what it may be said to do, how it may be written to.
STYLES: Mapping[str, Styles] = {
  "wiki_search": (
    ("wiki_search", "encyclopedia", "lookup", "find_article"),
    ("search an encyclopaedia", "find what an encyclopaedia says"),
    _QUERIES,
  ),
  "web_search": (
    ("web_search", "google", "search_engine", "internet"),
    ("search the web", "ask a search engine"),
    _QUERIES,
  ),
  "crawl_page": (
    ("crawl_page", "browse", "read_url", "open_page"),
    ("read web pages", "open pages and read them"),
    (
      Layout("URLs, separated by |, and what you look for", _same, _same),
      _json("pages"),
    ),
  ),
  "code": (
    ("code", "python", "run_program", "interpreter"),
    ("run a Python program and read what it prints", "execute Python"),
    (
      _fenced("py"),
      _fenced("python"),
      Layout("the program and nothing else", _bare, _program),
      _code_object("program", "stdin"),
    ),
  ),
  "visual_inspector": (
    ("visual_inspector", "look", "image_reader"),
    ("ask about an image", "look at an image"),
    (
      Layout(f"a ```json block {_IMAGE}", _same, lambda t: t if _image(t) else None),
      Layout(f"a JSON object {_IMAGE}", _unfenced, _fence),
    ),
  ),
  "tool": (
    ("tool", "call_tool", "use_tool"),
    ("call another tool by its name", "use one of the tools listed below"),
    (_named("name", "arguments"), _named("tool", "input")),
  ),
}
_HELD_QUERIES = (
  _between("[[", "]]", "what you look for between [[ and ]]"),
  _after("look for =", "look for = and what you want to know"),
  _json("search_terms"),
)
HELD_OUT: Mapping[str, Styles] = {
  "wiki_search": (
    ("consult", "reference_work", "ask_library"),
    ("consult a reference work", "ask a library"),
    _HELD_QUERIES,
  ),
  "web_search": (
    ("net_lookup", "query_web", "seek_online"),
    ("look something up online", "query the web"),
    _HELD_QUERIES,
  ),
  "crawl_page": (
    ("fetch_document", "view_site", "load_address"),
    ("fetch documents of the web", "load sites"),
    (
      _between("[[", "]]", "addresses, separated by |, between [[ and ]]"),
      _json("addresses"),
    ),
  ),
  "code": (
    ("compute", "execute_script", "calculator"),
    ("have a script executed and see its output", "compute something in Python 3"),
    (
      _fenced("python3"),
      _fenced("script"),
      _code_object("source", "input"),
    ),
  ),
  "visual_inspector": (
    ("examine_picture", "see_file"),
    ("have a picture examined", "see what a file shows"),
    (
      Layout(
        "the path on one line and the question on the next",
        _image_lines,
        _image_of_lines,
      ),
    ),
  ),
  "tool": (
    ("invoke", "apply_function"),
    ("have a function called", "invoke what is named"),
    (_named("function", "parameters"),),
  ),
}


@dataclasses.dataclass(frozen=True)
class Format:
  """What the tools of one run are called and how they are written to.

  Attributes:
    names: tag -> what it is called.
    layouts: tag -> how it is written to.
    does: tag -> what the prompt says that it does.
  """

  names: Mapping[str, str]
  layouts: Mapping[str, Layout]
  does: Mapping[str, str]

  @property
  def told(self) -> dict[str, list[str]]:
    """Tag -> its name and layout in words, for a record."""
    return {tag: [name, self.layouts[tag].told] for tag, name in self.names.items()}

  def variant(self, variant: Variant) -> Variant:
    """The variant with its tools called and told so."""
    names = self.names
    told = {
      names[tag]: f"{self.does[tag]}; write {self.layouts[tag].told}" for tag in names
    }

    def all_of(tags: frozenset[str]) -> frozenset[str]:
      return frozenset(names.get(t, t) for t in tags)

    return dataclasses.replace(
      variant,
      tools=tuple(names[t] for t in variant.tools),
      follows={names.get(k, k): all_of(v) for k, v in variant.follows.items()},
      think_required=all_of(variant.think_required),
      think_allowed=all_of(variant.think_allowed),
      told=told,
    )

  def read(self, name: str, text: str) -> tuple[str, str | None]:
    """The tag of a tool by its name, and the protocol's body of what was written to it.

    The body is None where the text is not in the tool's layout.

    Raises:
      KeyError: no tool is called so.
    """
    tag = next((tag for tag, called in self.names.items() if called == name), None)
    if tag is None:
      raise KeyError(name)
    return tag, self.layouts[tag].read(text)


def draw_format(
  variant: Variant,
  rng: random.Random,
  styles: Mapping[str, Styles] = STYLES,
  bodies: Mapping[str, list[str]] | None = None,
) -> Format | None:
  """A format for each of the variant's tools.

  Args:
    variant: with the tools of the run.
    rng: what is drawn from.
    styles: what is drawn: `STYLES` or `HELD_OUT`.
    bodies: tag -> what its layout must be able to hold.

  Returns:
    The format; None where no layout can hold what it must.
  """
  names: dict[str, str] = {}
  layouts: dict[str, Layout] = {}
  does: dict[str, str] = {}
  for tag in variant.tools:
    called, said, written = styles[tag]
    held = (bodies or {}).get(tag, [])
    able = [x for x in written if all(x.write(body) is not None for body in held)]
    if not able:
      return None
    names[tag], layouts[tag] = rng.choice(called), rng.choice(able)
    does[tag] = rng.choice(said)
  return Format(names, layouts, does)
