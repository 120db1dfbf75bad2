"""A multi-agent team: agents with their own prompts and contexts, exchanging messages.

An orchestrator reads the shared history and names the next agent. A planner lists the
facts and plans, a search agent and a code agent call tools, a reflector reviews the
results, a solver proposes an answer and a verifier scores it 1 to 4. Every agent has
its own conversation with only the event kinds it needs (`SEES`), so a team pays for
context again at every call; this module counts that cost.

Malformed replies are recorded; the agent is asked once more, then skipped. A backend
failure ends the run with a status; only `RefusedError` propagates.

budget: an agent's context and the agents' order are one set of rules.
"""

from __future__ import annotations

import concurrent.futures
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
from coa_jax.data.teacher.prompts import PARALLEL, PLANNING, PROMPTS, REVIEWS, SEES
from coa_jax.data.teacher.replies import MalformedReply, read_reply
from coa_jax.data.teacher.runs import Event, Run, render
from coa_jax.data.teacher.token_meter import Encode, TokenMeter
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall, Usage
from coa_jax.runtime.fields import bounded, check_fields, choice

_STATES = frozenset(
  {runs.PLAN, runs.OBSERVATION, runs.REFLECTION, runs.CANDIDATE, runs.VERDICT}
)


@dataclasses.dataclass(frozen=True)
class TeamConfig:
  """A run's limits.

  Attributes:
    max_turns: the most orchestrator decisions.
    max_calls: the most tool calls; after the last one, the team has to answer.
    max_checks: the most verified candidates.
    review: the reflections' form: "facts" alone, "analysis" with the outcome on the
      last line, or analysis with "grades" for all three criteria on the last line. They
      suit variants unified, mhqa and web, in this order; see `prompts.review_style`.
    facts: whether the planner lists known facts, facts to look up and facts to derive
      before its plan.
    parallel: the most calls that the search agent makes at the same time.
  """

  max_turns: int = bounded(24, least=1)
  max_calls: int = bounded(12, least=1)
  max_checks: int = bounded(3, least=1)
  review: str = choice("facts", of=REVIEWS)
  facts: bool = False
  parallel: int = bounded(1, least=1)

  def __post_init__(self):
    check_fields(self)


class _Team:
  """One run's agents: their contexts, the shared history and the token meter."""

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
    self._shown: dict[str, int] = {}  # agent -> number of events already shown

  def ask(self, agent: str, legal: Collection[str] = ()) -> Event | None:
    """Asks an agent for a reply; None after two malformed replies."""
    context = self._open(agent, legal)
    most = None
    if self.config.parallel > 1:
      most = min(self.config.parallel, self.config.max_calls - len(self.run.calls))
    for _ in range(2):
      # --- Reply. A malformed reply stays in the conversation, to show the mistake.
      reply = self.backend(agent, context)
      context.append(Message("assistant", reply.text))
      try:
        if reply.cut:
          raise MalformedReply("it was cut at the limit of its length; be brief")
        parsed = read_reply(
          agent,
          reply.text,
          legal,
          self.tools,
          self.config.review,
          self.config.facts,
          most,
        )
      except MalformedReply as e:
        self._record(agent, runs.MALFORMED, reply.text, str(e), context, reply)
        context.append(
          Message("user", f"Your reply could not be used: {e}. Reply again.")
        )
        continue

      # --- Record the reply. Facts are a separate event, which other agents see, and so
      # is each further call.
      if parsed.facts:
        self.note(agent, runs.FACTS, parsed.facts)
      event = self._record(
        agent, parsed.kind, parsed.content, parsed.detail, context, reply
      )
      for tool, query in parsed.more:
        self.note(agent, runs.CALL, query, tool)
      return event
    return None

  def note(self, agent: str, kind: str, content: str, detail: str = "") -> Event:
    """Adds an event without token counts."""
    event = Event(agent, kind, content, detail)
    self.run.events.append(event)
    return event

  def _open(self, agent: str, legal: Collection[str]) -> list[Message]:
    """Returns the agent's conversation after adding the new events it may see."""
    context = self._contexts.setdefault(agent, [])
    parts = []
    if not context:
      context.append(Message("system", self._prompt(agent)))
      parts.append(f"Question: {self.task.question}\nTools: {', '.join(self.tools)}")
    # Append only new events, so that a prefix cache can reuse the conversation.
    for event in self.run.events[self._shown.get(agent, 0) :]:
      if event.agent != agent and event.kind in SEES[agent]:
        parts.append(render(event))
    self._shown[agent] = len(self.run.events)
    if legal:
      parts.append(f"[choose]\n{', '.join(legal)}")
    # Chat endpoints require a user message before every reply, even if nothing is new.
    context.append(Message("user", "\n".join(parts) or "Go on."))
    return context

  def _prompt(self, agent: str) -> str:
    prompt = PROMPTS[agent]
    if agent == runs.REFLECTOR:
      prompt += REVIEWS[self.config.review]
    if agent == runs.PLANNER and self.config.facts:
      prompt += PLANNING
    if self.config.parallel > 1:
      prompt += PARALLEL.get(agent, "").format(most=self.config.parallel)
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
    # The context's last message is the reply itself.
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
  """Runs the team on one task until a verified answer or a limit.

  The code agent has the tool `code`, the search agent all others. `encode` is only for
  counting tokens; `sample` is the run's number for this task.
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
    if event.prompt:  # other events cost nothing of their own
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
    # --- Choose the next agent.
    may_call = len(run.calls) < team.config.max_calls
    legal = _legal_agents(run, team.tools if may_call else ())
    decision = team.ask(runs.ORCHESTRATOR, legal)
    if decision is None:  # malformed twice: take the safest legal step
      decision = team.note(runs.ORCHESTRATOR, runs.DECISION, "", legal[-1])
    agent = decision.detail

    # --- Propose and check an answer.
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

    # --- A plan, or tool calls and their review.
    before = len(run.events)
    if team.ask(agent) is None or agent == runs.PLANNER:
      continue
    made = [event for event in run.events[before:] if event.kind == runs.CALL]
    results = _call_together(call, made)
    run.calls += results
    for event, result in zip(made, results, strict=True):
      if result.status == CallStatus.INFRASTRUCTURE:
        # No agent may learn from an unavailable tool.
        raise InfrastructureError(f"tool {event.detail}: {result.result}")
      team.note(event.detail, runs.OBSERVATION, result.result, event.detail)
    team.ask(runs.REFLECTOR)
  run.status = Status.TURN_LIMIT


def _call_together(call: CallTool, made: Sequence[Event]) -> list[ToolCall]:
  """Makes calls at the same time; returns their results in the order of the calls."""
  if len(made) == 1:
    return [call(made[0].detail, made[0].content)]
  with concurrent.futures.ThreadPoolExecutor(len(made)) as pool:
    return list(pool.map(lambda event: call(event.detail, event.content), made))


def _propose(team: _Team) -> Event | None:
  """Asks for a candidate and its verdict; None unless both arrive."""
  candidate = team.ask(runs.SOLVER)
  if candidate is None:
    return None
  team.run.prediction = candidate.content
  return team.ask(runs.VERIFIER)


def _legal_agents(run: Run, tools: Sequence[str]) -> list[str]:
  """Lists the agents allowed next by the protocol's order rules, the safest last.

  A poor grade requires a new plan; after a failed check, another action has to come
  before the next candidate.
  """
  last = None  # the event with the work's present state
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
  # An observation is last if its review was malformed.
  if last.kind in (runs.PLAN, runs.OBSERVATION):
    return [*workers, runs.SOLVER]
  return [runs.PLANNER, *workers, runs.SOLVER]
