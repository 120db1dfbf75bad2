"""A team's run -> one Chain-of-Agents trajectory, or the reason why not.

The mapping follows arXiv 2508.13167 (multi-agent distillation): decisions and facts
become `think`, plans `plan`, calls the tool's own tag, results `observation`, reviews
`reflection`, candidates `suggested_answer`, verdicts a `think` with the rationale and a
`double_check` with the score, and the end `answer`. Where a variant wants a think
before each reflection, a review's last line is the reflection and the rest the think.
Every tool call and every observation is kept verbatim and in order; what the protocol
has no place for (who comes next, malformed replies, a candidate that was never
verified) is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from coa_jax.protocol import roles
from coa_jax.protocol.parser import parse
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.trajectory import Author, Segment, Status, Trajectory
from coa_jax.tasks.task import Task
from coa_jax.teacher import runs
from coa_jax.teacher.agents import review_style
from coa_jax.teacher.runs import Event, Run


@dataclasses.dataclass(frozen=True)
class Dropped:
  """A run that gives no trajectory.

  Attributes:
    task_id: the task.
    sample: which of its runs.
    reason: a short name that counts can be kept by.
    detail: what exactly was wrong.
  """

  task_id: str
  sample: int
  reason: str
  detail: str = ""


_TAGS = {
  runs.PLAN: roles.PLAN,
  runs.REFLECTION: roles.REFLECTION,
  runs.FINAL: roles.ANSWER,
}


def convert(
  run: Run, task: Task, variant: Variant, prompt: Sequence[Segment]
) -> Trajectory | Dropped:
  """The run as one stream of spans, well formed under the variant.

  Args:
    run: what the team did.
    task: what it was asked.
    variant: the dialect; candidates and verdicts are left out where it has no tag for
      them.
    prompt: the first segments, e.g. `protocol.prompts.prompt_segments(...)`.

  Returns:
    A trajectory whose tool calls have their wall seconds set to 0, so that equal runs
    give equal bytes (times stay in the run); or why there is none.
  """
  if run.events and run.events[-1].kind == runs.GAVE_UP:
    last = run.events[-1]
    return Dropped(run.task_id, run.sample, last.detail, last.content)
  if run.status != Status.ENDED:
    return Dropped(run.task_id, run.sample, run.status.value, run.error)
  spans = _place_thinks(_spans(run.events, variant), variant)
  segments = [*prompt, *spans]
  trajectory = Trajectory(
    task_id=run.task_id,
    segments=segments,
    calls=[dataclasses.replace(call, seconds=0.0) for call in run.calls],
    status=Status.ENDED,
    usage=dataclasses.replace(run.usage, seconds=0.0),
    sample=run.sample,
    meta={
      "question": task.question,
      "answers": list(task.answers),
      "family": task.family,
      "source": task.source,
      "kind": task.kind.value,
    },
  )
  verdict = parse(trajectory.text, variant)
  if not verdict.ok:
    return Dropped(run.task_id, run.sample, verdict.verdict.value, verdict.detail)
  return trajectory


def _spans(events: Sequence[Event], variant: Variant) -> Iterator[tuple[str, str]]:
  """(tag, content) of every span, thinks where they were thought."""
  for i, event in enumerate(events):
    if event.kind in (runs.DECISION, runs.FACTS):
      if event.content:
        yield roles.THINK, event.content
    elif event.kind == runs.CALL:
      yield event.detail, event.content
    elif event.kind == runs.OBSERVATION:
      yield roles.OBSERVATION, event.content
    elif event.kind == runs.VERDICT:
      if roles.DOUBLE_CHECK in variant.roles:
        if event.content:
          yield roles.THINK, event.content
        yield roles.DOUBLE_CHECK, event.detail
    elif event.kind == runs.CANDIDATE:
      verified = _verified(events, i)
      if verified and roles.SUGGESTED_ANSWER in variant.roles:
        yield roles.SUGGESTED_ANSWER, event.content
    elif event.kind == runs.REFLECTION and review_style(variant) != "facts":
      analysis, _, outcome = event.content.rpartition("\n")
      if analysis:
        yield roles.THINK, analysis
      yield roles.REFLECTION, outcome
    elif event.kind in _TAGS:
      yield _TAGS[event.kind], event.content


def _verified(events: Sequence[Event], i: int) -> bool:
  """Whether the candidate at i was scored before anything else was done."""
  for event in events[i + 1 :]:
    if event.kind != runs.MALFORMED:
      return event.kind == runs.VERDICT
  return False


def _place_thinks(
  spans: Iterator[tuple[str, str]], variant: Variant
) -> Iterator[Segment]:
  """Segments of the spans; thoughts before one span become one think.

  A thought where the variant allows none waits for the next span that may have one; one
  that comes to none is left out.
  """
  thoughts: list[str] = []
  for tag, content in spans:
    if tag == roles.THINK:
      thoughts.append(content)
      continue
    if thoughts and tag in variant.think_allowed:
      text = roles.wrap(roles.THINK, "\n".join(thoughts))
      yield Segment(Author.POLICY, roles.THINK, text)
      thoughts = []
    if tag == roles.OBSERVATION:
      text = roles.wrap(tag, roles.escape(content))
      yield Segment(Author.TOOL, tag, text)
    else:
      yield Segment(Author.POLICY, tag, roles.wrap(tag, content))
