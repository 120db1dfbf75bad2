"""Tools with their own tags, one `SPECS` row each.

A row has the tool's description, allowed content, names in other systems, and names for
augmented training data. Roles, prompts, parser, grammar, tokenizer, importers and tool
naming read it here; a class in `coa_jax/tools/tools.py` answers the tag's calls. Add a
new tool as the last row, so that no other token id moves. See docs/extending.md.

budget: a row and its functions are read together.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coa_jax.protocol import tool_bodies as bodies
from coa_jax.protocol.grammar.regular import (
  ANY,
  DIGITS,
  WHITE,
  WORD,
  Language,
  byte,
  choice,
  filled,
  many,
  maybe,
  row,
  text,
)

# Tools without their own tag share this tag: the body names a function, so a config can
# add functions without a new tag in the vocabulary.
FUNCTION_TAG = "tool"


class TagIds(enum.Enum):
  """The place for a tool's two tags in a vocabulary from `train_tokenizer`."""

  FIRST = "first"  # with the roles' tags, before all bytes and merges: a closed list
  LAST = "last"  # at the end, below the earlier rows' ids
  NONE = "none"  # tags are spelt as text


@dataclasses.dataclass(frozen=True)
class NamingChoices:
  """A tool's choices for `tool_naming`; an empty field means the protocol's own.

  Attributes:
    names: tool names.
    purposes: purposes in the prompt.
    formats: argument formats.
  """

  names: tuple[str, ...] = ()
  purposes: tuple[str, ...] = ()
  formats: tuple[bodies.ArgumentFormat, ...] = ()


def accept_any(content: str) -> str | None:
  """Accepts any non-empty text."""
  del content
  return None


# A call's body, None if impossible; and the names of other arguments in the body.
Body = tuple[str | None, tuple[str, ...]]


def text_body(value: Any, others: Mapping[str, Any]) -> Body:
  """Takes the main argument as the body, if it is text."""
  del others
  if not isinstance(value, str):
    return None, ()
  return value, ()


@dataclasses.dataclass(frozen=True)
class ToolSpec:
  """A tool with its own tag, as the protocol knows it.

  Attributes:
    tag: its spans' tag; lower-case letters and underscores.
    purpose: its purpose in the prompt.
    body: the prompt's description of its content, after "write".
    find_fault: a span's content (not empty) -> its fault, worded for the model; None if
      ok.
    grammar: the valid contents for a constrained policy; takes the variant's function
      names (used by the tag `tool` only). None for any non-empty text.
    tag_ids: the place for its tags' ids.
    aliases: the tool's names in other systems' records, in lower case.
    argument_names: those systems' names for the body argument, the likeliest first.
    body_of_call: the body argument's value, and the call's other arguments -> the body.
    augmentation: its choices for augmented training data.
  """

  tag: str
  purpose: str
  body: str
  find_fault: Callable[[str], str | None] = accept_any
  grammar: Callable[[tuple[str, ...]], Language] | None = None
  tag_ids: TagIds = TagIds.LAST
  aliases: tuple[str, ...] = ()
  argument_names: tuple[str, ...] = ("input", "text")
  body_of_call: Callable[[Any, Mapping[str, Any]], Body] = text_body
  augmentation: NamingChoices = NamingChoices()

  @property
  def description(self) -> str:
    """Its description in the prompt."""
    return f"{self.purpose}; write {self.body}"

  @property
  def choices(self) -> NamingChoices:
    """The names, purposes and formats to draw from, never empty."""
    choices = self.augmentation
    return NamingChoices(
      choices.names or (self.tag,),
      choices.purposes or (self.purpose,),
      choices.formats or (bodies.unchanged(self.body),),
    )


# Searches take a query.

_QUERY_NAMES = ("query", "q", "search_query", "question", "keyword", "input", "text")
_QUERIES = (
  bodies.unchanged("the query"),
  bodies.after_prefix("query:", "query: and what you look for"),
  bodies.json_field("query"),
)


# `crawl_page` takes URLs and a goal.


def _pages_body(value: Any, others: Mapping[str, Any]) -> Body:
  if not isinstance(value, list):
    return text_body(value, others)
  if not value or not all(isinstance(url, str) for url in value):
    return None, ()
  return " | ".join(value), ()


# `code` takes a program in a fence.


def _code_fault(content: str) -> str | None:
  if bodies.parse_code(content) is None:
    return "a code call is one ```py block, then at most one ```sh block, no more"
  return None


def _fenced(name: Language, body: Language) -> Language:
  blanks = many(byte(b" \t"))
  return row(
    text("```"), name, blanks, text("\n"), body, maybe(text("\n")), text("```")
  )


def _code_language(functions: tuple[str, ...]) -> Language:
  """As in `parse_code`: a non-empty program, and maybe standard input."""
  del functions
  white = many(byte(WHITE))
  tick = byte(b"`")
  other = byte(ANY - {ord("`")})
  few = row(maybe(tick), maybe(tick))
  body = row(many(row(few, other)), few)  # never three ticks in a row
  # Any byte except white space, or one or two ticks and their allowed successors.
  ticks = row(tick, maybe(tick))
  program = choice(
    filled(ANY - {ord("`")}, body),
    row(white, ticks, maybe(row(other, body))),
  )
  py = _fenced(choice(text("py"), text("python")), program)
  stdin = row(white, _fenced(text("sh"), body))
  return row(white, py, maybe(stdin), white)


def _code_body(value: Any, others: Mapping[str, Any]) -> Body:
  stdin = others.get("stdin")
  if not isinstance(value, str):
    return None, ()
  # In some systems the argument has the fences: then it already is the body.
  if stdin is None and bodies.parse_code(value) is not None:
    return value, ()
  if stdin is not None and not isinstance(stdin, str):
    return None, ()
  return bodies.render_code(value, stdin or ""), ("stdin",)


# `visual_inspector` takes a path and a question in a JSON block.


def _image_fault(content: str) -> str | None:
  if bodies.parse_image_request(content) is None:
    return "visual_inspector takes a ```json block with a string file_path"
  return None


# Narrower JSON than the parser's: strings have no escapes.
_LETTERS = many(byte(frozenset(range(0x20, 0x7F)) - frozenset(b'"\\')))
_GAP = many(byte(b" "))


def _image_language(functions: tuple[str, ...]) -> Language:
  """A JSON block with a file_path and maybe a question."""
  del functions

  def field(name: str) -> Language:
    return row(text(f'"{name}":'), _GAP, text('"'), _LETTERS, text('"'))

  white = many(byte(WHITE))
  more = maybe(row(text(","), _GAP, field("question")))
  body = row(text("{"), field("file_path"), more, text("}"))
  return row(white, _fenced(text("json"), body), white)


def _image_body(value: Any, others: Mapping[str, Any]) -> Body:
  if not isinstance(value, str):
    return None, ()
  for name in ("question", "query", "prompt"):
    if others.get(name) is not None:
      request = {"file_path": value, "question": others[name]}
      return bodies.render_image_request(request), (name,)
  return bodies.render_image_request({"file_path": value}), ()


# `tool` takes a function's name and its arguments.


def _function_fault(content: str) -> str | None:
  if bodies.parse_function_call(content) is None:
    return 'tool takes {"name": NAME, "arguments": {...}}, no more'
  return None


def _function_language(functions: tuple[str, ...]) -> Language:
  """JSON with a name and flat arguments: strings, integers, booleans."""
  white = many(byte(WHITE))

  # --- The name: a known function's.
  word = byte(frozenset(WORD) | frozenset(b".-"))
  # Without a list, up to eight letters: a longer bound only makes more states.
  name = row(word, *[maybe(word)] * 7)
  if functions:
    name = choice(*map(text, functions))

  # --- Flat fields: an automaton cannot count nested brackets.
  digits = row(byte(frozenset(b"123456789")), many(byte(DIGITS)))
  number = row(maybe(text("-")), choice(text("0"), digits))
  string = row(text('"'), _LETTERS, text('"'))
  value = choice(string, number, text("true"), text("false"))
  field = row(text('"'), _LETTERS, text('":'), _GAP, value)
  fields = maybe(row(field, many(row(text(","), _GAP, field))))

  # --- The object, in the order that `render_function_call` writes.
  head = row(text('{"name":'), _GAP, text('"'), name, text('"'))
  body = row(text(","), _GAP, text('"arguments":'), _GAP, text("{"), fields, text("}}"))
  return row(white, head, body, white)


def parallel_language(functions: tuple[str, ...], most: int) -> Language:
  """A call, or a JSON list of at most `most`."""
  call = _function_language(functions)
  rest = row()
  for _ in range(most - 1):
    rest = maybe(row(text(","), call, rest))
  white = many(byte(WHITE))
  return choice(call, row(white, text("["), call, rest, text("]"), white))


def render_calls(calls: Iterable[tuple[str, str]]) -> str:
  """Writes a `tool` span's content with several calls, each a (tag, span content).

  A tool with its own tag takes the argument `input`. `parse_function_calls` reads the
  content back.
  """
  out = []
  for tag, content in calls:
    if tag == FUNCTION_TAG:
      out.append(json.loads(content))
    else:
      out.append({"name": tag, "arguments": {"input": content}})
  return json.dumps(out, ensure_ascii=False)


# Tag -> its row, in prompt order. Add new rows at the end.
SPECS: dict[str, ToolSpec] = {
  spec.tag: spec
  for spec in (
    ToolSpec(
      tag="wiki_search",
      purpose="search an encyclopaedia",
      body="the query",
      tag_ids=TagIds.FIRST,
      aliases=("wikipedia_search", "wikipedia"),
      argument_names=_QUERY_NAMES,
      augmentation=NamingChoices(
        names=("wiki_search", "encyclopedia", "lookup", "find_article"),
        purposes=("search an encyclopaedia", "find what an encyclopaedia says"),
        formats=_QUERIES,
      ),
    ),
    ToolSpec(
      tag="web_search",
      purpose="search the web",
      body="the query",
      tag_ids=TagIds.FIRST,
      aliases=(
        "google_search",
        "bing_search",
        "baidu_search",
        "duckduckgo_search",
        "search",
        "google",
        "websearch",
        "internet_search",
      ),
      argument_names=_QUERY_NAMES,
      augmentation=NamingChoices(
        names=("web_search", "google", "search_engine", "internet"),
        purposes=("search the web", "ask a search engine"),
        formats=_QUERIES,
      ),
    ),
    ToolSpec(
      tag="crawl_page",
      purpose="read web pages",
      body="URLs, separated by |, and what you look for",
      tag_ids=TagIds.FIRST,
      aliases=(
        "crawl_pages",
        "visit_webpage",
        "visit_page",
        "visit",
        "open_url",
        "fetch_url",
        "browse",
      ),
      argument_names=("urls", "url", "links", "link", "page"),
      body_of_call=_pages_body,
      augmentation=NamingChoices(
        names=("crawl_page", "browse", "read_url", "open_page"),
        purposes=("read web pages", "open pages and read them"),
        formats=(
          bodies.unchanged("URLs, separated by |, and what you look for"),
          bodies.json_field("pages"),
        ),
      ),
    ),
    ToolSpec(
      tag="code",
      purpose="run a Python program and read what it prints",
      body="one ```py block, then, if the program reads standard input, one ```sh "
      "block that holds it",
      find_fault=_code_fault,
      grammar=_code_language,
      tag_ids=TagIds.FIRST,
      aliases=(
        "python_interpreter",
        "python",
        "code_interpreter",
        "execute_code",
        "run_python",
        "ipython",
      ),
      argument_names=("code", "program", "source", "script", "input"),
      body_of_call=_code_body,
      augmentation=NamingChoices(
        names=("code", "python", "run_program", "interpreter"),
        purposes=("run a Python program and read what it prints", "execute Python"),
        formats=(
          bodies.code_fences("py"),
          bodies.code_fences("python"),
          bodies.bare_program(),
          bodies.code_object("program", "stdin"),
        ),
      ),
    ),
    ToolSpec(
      tag="visual_inspector",
      purpose="ask about an image",
      body="a ```json block with file_path and question",
      find_fault=_image_fault,
      grammar=_image_language,
      tag_ids=TagIds.FIRST,
      aliases=("inspect_file_as_image", "visualizer", "image_inspector"),
      argument_names=("file_path", "image_path", "path", "image", "url"),
      body_of_call=_image_body,
      augmentation=NamingChoices(
        names=("visual_inspector", "look", "image_reader"),
        purposes=("ask about an image", "look at an image"),
        formats=(bodies.image_block(), bodies.image_object()),
      ),
    ),
    ToolSpec(
      tag=FUNCTION_TAG,
      purpose="call a tool by its name",
      body='{"name": NAME, "arguments": {...}}',
      find_fault=_function_fault,
      grammar=_function_language,
      tag_ids=TagIds.NONE,
      augmentation=NamingChoices(
        names=("tool", "call_tool", "use_tool"),
        purposes=(
          "call another tool by its name",
          "use one of the tools listed below",
        ),
        formats=(
          bodies.function_object("name", "arguments"),
          bodies.function_object("tool", "input"),
        ),
      ),
    ),
  )
}
