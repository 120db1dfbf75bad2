"""Converts a team's run to a Chain-of-Agents trajectory, or says why it cannot.

The mapping follows arXiv 2508.13167 (multi-agent distillation): decisions and facts
become `think`, plans `plan`, calls the tool's own tag, results `observation`, reviews
`reflection`, candidates `suggested_answer`, verdicts a `think` with the rationale and a
`double_check` with the score, and the final answer `answer`. If a variant requires a
think or grades for each reflection, a review's last line is the reflection and the rest
the think. Tool calls and observations are kept verbatim and in order; calls made
together are one span if the variant has such spans. Parts outside the protocol (the
next agent's name, malformed replies, an unverified candidate) are left out.
`ConvertConfig` allows three exceptions, recorded in the trajectory's `meta`: long
observations may lose their middle, and missing thinks or verdicts may be filled in.

budget: the mapping and its exceptions share every convention.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.prompts import review_style
from coa_jax.data.teacher.runs import Event, Run
from coa_jax.protocol import roles
from coa_jax.protocol.excerpt import cut_middle
from coa_jax.protocol.parser import content_fault, parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tool_bodies import number_results
from coa_jax.protocol.tools import FUNCTION_TAG, render_calls
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.rewards import grade_known


@dataclasses.dataclass(frozen=True)
class Dropped:
  """Why a run has no trajectory: a short reason and the exact problem."""

  task_id: str
  sample: int
  reason: str
  detail: str = ""


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
  """Config section `convert`.

  Attributes:
    observation_chars: a longer observation keeps this many characters, in its head and
      tail, around a marker with the number removed; 0 keeps all. `meta["shortened"]`
      lists the call number and the original length for each.
    missing_think: text for thinks required by the variant but missing in the run; ""
      drops such runs. `meta["filled"]` counts these thinks.
    score_right: True completes a run with a right answer but no verdict: the answer
      becomes its candidate and the best score its verdict, if the variant requires
      them; the paper also added its scores afterwards. `meta["scored"]` records this.
  """

  observation_chars: int = 0
  missing_think: str = ""
  score_right: bool = False

  def __post_init__(self):
    if self.observation_chars and self.observation_chars < 16:
      raise ValueError("observation_chars must be 0 or at least 16")
    if roles.find_tag(self.missing_think):
      raise ValueError("missing_think must not hold a tag")


# Event kinds that become one whole span in every variant with the tag.
_TAGS = {
  runs.PLAN: roles.PLAN,
  runs.REFLECTION: roles.REFLECTION,
  runs.FINAL: roles.ANSWER,
}


def convert(
  run: Run,
  task: Task,
  variant: Variant,
  prompt: Sequence[Segment],
  config: ConvertConfig = ConvertConfig(),
  lost: list[str] | None = None,
) -> Trajectory | Dropped:
  """Converts a run to one sequence of spans, well formed in the variant.

  budget: one pass over a run, event by event.

  Args:
    run: the team's run.
    task: its task.
    variant: the dialect; content for which it has no tag is left out.
    prompt: the first segments, e.g. `protocol.prompts.prompt_segments(...)`.
    config: the allowed changes.
    lost: collects the omitted contents, one line each, except malformed replies.

  Returns:
    A trajectory, or the reason for its absence. Its wall times are 0, so that equal
    runs give equal bytes (the run keeps the times).
  """
  # --- Runs without a trajectory.
  if run.events and run.events[-1].kind == runs.GAVE_UP:
    last = run.events[-1]
    return Dropped(run.task_id, run.sample, last.detail, last.content)
  if run.status != Status.ENDED:
    return Dropped(run.task_id, run.sample, run.status.value, run.error)

  # --- The config's changes: long observations, a missing verdict.
  run, changes = _shortened(run, config.observation_chars)
  if config.score_right and _lacks_verdict(run, variant) and _is_right(task, run):
    run = _with_best_score(run)
    changes["scored"] = True

  # --- Events as spans.
  lost = [] if lost is None else lost
  spans = _spans(list(_in_turns(run.events, variant)), variant, lost)
  segments, filled = _segments(spans, variant, config.missing_think)
  if filled:
    changes["filled"] = filled

  # --- The trajectory, checked against the variant.
  meta = {**task.trajectory_meta, "kind": task.kind.value}
  if run.graded:
    meta["graded"] = run.graded
  trajectory = Trajectory(
    task_id=run.task_id,
    segments=[*prompt, *segments],
    calls=[dataclasses.replace(call, seconds=0.0) for call in run.calls],
    status=Status.ENDED,
    reward=run.reward,
    reward_parts={} if run.reward is None else {"answer": run.reward},
    usage=dataclasses.replace(run.usage, seconds=0.0),
    sample=run.sample,
    meta={**meta, **changes},
  )
  verdict = parse(trajectory.text, variant)
  if not verdict.ok:
    return Dropped(run.task_id, run.sample, verdict.verdict.value, verdict.detail)
  return trajectory


def _shortened(run: Run, limit: int) -> tuple[Run, dict[str, Any]]:
  """Cuts the run's long observations; returns the new run and a record of the cuts."""
  if not limit:
    return run, {}
  calls = []
  lengths = []  # (call number, result length) per cut
  for number, call in enumerate(run.calls):
    if len(call.result) > limit:
      lengths.append([number, len(call.result)])
    calls.append(dataclasses.replace(call, result=cut_middle(call.result, limit)))
  if not lengths:
    return run, {}
  # Each result is in the run twice: as the call's result, and as an observation.
  events = []
  for event in run.events:
    if event.kind == runs.OBSERVATION:
      event = dataclasses.replace(event, content=cut_middle(event.content, limit))
    events.append(event)
  record = {"shortened": {"head_and_tail": limit, "calls": lengths}}
  return dataclasses.replace(run, events=events, calls=calls), record


def _lacks_verdict(run: Run, variant: Variant) -> bool:
  """Whether the variant requires a verdict and the run has none."""
  if roles.DOUBLE_CHECK not in variant.roles or not run.events:
    return False
  return runs.VERDICT not in {event.kind for event in run.events}


def _is_right(task: Task, run: Run) -> bool:
  reward = run.reward
  if reward is None:  # an imported run, which nobody has judged
    reward = grade_known(task, run.prediction)
  return reward == 1.0


def _with_best_score(run: Run) -> Run:
  """Adds the run's answer as a candidate, with the best score as its verdict."""
  *events, final = run.events
  score = str(max(roles.SCORES))
  candidate = Event(runs.SOLVER, runs.CANDIDATE, final.content)
  verdict = Event(runs.VERIFIER, runs.VERDICT, "", score)
  return dataclasses.replace(run, events=[*events, candidate, verdict, final])


def _in_turns(events: Sequence[Event], variant: Variant) -> Iterator[Event]:
  """Yields the events, with calls made together in turns of at most `parallel` calls.

  Their events are side by side, and then their results'. A variant with one call per
  turn gets one call after the other.
  """
  start = 0
  while start < len(events):
    middle = start
    while middle < len(events) and events[middle].kind == runs.CALL:
      middle += 1
    end = 2 * middle - start
    kinds = {event.kind for event in events[middle:end]}
    if end > len(events) or kinds != {runs.OBSERVATION}:
      yield events[start]  # no call, or a result is missing, which the parser refuses
      start += 1
      continue
    for first in range(start, middle, variant.parallel):
      calls = events[first : min(first + variant.parallel, middle)]
      after = first + middle - start
      yield from _turn(calls, events[after : after + len(calls)], variant)
    start = end


def _turn(
  calls: Sequence[Event], results: Sequence[Event], variant: Variant
) -> Iterable[Event]:
  """Joins calls and their results; the parser will refuse a faulty call, left apart."""
  made = [(call.detail, call.content) for call in calls]
  faulty = [c for c in made if c[0] not in variant.tools or content_fault(*c)]
  if len(calls) == 1 or faulty:
    return itertools.chain(*zip(calls, results, strict=True))
  text = number_results(result.content for result in results)
  return (
    dataclasses.replace(calls[0], detail=FUNCTION_TAG, content=render_calls(made)),
    dataclasses.replace(results[0], content=text),
  )


def _spans(
  events: Sequence[Event], variant: Variant, lost: list[str]
) -> Iterator[tuple[str, str]]:
  """Yields each span's (tag, content), with thinks at their original places."""
  for i, event in enumerate(events):
    kind = event.kind
    if kind in (runs.DECISION, runs.FACTS):
      if event.content:
        yield roles.THINK, event.content
    elif kind == runs.CALL:
      yield event.detail, event.content
    elif kind == runs.OBSERVATION:
      yield roles.OBSERVATION, event.content

    # --- Candidates and verdicts, which not every variant has.
    elif kind == runs.VERDICT:
      if roles.DOUBLE_CHECK in variant.roles:
        if event.content:
          yield roles.THINK, event.content
        yield roles.DOUBLE_CHECK, event.detail
      else:
        lost.append(_no_span(f"{kind} {event.detail}", event.content, variant))
    elif kind == runs.CANDIDATE:
      has_tag = roles.SUGGESTED_ANSWER in variant.roles
      if has_tag and _is_verified(events, i):
        yield roles.SUGGESTED_ANSWER, event.content
      elif not _is_repeated(events, i):
        if has_tag:
          lost.append(f"{kind}: {event.content!r:.80} was never verified")
        else:
          lost.append(_no_span(kind, event.content, variant))

    # --- Plans, reflections and the answer.
    elif _TAGS.get(kind, roles.ANSWER) not in variant.roles:
      lost.append(_no_span(kind, event.content, variant))
    elif kind == runs.REFLECTION and review_style(variant) != "facts":
      analysis, _, outcome = event.content.rpartition("\n")
      if analysis:
        yield roles.THINK, analysis
      yield roles.REFLECTION, outcome
    elif kind in _TAGS:
      yield _TAGS[kind], event.content


def _no_span(name: str, content: str, variant: Variant) -> str:
  return f"{name}: {content!r:.80} has no span in {variant.name!r}"


def _is_repeated(events: Sequence[Event], i: int) -> bool:
  """Whether a later candidate or the final answer repeats the candidate at i."""
  kinds = (runs.CANDIDATE, runs.FINAL)
  later = [event.content for event in events[i + 1 :] if event.kind in kinds]
  return events[i].content in later


def _is_verified(events: Sequence[Event], i: int) -> bool:
  """Whether the candidate at i was scored before any other action."""
  # The verifier may have been asked twice.
  later = [event.kind for event in events[i + 1 :] if event.kind != runs.MALFORMED]
  return later[:1] == [runs.VERDICT]


def _segments(
  spans: Iterator[tuple[str, str]], variant: Variant, missing: str
) -> tuple[list[Segment], int]:
  """Converts spans to segments; all thoughts before a span become one think.

  A misplaced thought waits for the next span that allows a think; thoughts left at the
  end are dropped.

  Returns:
    The segments, and the number of required thinks that were missing: their text is
    `missing`, unless that is empty.
  """
  out: list[Segment] = []
  filled = 0
  thoughts: list[str] = []
  for tag, content in spans:
    if tag == roles.THINK:
      thoughts.append(content)
      continue
    if missing and tag in variant.think_required and not thoughts:
      thoughts = [missing]
      filled += 1
    if thoughts and tag in variant.think_allowed:
      text = roles.wrap(roles.THINK, "\n".join(thoughts))
      out.append(Segment(Author.POLICY, roles.THINK, text))
      thoughts = []
    author = Author.POLICY
    if tag == roles.OBSERVATION:
      # Escape tag-like text: no tool can write a protocol tag.
      author = Author.TOOL
      content = roles.escape(content)
    out.append(Segment(author, tag, roles.wrap(tag, content)))
  return out, filled
