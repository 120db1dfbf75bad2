"""The same trajectory under other tool names, layouts of arguments and descriptions.

A model trained on one tool format breaks on another; the paper names it as its own
limitation (arXiv 2508.13167: models trained on web tools fail on the exact fences of
code). A restyled copy says in its prompt what its tools are called and how they are
written to, and is consistent with it; roles, order and observations stay.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coa_jax.protocol import roles
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Segment, Trajectory


@dataclasses.dataclass(frozen=True)
class FormatsConfig:
  """Config section `formats`.

  Attributes:
    copies: restyled copies of every trajectory, beside itself.
    seed: of what is drawn.
  """

  copies: int = 0
  seed: int = 0

  def __post_init__(self):
    if self.copies < 0:
      raise ValueError("copies must be at least 0")


@dataclasses.dataclass(frozen=True)
class Layout:
  """One way to write a tool's arguments.

  Attributes:
    told: how the prompt says it, after "write".
    write: the protocol's body -> this layout's; None where it cannot hold the body.
  """

  told: str
  write: Callable[[str], str | None]


def _json(key: str) -> Layout:
  return Layout(f"a JSON object with {key}", lambda body: json.dumps({key: body}))


def _fenced(fence: str) -> Layout:
  told = f"one ```{fence} block, then, if it reads standard input, one ```sh block"

  def write(body: str) -> str | None:
    call = roles.parse_code(body)
    text = roles.render_code(call.program, call.stdin) if call else None
    return f"```{fence}" + text.removeprefix("```py") if text else None

  return Layout(told, write)


def _bare(body: str) -> str | None:
  call = roles.parse_code(body)
  return None if call is None or call.stdin else call.program


def _object(body: str) -> str | None:
  call = roles.parse_code(body)
  if call is None:
    return None
  return json.dumps({"program": call.program, "stdin": call.stdin})


_FENCE = re.compile(r"\s*```json[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


def _unfenced(body: str) -> str | None:
  match = _FENCE.fullmatch(body)
  return match[1] if match else None


_PLAIN = Layout("the query", lambda body: body)
_NAMED = Layout("query: and what you look for", lambda body: f"query: {body}")
_QUERIES = (_PLAIN, _NAMED, _json("query"))
_IMAGE = "with file_path and question"
# Tag -> what it may be called, what it may be said to do, how it may be written to.
STYLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[Layout, ...]]] = {
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
      Layout("URLs, separated by |, and what you look for", lambda body: body),
      _json("pages"),
    ),
  ),
  "code": (
    ("code", "python", "run_program", "interpreter"),
    ("run a Python program and read what it prints", "execute Python"),
    (
      _fenced("py"),
      _fenced("python"),
      Layout("the program and nothing else", _bare),
      Layout("a JSON object with program and stdin", _object),
    ),
  ),
  "visual_inspector": (
    ("visual_inspector", "look", "image_reader"),
    ("ask about an image", "look at an image"),
    (
      Layout(f"a ```json block {_IMAGE}", lambda body: body),
      Layout(f"a JSON object {_IMAGE}", _unfenced),
    ),
  ),
}


def restyle(
  trajectory: Trajectory, variant: Variant, number: int, seed: int
) -> tuple[Trajectory, Variant] | None:
  """One restyled copy.

  Args:
    trajectory: with `meta["question"]`; left as it is.
    variant: its dialect, with the tools of its prompt.
    number: which copy; each draws anew.
    seed: of the draw, which depends on nothing else but the trajectory's name.

  Returns:
    The copy, without ids, its prompt the full one, with `meta["format"]` (tag -> name
    and layout) and `meta["copy"]`; and its variant, in which it is well formed if it
    was. None where no layout can hold a call, or a call is not one span.
  """
  rng = random.Random(f"{seed}/{trajectory.task_id}/{trajectory.sample}/{number}")
  names: dict[str, str] = {}
  layouts: dict[str, Layout] = {}
  told: dict[str, str] = {}
  for tag in variant.tools:
    bodies = [c.arguments for c in trajectory.calls if c.name == tag]
    called, does, written = STYLES[tag]
    able = [x for x in written if all(x.write(body) is not None for body in bodies)]
    if not able:
      return None
    names[tag], layouts[tag] = rng.choice(called), rng.choice(able)
    told[names[tag]] = f"{rng.choice(does)}; write {layouts[tag].told}"
  other = _renamed(variant, names, told)
  segments = prompt_segments(other, str(trajectory.meta.get("question", "")), "full")
  for s in trajectory.segments:
    if s.author == Author.PROMPT:
      continue
    text, role = s.text, s.role
    if s.author == Author.POLICY and role in names:
      rewritten = _span(text, role, names[role], layouts[role])
      if rewritten is None:
        return None
      text, role = rewritten, names[role]
    segments.append(Segment(s.author, role, text))
  calls = [
    dataclasses.replace(
      c, name=names[c.name], arguments=layouts[c.name].write(c.arguments) or ""
    )
    if c.name in names
    else c
    for c in trajectory.calls
  ]
  drawn = {tag: [names[tag], layouts[tag].told] for tag in names}
  meta: dict[str, Any] = {**trajectory.meta, "format": drawn, "copy": number}
  copy = dataclasses.replace(trajectory, segments=segments, calls=calls, meta=meta)
  return copy, other


def restyled_copies(
  kept: Iterable[Trajectory], variant: Variant, config: FormatsConfig
) -> list[Trajectory]:
  """`config.copies` restyled copies of each that is not a second copy itself."""
  out = []
  for t, number in itertools.product(kept, range(1, config.copies + 1)):
    copy = None if "copy" in t.meta else restyle(t, variant, number, config.seed)
    out += [copy[0]] if copy else []
  return out


def _span(text: str, tag: str, name: str, layout: Layout) -> str | None:
  head, opening, rest = text.partition(roles.open_tag(tag))
  content, closing, tail = rest.rpartition(roles.close_tag(tag))
  if not opening or not closing or head.strip() or tail.strip():
    return None
  body = layout.write(content.removeprefix(" "))
  return None if body is None else f"{head}{roles.wrap(name, body)}{tail}"


def _renamed(
  variant: Variant, names: Mapping[str, str], told: Mapping[str, str]
) -> Variant:
  """The variant with its tools called otherwise."""

  def all_of(tags: frozenset[str]) -> frozenset[str]:
    return frozenset(names.get(t, t) for t in tags)

  return dataclasses.replace(
    variant,
    tools=tuple(names[t] for t in variant.tools),
    follows={names.get(k, k): all_of(v) for k, v in variant.follows.items()},
    think_required=all_of(variant.think_required),
    think_allowed=all_of(variant.think_allowed),
    told=dict(told),
  )
