"""A multi-agent team: agents with their own prompts and contexts, exchanging messages.

An orchestrator reads the shared history and names the next agent. A planner lists the
facts and plans, a search agent and a code agent call tools, a reflector reviews the
results, a solver proposes an answer and a verifier scores it 1 to 4. Every agent has
its own conversation, with only the kinds of events that it needs (`SEES`), so a team
pays for its context again at every call: this cost is counted here.

A malformed reply is requested once more, then recorded and skipped; a run ends with a
status, never with a crash.

budget: an agent's context and the order of agents are one set of rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.backend import (
  CallTool,
  InfrastructureError,
  Message,
  ModelBackend,
  Reply,
  Unsolvable,
)
from coa_jax.data.teacher.prompts import PLANNING, PROMPTS, REVIEWS, SEES
from coa_jax.data.teacher.replies import MalformedReply, read_reply
from coa_jax.data.teacher.runs import Event, Run, render
from coa_jax.data.teacher.token_meter import Encode, TokenMeter
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import CallStatus, Status, Usage
from coa_jax.runtime.fields import bounded, check_fields, choice

_STATES = frozenset(
  {runs.PLAN, runs.OBSERVATION, runs.REFLECTION, runs.CANDIDATE, runs.VERDICT}
)


@dataclasses.dataclass(frozen=True)
class TeamConfig:
  """Limits of one run.

  Attributes:
    max_turns: the orchestrator's decisions.
    max_calls: tool calls; after the last one the team has to answer.
    max_checks: verified candidates.
    review: the form of reflections: "facts" alone, "analysis" with the outcome on the
      last line, or analysis with "grades" of all three criteria on the last line. The
      first suits variant unified, the second mhqa, the third web; see
      `prompts.review_style`.
    facts: whether the planner, before its plan, lists the known facts, those to look up
      and those to derive.
  """

  max_turns: int = bounded(24, least=1)
  max_calls: int = bounded(12, least=1)
  max_checks: int = bounded(3, least=1)
  review: str = choice("facts", of=REVIEWS)
  facts: bool = False

  def __post_init__(self):
    check_fields(self)


class _Team:
  """The agents of one run: their contexts, the shared history, the token meter."""

  def __init__(
    self,
    task: Task,
    backend: ModelBackend,
    tools: Sequence[str],
    config: TeamConfig,
    encode: Encode,
    sample: int,
  ):
    self.task = task
    self.backend = backend
    self.tools = tuple(tools)
    self.config = config
    self.run = Run(task.id, sample=sample)
    self._meter = TokenMeter(encode)
    self._contexts: dict[str, list[Message]] = {}
    self._shown: dict[str, int] = {}  # agent -> number of events it has been shown

  def ask(self, agent: str, legal: Collection[str] = ()) -> Event | None:
    """Has an agent reply; None if its reply was malformed twice."""
    context = self._open(agent, legal)
    for _ in range(2):
      # --- Reply. A malformed one stays in the conversation: it shows the mistake to
      # correct.
      reply = self.backend(agent, context)
      context.append(Message("assistant", reply.text))
      try:
        if reply.cut:
          raise MalformedReply("it was cut at the limit of its length; be brief")
        parsed = read_reply(
          agent, reply.text, legal, self.tools, self.config.review, self.config.facts
        )
      except MalformedReply as e:
        self._record(agent, runs.MALFORMED, reply.text, str(e), context, reply)
        context.append(
          Message("user", f"Your reply could not be used: {e}. Reply again.")
        )
        continue

      # --- Record it. Facts are an event of their own, which other agents are shown.
      if parsed.facts:
        self.note(agent, runs.FACTS, parsed.facts)
      return self._record(
        agent, parsed.kind, parsed.content, parsed.detail, context, reply
      )
    return None

  def note(self, agent: str, kind: str, content: str, detail: str = "") -> Event:
    """Adds an event without a model's reply."""
    event = Event(agent, kind, content, detail)
    self.run.events.append(event)
    return event

  def _open(self, agent: str, legal: Collection[str]) -> list[Message]:
    """Returns the agent's conversation, updated with the events it may see."""
    context = self._contexts.setdefault(agent, [])
    parts = []
    if not context:
      context.append(Message("system", self._prompt(agent)))
      parts.append(f"Question: {self.task.question}\nTools: {', '.join(self.tools)}")
    # Append only new events: a conversation grows at its end, which suits a prefix
    # cache.
    for event in self.run.events[self._shown.get(agent, 0) :]:
      if event.agent != agent and event.kind in SEES[agent]:
        parts.append(render(event))
    self._shown[agent] = len(self.run.events)
    if legal:
      parts.append(f"[choose]\n{', '.join(legal)}")
    # Chat endpoints want a user's message before every reply, even if nothing is new.
    context.append(Message("user", "\n".join(parts) or "Go on."))
    return context

  def _prompt(self, agent: str) -> str:
    prompt = PROMPTS[agent]
    if agent == runs.REFLECTOR:
      prompt += REVIEWS[self.config.review]
    if agent == runs.PLANNER and self.config.facts:
      prompt += PLANNING
    return prompt

  def _record(
    self,
    agent: str,
    kind: str,
    content: str,
    detail: str,
    context: list[Message],
    reply: Reply,
  ) -> Event:
    # The last message of the context is the reply itself.
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


def solve(
  task: Task,
  backend: ModelBackend,
  call: CallTool,
  tools: Sequence[str],
  config: TeamConfig,
  encode: Encode,
  sample: int = 0,
) -> Run:
  """Has the team work on one task until it is answered or out of turns.

  The tool `code` belongs to the code agent, all others to the search agent; `encode`
  counts tokens only. `sample` is the run's number for this task.
  """
  team = _Team(task, backend, tools, config, encode, sample)
  run = team.run
  try:
    _work(team, call)
  except InfrastructureError as e:
    run.status = Status.INFRASTRUCTURE
    run.error = str(e)
  except Unsolvable as e:
    run.status = Status.TURN_LIMIT
    team.note(runs.ORCHESTRATOR, runs.GAVE_UP, e.detail, e.reason)
  run.usage = _usage(run)
  return run


def _usage(run: Run) -> Usage:
  usage = Usage(tool_calls=len(run.calls))
  for event in run.events:
    if event.prompt:  # others cost nothing: no model wrote them
      usage.prompt += event.prompt
      usage.cached += event.cached
      usage.generated += event.generated
      usage.model_calls += 1
  waited = sum(event.seconds for event in run.events if event.prompt)
  usage.seconds = waited + sum(call.seconds for call in run.calls)
  return usage


def _work(team: _Team, call: CallTool) -> None:
  run = team.run
  checks = 0
  for _ in range(team.config.max_turns):
    # --- Who works next.
    may_call = len(run.calls) < team.config.max_calls
    legal = _legal_agents(run, team.tools if may_call else ())
    decision = team.ask(runs.ORCHESTRATOR, legal)
    if decision is None:  # twice malformed: take the safest legal step
      decision = team.note(runs.ORCHESTRATOR, runs.DECISION, "", legal[-1])
    agent = decision.detail

    # --- An answer is proposed and checked.
    if agent == runs.SOLVER:
      verdict = _propose(team)
      if verdict is not None:  # otherwise a reply was malformed: no check
        checks += 1
        if int(verdict.detail) >= roles.PASS_SCORE:
          run.status = Status.ENDED
          team.note(runs.ORCHESTRATOR, runs.FINAL, run.prediction)
          return
      if checks == team.config.max_checks:
        break
      continue

    # --- A plan, or a tool call and its review.
    work = team.ask(agent)
    if work is None or agent == runs.PLANNER:
      continue
    result = call(work.detail, work.content)
    run.calls.append(result)
    if result.status == CallStatus.INFRASTRUCTURE:
      # No agent may learn from an unavailable tool.
      raise InfrastructureError(f"tool {work.detail}: {result.result}")
    team.note(work.detail, runs.OBSERVATION, result.result, work.detail)
    team.ask(runs.REFLECTOR)
  run.status = Status.TURN_LIMIT


def _propose(team: _Team) -> Event | None:
  """Asks for a candidate and its verdict; None unless both arrive."""
  candidate = team.ask(runs.SOLVER)
  if candidate is None:
    return None
  team.run.prediction = candidate.content
  return team.ask(runs.VERIFIER)


def _legal_agents(run: Run, tools: Sequence[str]) -> list[str]:
  """Returns the agents allowed next by the protocol's order rules, the safest last.

  A poor grade requires a new plan, and after a failed check another action has to
  precede a new candidate.
  """
  last = None  # the event with the present state of the work
  for event in run.events:
    if event.kind in _STATES:
      last = event
  workers = []
  if any(t != runs.CODE for t in tools):
    workers.append(runs.SEARCH)
  if runs.CODE in tools:
    workers.append(runs.CODE)
  if last is None:  # a team without a plan does not answer
    return [*workers, runs.PLANNER]
  if last.kind == runs.REFLECTION and roles.has_poor_grade(last.content):
    return [runs.PLANNER]
  if last.kind in (runs.VERDICT, runs.CANDIDATE):
    return [*workers, runs.PLANNER]
  # An observation is the last one if its review was not usable.
  if last.kind in (runs.PLAN, runs.OBSERVATION):
    return [*workers, runs.SOLVER]
  return [runs.PLANNER, *workers, runs.SOLVER]
