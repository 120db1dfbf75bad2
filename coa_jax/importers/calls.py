"""Tool calls of other systems as this protocol's: names by a table, bodies by the tag.

A call elsewhere is a name and named arguments; here it is a tag and one body of text.
What the body has no place for is reported, never dropped in silence.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from coa_jax.importers.row import Refused
from coa_jax.protocol import function_calls, roles

# Their name, lower case -> our tag. `answer` and `suggested_answer` are no tools here,
# but in OAgents a candidate and the end are calls (arXiv 2508.13167).
TOOLS: Mapping[str, str] = {
  **dict.fromkeys(
    ("web_search", "google_search", "bing_search", "baidu_search", "duckduckgo_search",
     "search", "google", "websearch", "internet_search"),
    "web_search",
  ),
  **dict.fromkeys(("wiki_search", "wikipedia_search", "wikipedia"), "wiki_search"),
  **dict.fromkeys(
    ("crawl_page", "crawl_pages", "visit_webpage", "visit_page", "visit", "open_url",
     "fetch_url", "browse"),
    "crawl_page",
  ),
  **dict.fromkeys(
    ("code", "python_interpreter", "python", "code_interpreter", "execute_code",
     "run_python", "ipython"),
    "code",
  ),
  **dict.fromkeys(
    ("visual_inspector", "inspect_file_as_image", "visualizer", "image_inspector"),
    "visual_inspector",
  ),
  **dict.fromkeys(("final_answer", "finish", "answer", "submit"), roles.ANSWER),
  "suggested_answer": roles.SUGGESTED_ANSWER,
}  # fmt: skip

_TEXT = ("query", "q", "search_query", "question", "keyword", "input", "text")
_URLS = ("urls", "url", "links", "link", "page")
_PROGRAM = ("code", "program", "source", "script", "input")
_IMAGE = ("file_path", "image_path", "path", "image", "url")
_ASKED = ("question", "query", "prompt")
_ANSWER = ("answer", "final_answer", "result", "output", "text")
_FIRST = {
  "wiki_search": _TEXT,
  "web_search": _TEXT,
  "crawl_page": _URLS,
  "code": _PROGRAM,
  "visual_inspector": _IMAGE,
  roles.ANSWER: _ANSWER,
  roles.SUGGESTED_ANSWER: _ANSWER,
}


@dataclasses.dataclass(frozen=True)
class Call:
  """A call in this protocol's terms.

  Attributes:
    tag: a tool's tag, or `answer` or `suggested_answer`.
    body: what stands in the span.
    lost: arguments that the body has no place for, as `name=value`.
  """

  tag: str
  body: str
  lost: tuple[str, ...] = ()


def translate(name: str, arguments: Any, table: Mapping[str, str]) -> Call:
  """One call in this protocol's terms.

  Args:
    name: what they call the tool; case does not count.
    arguments: an object, a JSON string of one, or a plain string.
    table: names beyond `TOOLS`, or in place of its; lower case.

  Raises:
    Refused: no table has the name, or the arguments hold no body for the tag.
  """
  tag = table.get(name.lower()) or TOOLS.get(name.lower())
  if tag is None:
    raise Refused(
      "unknown_tool", f"no tag for the tool {name!r}; name one with --tools"
    )
  named = _named(arguments)
  if tag == roles.TOOL:  # as it is: its own name, its own arguments
    if named is None or not function_calls.NAME.fullmatch(name):
      raise Refused("bad_arguments", f"{name}: {arguments!r:.80}")
    return Call(tag, function_calls.render(name, named))
  if named is None:
    if not isinstance(arguments, str):
      raise Refused("bad_arguments", f"{name}: {arguments!r:.80}")
    named = {_FIRST[tag][0]: arguments}
  used, value = _first(named, _FIRST[tag])
  if used is None and len(named) == 1:
    ((used, value),) = named.items()
  if used is None:
    raise Refused("bad_arguments", f"{name}: none of {', '.join(_FIRST[tag])} is given")
  body, also = _body(tag, value, {k: v for k, v in named.items() if k != used})
  if body is None:
    raise Refused("bad_arguments", f"{name}: {used} is {value!r:.80}")
  lost = tuple(
    f"{k}={v!r:.80}"
    for k, v in named.items()
    if k not in {used, *also} and v not in (None, "", [], {})
  )
  return Call(tag, body, lost)


def _named(arguments: Any) -> dict[str, Any] | None:
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except (ValueError, RecursionError):
      return None
  return arguments if isinstance(arguments, dict) else None


def _first(named: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str | None, Any]:
  for key in keys:
    if named.get(key) is not None:
      return key, named[key]
  return None, None


def _body(
  tag: str, value: Any, others: Mapping[str, Any]
) -> tuple[str | None, tuple[str, ...]]:
  """What stands in the span, None where nothing can; and the others it holds too."""
  if tag == "crawl_page" and isinstance(value, list):
    urls = [u for u in value if isinstance(u, str)]
    return (" | ".join(urls) if urls and len(urls) == len(value) else None), ()
  if tag in (roles.ANSWER, roles.SUGGESTED_ANSWER) and value is not None:
    return (value if isinstance(value, str) else json.dumps(value)), ()
  if not isinstance(value, str):
    return None, ()
  if tag == "code":
    stdin = others.get("stdin")
    if stdin is None and roles.parse_code(value) is not None:
      return value, ()
    if stdin is not None and not isinstance(stdin, str):
      return None, ()
    return roles.render_code(value, stdin or ""), ("stdin",)
  if tag == "visual_inspector":
    asked, question = _first(others, _ASKED)
    row = {"file_path": value, **({"question": question} if asked else {})}
    return f"```json\n{json.dumps(row)}\n```", (asked,) if asked else ()
  return value, ()
