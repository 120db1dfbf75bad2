"""Team test-time scaling: chooses the best of several runs, list-wise.

One model call sees all candidates together and names the best (a list-wise selector;
arXiv 2506.12928 finds list-wise choice better than scoring and voting). The selector
does not know the right answer. Runs that agree need no selector: `_quality` ranks them.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher import runs
from coa_jax.data.teacher.backend import Message, ModelBackend, Reply, Unsolvable
from coa_jax.data.teacher.journal import Journal
from coa_jax.data.teacher.prompts import PROMPTS
from coa_jax.data.teacher.runs import Event, Run, render
from coa_jax.protocol.excerpt import cut_middle
from coa_jax.rewards.votes import vote_key

SAMPLE = -1  # the selector's run number in a journal
# Events that help to judge the work; the agents' order does not.
_SHOWN = frozenset(
  {runs.PLAN, runs.CALL, runs.OBSERVATION, runs.REFLECTION, runs.VERDICT}
)
_MAX_CHARS = 600  # a longer event loses its middle
_BEST = re.compile(r"^\s*BEST:\s*(\d+)", re.MULTILINE)
_WHY = re.compile(r"^\s*WHY:\s*(.*)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Selection:
  """A task's selected run, and the selection's cost.

  Attributes:
    task_id: the task.
    sample: the run; None if no run has an answer.
    how: "selector"; "agreement" if all answers are the same; "only" if there is only
      one; "vote" if the selector gave no usable reply, so the commonest answer won;
      "none".
    why: the selector's reason.
    candidates: the number of runs with an answer.
    prompt: prompt tokens in the selector's calls; like the next two, as the endpoint
      counts them.
    cached: prompt tokens from a prefix cache.
    completion: reply tokens.
    seconds: the selector's time.
  """

  task_id: str
  sample: int | None
  how: str
  why: str = ""
  candidates: int = 0
  prompt: int = 0
  cached: int = 0
  completion: int = 0
  seconds: float = 0.0


def select_all(
  done: Iterable[tuple[Task, Sequence[Run]]],
  backend: ModelBackend,
  journal: Journal,
  workers: int,
) -> Iterator[Selection]:
  """Selects runs for many tasks at once, in order; calls go through the journal."""

  def work(item: tuple[Task, Sequence[Run]]) -> Selection:
    task, runs_of_task = item
    return select(task, runs_of_task, journal.backend(backend, (task.id, SAMPLE)))

  return journal.in_order(work, done, workers)


def select(task: Task, done: Sequence[Run], backend: ModelBackend) -> Selection:
  """Selects one of a task's finished runs, without using the task's answers.

  The backend answers as the agent `selector`.

  Raises:
    InfrastructureError: the backend cannot answer.
  """
  answered = [r for r in done if r.prediction is not None and r.prediction.strip()]
  # Models prefer the first candidate, so the order is random for every task.
  random.Random(f"selector/{task.id}").shuffle(answered)

  # --- Runs that agree, or no runs at all, need no selector.
  groups: dict[str, list[Run]] = {}
  for run in answered:
    groups.setdefault(vote_key(run.prediction or ""), []).append(run)
  if not answered:
    return Selection(task.id, None, "none")
  if len(groups) == 1:
    first = min(answered, key=_quality)
    how = "agreement" if len(answered) > 1 else "only"
    return Selection(task.id, first.sample, how, candidates=len(answered))

  # --- The selector chooses; if it cannot, the largest group wins.
  chosen, why, replies = _ask(task, answered, backend)
  how = "selector"
  if chosen is None:
    how = "vote"
    # Among equal groups, the first in the random order.
    chosen = min(max(groups.values(), key=len), key=_quality)
  return Selection(
    task.id,
    chosen.sample,
    how,
    why,
    candidates=len(answered),
    prompt=sum(r.prompt_tokens for r in replies),
    cached=sum(r.cached_tokens for r in replies),
    completion=sum(r.completion_tokens for r in replies),
    seconds=sum(r.seconds for r in replies),
  )


def _ask(
  task: Task, answered: Sequence[Run], backend: ModelBackend
) -> tuple[Run | None, str, list[Reply]]:
  """Returns the choice (None after two unusable replies), the reason, the replies."""
  messages = [
    Message("system", PROMPTS[runs.SELECTOR]),
    Message("user", _shown(task, answered)),
  ]
  replies: list[Reply] = []
  for _ in range(2):
    try:
      reply = backend(runs.SELECTOR, messages)
    except Unsolvable:  # the candidates exceed the model's context
      break
    replies.append(reply)
    # A cut-off reply could have continued to another choice.
    best = _BEST.search(reply.text)
    if best and not reply.cut and 1 <= int(best[1]) <= len(answered):
      reason = _WHY.search(reply.text)
      why = reason[1].strip() if reason else ""
      return answered[int(best[1]) - 1], why, replies
    expected = f"a line 'BEST: <number>' with a number from 1 to {len(answered)}"
    messages += [
      Message("assistant", reply.text),
      Message("user", f"Your reply could not be used: expected {expected}."),
    ]
  return None, "", replies


def figures(
  tasks: Sequence[Task],
  selections: Mapping[str, Selection],
  rewards: Mapping[tuple[str, int], float],
) -> dict[str, Any]:
  """Summarises the selections, by task id, and the rewards, by task id and sample.

  Returns:
    Mean rewards over the tasks with a finished run (None without any): `right` (the
    selected run; 0 without an answer), `first` (sample 0, or else the lowest sample)
    and `any` (the best run); `tasks` and `how` (counts); and the selector's tokens.
  """
  # --- Rewards by task and sample; none for a task with only failed runs.
  by_task: dict[str, dict[int, float]] = {}
  for (task_id, sample), reward in rewards.items():
    by_task.setdefault(task_id, {})[sample] = reward

  # --- Every task's selected run, with the first and the best run.
  right: list[float] = []
  first: list[float] = []
  best: list[float] = []
  how: collections.Counter[str] = collections.Counter()
  tokens = {"prompt": 0, "cached": 0, "completion": 0}
  for task in tasks:
    if task.id not in by_task:
      continue
    of_task = by_task[task.id]
    selection = selections[task.id]
    # Without an answer no run is taken: the task counts as wrong.
    right.append(0.0 if selection.sample is None else of_task[selection.sample])
    first.append(of_task[min(of_task)])
    best.append(max(of_task.values()))
    how[selection.how] += 1
    for name in tokens:
      tokens[name] += getattr(selection, name)

  def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

  return {
    "tasks": len(right),
    "right": mean(right),
    "first": mean(first),
    "any": mean(best),
    "how": dict(sorted(how.items())),
    **tokens,
  }


def _quality(run: Run) -> tuple[int, int, int]:
  """Orders agreeing runs: verified runs first, then fewer calls, then earlier."""
  return (run.status.value != "ended", len(run.calls), run.sample)


def _shown(task: Task, answered: Sequence[Run]) -> str:
  parts = [f"Question: {task.question}"]
  for number, run in enumerate(answered, 1):
    # A header that no content can forge: see `render`.
    parts.append(f"\n[candidate {number} of {len(answered)}]")
    for event in run.events:
      if event.kind in _SHOWN:
        content = cut_middle(event.content, _MAX_CHARS)
        parts.append(render(dataclasses.replace(event, content=content)))
    answer = cut_middle(run.prediction or "", _MAX_CHARS)
    parts.append(render(Event(runs.SOLVER, "answer", answer)))
  return "\n".join(parts)
