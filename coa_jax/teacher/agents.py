"""A multi-agent team: agents with their own prompts and contexts, exchanging messages.

An orchestrator reads the shared history and names the next agent. A planner lists the
facts and plans, a search agent and a code agent call tools, a reflector reviews what
came back, a solver proposes an answer and a verifier scores it 1 to 4. Every agent
keeps a conversation of its own, to which it is told only the kinds of events it needs
(`SEES`), so a team pays for its context again at every call: that cost is metered here.

A malformed reply is asked for once more, then recorded and worked around; a run ends
with a status, never with a crash.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence

from coa_jax.protocol import roles, tool_bodies
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall, Usage
from coa_jax.tasks.task import Task
from coa_jax.teacher.llm import Brain, GaveUp, InfrastructureError, Message, Reply
from coa_jax.teacher.prompts import PLANNING, PROMPTS, REVIEWS, SEES
from coa_jax.teacher.runs import (
  CALL,
  CANDIDATE,
  CODE,
  DECISION,
  FACTS,
  FINAL,
  GAVE_UP,
  MALFORMED,
  OBSERVATION,
  ORCHESTRATOR,
  PLAN,
  PLANNER,
  REFLECTION,
  REFLECTOR,
  SEARCH,
  SOLVER,
  VERDICT,
  VERIFIER,
  Encode,
  Event,
  Meter,
  Run,
  render,
)

CallTool = Callable[[str, str], ToolCall]


@dataclasses.dataclass(frozen=True)
class TeamConfig:
  """Limits of one run.

  Attributes:
    max_turns: decisions of the orchestrator.
    max_calls: tool calls; when they are spent the team has to answer.
    max_checks: verified candidates.
    review: what a reflection is: "facts" alone, "analysis" with the outcome on the last
      line, or analysis with "grades" of all three criteria on the last line. The first
      suits variant unified, the second mhqa, the third web; see `review_style`.
    facts: whether the planner, before its plan, lists the facts that are given, to be
      looked up and to be derived.
  """

  max_turns: int = 24
  max_calls: int = 12
  max_checks: int = 3
  review: str = "facts"
  facts: bool = False

  def __post_init__(self):
    if self.review not in REVIEWS:
      raise ValueError(f"review is {self.review!r}; accepted: {', '.join(REVIEWS)}")
    if min(self.max_turns, self.max_calls, self.max_checks) < 1:
      raise ValueError("max_turns, max_calls and max_checks must be at least 1")


def review_style(variant: Variant) -> str:
  """The `TeamConfig.review` whose reflections the variant can hold."""
  if variant.graded:
    return "grades"
  return "analysis" if roles.REFLECTION in variant.think_required else "facts"


class _Malformed(Exception):
  """A reply that cannot be used; the message tells the agent what was expected."""


class _Team:
  """The agents of one run: their contexts, the shared history, the meter."""

  def __init__(
    self,
    task: Task,
    brain: Brain,
    tools: Sequence[str],
    config: TeamConfig,
    encode: Encode,
    sample: int,
  ):
    self.task, self.brain, self.tools = task, brain, tuple(tools)
    self.review, self.facts = config.review, config.facts
    self.run = Run(task.id, sample=sample)
    self._meter = Meter(encode)
    self._contexts: dict[str, list[Message]] = {}
    self._told: dict[str, int] = {}

  def ask(self, agent: str, legal: Collection[str] = ()) -> Event | None:
    """Has an agent reply; None if its reply was malformed twice."""
    context = self._open(agent, legal)
    for _ in range(2):
      reply = self.brain(agent, context)
      context.append(Message("assistant", reply.text))
      try:
        if reply.cut:
          raise _Malformed("it was cut at the limit of its length; be brief")
        kind, content, detail = self._read(agent, reply.text, legal)
      except _Malformed as e:
        self._record(agent, MALFORMED, reply.text, str(e), context, reply)
        context.append(
          Message("user", f"Your reply could not be used: {e}. Reply again.")
        )
        continue
      if agent == PLANNER and self.facts:
        content, facts = _PLANNING.search(reply.text).group("plan", "facts")
        self.note(agent, FACTS, facts.strip())
      return self._record(agent, kind, content.strip(), detail, context, reply)
    return None

  def note(self, agent: str, kind: str, content: str, detail: str = "") -> Event:
    """Adds an event that no model wrote."""
    event = Event(agent, kind, content, detail)
    self.run.events.append(event)
    return event

  def _open(self, agent: str, legal: Collection[str]) -> list[Message]:
    """The agent's conversation, brought up to date with what it may see."""
    first = agent not in self._contexts
    context = self._contexts.setdefault(agent, [])
    parts = []
    if first:
      extra = REVIEWS[self.review] if agent == REFLECTOR else ""
      extra = PLANNING if agent == PLANNER and self.facts else extra
      context.append(Message("system", PROMPTS[agent] + extra))
      parts.append(f"Question: {self.task.question}\nTools: {', '.join(self.tools)}")
    for event in self.run.events[self._told.get(agent, 0) :]:
      if event.agent != agent and event.kind in SEES[agent]:
        parts.append(render(event))
    self._told[agent] = len(self.run.events)
    if legal:
      parts.append(f"[choose]\n{', '.join(legal)}")
    context.append(Message("user", "\n".join(parts) or "Go on."))
    return context

  def _read(
    self, agent: str, text: str, legal: Collection[str]
  ) -> tuple[str, str, str]:
    """(kind, content, detail) of an agent's reply.

    Raises:
      _Malformed: it does not have the form that the agent's prompt asks for.
    """
    if agent == ORCHESTRATOR:
      following = _field(_NEXT, text, "a line 'NEXT: <agent>'").lower()
      if following not in legal:
        raise _Malformed(f"NEXT must be one of {', '.join(legal)}")
      reason = _REASON.search(text)
      return DECISION, reason[1].strip() if reason else "", following
    if agent == SEARCH:
      named = _TOOL.search(text)
      tool = named[1] if named else next(t for t in self.tools if t != CODE)
      if tool not in self.tools or tool == CODE:
        raise _Malformed(
          f"TOOL must be one of {', '.join(t for t in self.tools if t != CODE)}"
        )
      return CALL, _field(_QUERY, text, "a line 'QUERY: <query>'"), tool
    if agent == CODE:
      fences = _FENCES.search(text)
      call = tool_bodies.parse_code(fences[0]) if fences else None
      if call is None:
        raise _Malformed("expected one ```py block, then at most one ```sh block")
      return CALL, tool_bodies.render_code(call.program, call.stdin), CODE
    if agent == SOLVER:
      return CANDIDATE, _field(_ANSWER, text, "a line 'ANSWER: <answer>'"), ""
    if agent == VERIFIER:
      score = _field(_SCORE, text, "a line 'SCORE: <1-4>'")
      why = _WHY.search(text)
      return VERDICT, why[1].strip() if why else "", score
    if not text.strip():
      raise _Malformed("the reply was empty")
    if agent == PLANNER and self.facts and not _PLANNING.search(text):
      raise _Malformed("expected a line 'FACTS: <facts>', then a line 'PLAN: <plan>'")
    if agent == REFLECTOR and self.review != "facts":
      *analysis, outcome = text.strip().splitlines()
      if not analysis:
        raise _Malformed("expected an analysis, then the outcome on a line of its own")
      missing = set(roles.CRITERIA) - set(roles.reflection_grades(outcome))
      if self.review == "grades" and missing:
        raise _Malformed(
          f"the last line lacks a grade for {', '.join(sorted(missing))}"
        )
    return (PLAN if agent == PLANNER else REFLECTION), text.strip(), ""

  def _record(
    self,
    agent: str,
    kind: str,
    content: str,
    detail: str,
    context: list[Message],
    reply: Reply,
  ) -> Event:
    prompt, cached, generated = self._meter.charge(context[:-1], reply.text)
    event = Event(
      agent,
      kind,
      content,
      detail,
      prompt=prompt,
      cached=cached,
      generated=generated,
      seconds=reply.seconds,
      retries=reply.retries,
      reported=reply.reported,
    )
    self.run.events.append(event)
    return event


_NEXT = re.compile(r"^\s*NEXT:\s*(\w+)", re.MULTILINE)
_REASON = re.compile(r"^\s*REASON:\s*(.*)", re.MULTILINE | re.DOTALL)
_TOOL = re.compile(r"^\s*TOOL:\s*(\w+)", re.MULTILINE)
_QUERY = re.compile(r"^\s*QUERY:\s*(.*)", re.MULTILINE | re.DOTALL)
_ANSWER = re.compile(r"^\s*ANSWER:\s*(.*)", re.MULTILINE | re.DOTALL)
_SCORE = re.compile(r"^\s*SCORE:\s*([1-4])(?!\d|\.\d)", re.MULTILINE)
_WHY = re.compile(r"^\s*WHY:\s*(.*)", re.MULTILINE | re.DOTALL)
_PLANNING = re.compile(
  r"^\s*FACTS:\s*(?P<facts>\S.*?)^\s*PLAN:\s*(?P<plan>\S.*)", re.MULTILINE | re.DOTALL
)
_FENCES = re.compile(r"```.*```", re.DOTALL)


def _field(pattern: re.Pattern[str], text: str, wanted: str) -> str:
  match = pattern.search(text)
  if match is None or not match[1].strip():
    raise _Malformed(f"expected {wanted}")
  return match[1].strip()


def solve(
  task: Task,
  brain: Brain,
  call: CallTool,
  tools: Sequence[str],
  config: TeamConfig,
  encode: Encode,
  sample: int = 0,
) -> Run:
  """Has the team work on one task until it is answered or out of turns.

  Args:
    task: what is asked.
    brain: answers every agent's messages.
    call: runs a tool: (tag, content of its span) -> ToolCall.
    tools: tags that may be called; `code` is the code agent's, all others search's.
    config: limits.
    encode: text -> token ids, for the meter alone.
    sample: which of the task's runs this is.
  """
  team = _Team(task, brain, tools, config, encode, sample)
  run = team.run
  try:
    _work(team, call, config)
  except InfrastructureError as e:
    run.status, run.error = Status.INFRASTRUCTURE, str(e)
  except GaveUp as e:
    run.status = Status.TURN_LIMIT
    team.note(ORCHESTRATOR, GAVE_UP, e.detail, e.reason)
  spent = [e for e in run.events if e.prompt]
  run.usage = Usage(
    prompt=sum(e.prompt for e in spent),
    cached=sum(e.cached for e in spent),
    generated=sum(e.generated for e in spent),
    tool_calls=len(run.calls),
    model_calls=len(spent),
    seconds=sum(e.seconds for e in spent) + sum(c.seconds for c in run.calls),
  )
  return run


def _work(team: _Team, call: CallTool, config: TeamConfig) -> None:
  run = team.run
  checks = 0
  for _ in range(config.max_turns):
    open_calls = len(run.calls) < config.max_calls
    legal = _legal(run, team.tools if open_calls else ())
    decision = team.ask(ORCHESTRATOR, legal)
    if decision is None:  # twice malformed: take the safest legal step
      decision = team.note(ORCHESTRATOR, DECISION, "", legal[-1])
    agent = decision.detail
    if agent == SOLVER:
      verdict = _propose(team)
      checks += verdict is not None
      if verdict is not None and int(verdict.detail) >= roles.PASS_SCORE:
        run.status = Status.ENDED
        team.note(ORCHESTRATOR, FINAL, run.prediction)
        return
      if checks == config.max_checks:
        break
      continue
    work = team.ask(agent)
    if work is None or agent == PLANNER:
      continue
    result = call(work.detail, work.content)
    run.calls.append(result)
    if result.status == CallStatus.INFRASTRUCTURE:
      raise InfrastructureError(f"tool {work.detail}: {result.result}")
    team.note(work.detail, OBSERVATION, result.result, work.detail)
    team.ask(REFLECTOR)
  run.status = Status.TURN_LIMIT


def _propose(team: _Team) -> Event | None:
  """A candidate and its verdict; None unless both came."""
  candidate = team.ask(SOLVER)
  if candidate is None:
    return None
  team.run.prediction = candidate.content
  return team.ask(VERIFIER)


def _legal(run: Run, tools: Sequence[str]) -> list[str]:
  """Agents that may work next, by the protocol's order rules; the last is the safest.

  A poor grade asks for a new plan, and after a failed check something has to be done
  before a new candidate.
  """
  last = next((e for e in reversed(run.events) if e.kind in _STATES), None)
  workers = [SEARCH] if any(t != CODE for t in tools) else []
  workers += [CODE] if CODE in tools else []
  if last is None:
    return [*workers, PLANNER]
  if (
    last.kind == REFLECTION and "poor" in roles.reflection_grades(last.content).values()
  ):
    return [PLANNER]
  if last.kind in (VERDICT, CANDIDATE):
    return [*workers, PLANNER]
  if last.kind in (PLAN, OBSERVATION):
    return [*workers, SOLVER]
  return [PLANNER, *workers, SOLVER]


_STATES = frozenset({PLAN, OBSERVATION, REFLECTION, CANDIDATE, VERDICT})
