"""The format of each agent's reply, and its parser.

`prompts` asks for these formats. A reply in another format is malformed, never guessed
at: the agent gets a message with the expected format and is asked once more.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from coa_jax.data.teacher import runs
from coa_jax.protocol import roles, tool_bodies

_NEXT = re.compile(r"^\s*NEXT:\s*(\w+)", re.MULTILINE)
_REASON = re.compile(r"^\s*REASON:\s*(.*)", re.MULTILINE | re.DOTALL)
_TOOL = re.compile(r"^\s*TOOL:\s*(\w+)", re.MULTILINE)
_QUERY = re.compile(r"^\s*QUERY:\s*(.*)", re.MULTILINE | re.DOTALL)
_LINES = re.compile(r"^\s*(TOOL|QUERY):", re.MULTILINE)
_ANSWER = re.compile(r"^\s*ANSWER:\s*(.*)", re.MULTILINE | re.DOTALL)
_SCORE = re.compile(r"^\s*SCORE:\s*([1-4])(?!\d|\.\d)", re.MULTILINE)
_WHY = re.compile(r"^\s*WHY:\s*(.*)", re.MULTILINE | re.DOTALL)
_FACTS_AND_PLAN = re.compile(
  r"^\s*FACTS:\s*(?P<facts>\S.*?)^\s*PLAN:\s*(?P<plan>\S.*)", re.MULTILINE | re.DOTALL
)
_FENCES = re.compile(r"```.*```", re.DOTALL)


class MalformedReply(Exception):
  """An unusable reply; the message tells the agent the expected format."""


@dataclasses.dataclass(frozen=True)
class Parsed:
  """A parsed reply: its event's kind, content and detail, and what comes with it.

  That is a planner's facts, or the (tool, query) of each further call.
  """

  kind: str
  content: str
  detail: str = ""
  facts: str = ""
  more: tuple[tuple[str, str], ...] = ()


def read_reply(
  agent: str,
  text: str,
  legal: Collection[str],
  tools: Sequence[str],
  review: str,
  facts: bool,
  most: int | None = None,
) -> Parsed:
  """Parses a reply from one of the agents in `runs`.

  `legal` are the orchestrator's choices; `review` and `facts` are as in
  `agents.TeamConfig`; `most` is the maximum number of calls in the search agent's
  reply, None if a reply is one call.

  Raises:
    MalformedReply: the reply does not have the format in the agent's prompt.
  """
  # --- Agents with their own reply format: lines or a block.
  if agent == runs.ORCHESTRATOR:
    following = _field(_NEXT, text, "a line 'NEXT: <agent>'").lower()
    if following not in legal:
      raise MalformedReply(f"NEXT must be one of {', '.join(legal)}")
    return Parsed(runs.DECISION, _optional(_REASON, text), following)
  if agent == runs.SEARCH:
    own = [tool for tool in tools if tool != runs.CODE]
    return _search_call(text, own) if most is None else _calls(text, own, most)
  if agent == runs.CODE:
    # From the first fence to the last: prose around them is not part of the call.
    fences = _FENCES.search(text)
    call = None
    if fences:
      call = tool_bodies.parse_code(fences[0])
    if call is None:
      raise MalformedReply("expected one ```py block, then at most one ```sh block")
    return Parsed(
      runs.CALL, tool_bodies.render_code(call.program, call.stdin), runs.CODE
    )
  if agent == runs.SOLVER:
    return Parsed(runs.CANDIDATE, _field(_ANSWER, text, "a line 'ANSWER: <answer>'"))
  if agent == runs.VERIFIER:
    score = _field(_SCORE, text, "a line 'SCORE: <1-4>'")
    return Parsed(runs.VERDICT, _optional(_WHY, text), score)
  # --- Agents with prose replies.
  if not text.strip():
    raise MalformedReply("the reply was empty")
  if agent == runs.PLANNER:
    return _plan(text, facts)
  if agent == runs.REFLECTOR and review != "facts":
    _check_review(text, review)
  return Parsed(runs.REFLECTION, text.strip())


def _search_call(text: str, tools: Sequence[str]) -> Parsed:
  name = _TOOL.search(text)
  tool = tools[0]  # one tool needs no name
  if name:
    tool = name[1]
  if tool not in tools:
    raise MalformedReply(f"TOOL must be one of {', '.join(tools)}")
  return Parsed(runs.CALL, _field(_QUERY, text, "a line 'QUERY: <query>'"), tool)


def _calls(text: str, tools: Sequence[str], most: int) -> Parsed:
  """Reads one or several calls; a query without a line TOOL has the last one's tool."""
  name = tools[0]
  calls = []
  _, *parts = _LINES.split(text)
  for key, value in zip(parts[::2], parts[1::2], strict=True):
    if key == "TOOL":
      name = value
    else:
      call = _search_call(f"TOOL: {name}\nQUERY: {value}", tools)
      calls.append((call.detail, call.content))
  if not calls:
    raise MalformedReply("expected a line 'QUERY: <query>'")
  if len(calls) > most:
    raise MalformedReply(f"at most {most} calls at once")
  if len(set(calls)) < len(calls):
    raise MalformedReply("one call is there twice")
  tool, query = calls[0]
  return Parsed(runs.CALL, query, tool, more=tuple(calls[1:]))


def _plan(text: str, facts: bool) -> Parsed:
  if not facts:
    return Parsed(runs.PLAN, text.strip())
  match = _FACTS_AND_PLAN.search(text)
  if match is None:
    raise MalformedReply("expected a line 'FACTS: <facts>', then a line 'PLAN: <plan>'")
  return Parsed(runs.PLAN, match["plan"].strip(), facts=match["facts"].strip())


def _check_review(text: str, review: str) -> None:
  """Refuses a review without analysis or, if required, grades."""
  *analysis, outcome = text.strip().splitlines()
  if not analysis:
    raise MalformedReply("expected an analysis, then the outcome on a line of its own")
  missing = set(roles.CRITERIA) - set(roles.reflection_grades(outcome))
  if review == "grades" and missing:
    raise MalformedReply(
      f"the last line lacks a grade for {', '.join(sorted(missing))}"
    )


def _field(pattern: re.Pattern[str], text: str, expected: str) -> str:
  match = pattern.search(text)
  if match is None or not match[1].strip():
    raise MalformedReply(f"expected {expected}")
  return match[1].strip()


def _optional(pattern: re.Pattern[str], text: str) -> str:
  match = pattern.search(text)
  return match[1].strip() if match else ""
