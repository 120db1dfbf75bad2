"""Scores answers: pass@1, pass@k, best of k by vote, and confidence intervals.

Figures are means over tasks, so a task's weight does not depend on its number of
samples; only `malformed_rate` is a share of calls. Attempts ended by infrastructure
failures are excluded from all denominators and counted separately.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np

from coa_jax.protocol import roles
from coa_jax.protocol.parser import content_fault
from coa_jax.protocol.trajectory import Author, Status, ToolCall, Trajectory, Usage
from coa_jax.report import set_figures
from coa_jax.rewards import answer_of
from coa_jax.rewards.best_of import CHOSEN
from coa_jax.rewards.votes import vote_key

RESAMPLES = 2000
KS = (3,)  # default k of pass@k and votes


@dataclasses.dataclass(frozen=True)
class Scored:
  """An attempt's data for the figures: a few hundred bytes for any attempt.

  Attributes:
    task_id: as in the trajectory, like `sample`, `status`, `reward_parts` and `usage`.
    family: the task's family; "" for none.
    calls: the number of tool calls.
    malformed: the number of malformed calls, by the function `malformed`.
    vote: the answer's `vote_key`; None without an answer.
    logp: the result of `mean_logp`.
    evidence: the result of `set_figures.evidence_recall`.
    chosen: figures for which this attempt was chosen among its task's; see `best_of`.
  """

  task_id: str
  sample: int
  status: Status
  reward_parts: dict[str, float]
  usage: Usage
  family: str
  calls: int
  malformed: int
  vote: str | None
  logp: float
  evidence: float | None = None
  chosen: list[str] = dataclasses.field(default_factory=list)

  @classmethod
  def from_json(cls, row: dict[str, Any]) -> Scored:
    """Builds an instance from `dataclasses.asdict` JSON."""
    status = Status(row["status"])
    return cls(**{**row, "status": status, "usage": Usage(**row["usage"])})


Attempt = TypeVar("Attempt", Trajectory, Scored)


def scored(
  attempt: Trajectory | Scored,
  tools: Collection[str] | None = roles.TOOLS,
  evidence: Collection[str] = (),
) -> Scored:
  """Returns an attempt's data for the figures.

  Args:
    attempt: returned as it is if it is scored.
    tools: as in `malformed`; None if they are an agent's own.
    evidence: as in `set_figures.evidence_recall`.
  """
  if isinstance(attempt, Scored):
    return attempt
  t = attempt
  answer = answer_of(t)
  return Scored(
    task_id=t.task_id,
    sample=t.sample,
    status=t.status,
    reward_parts=t.reward_parts,
    usage=t.usage,
    family=t.meta.get("family", ""),
    calls=len(t.calls),
    malformed=0 if tools is None else sum(malformed(c, tools) for c in t.calls),
    vote=vote_key(answer) if answer else None,
    logp=mean_logp(t),
    evidence=set_figures.evidence_recall(t, evidence),
    chosen=list(t.meta.get(CHOSEN, ())),
  )


def graded(attempts: Sequence[Attempt]) -> list[Attempt]:
  """Selects the attempts that count for the model: all but infrastructure failures."""
  return [t for t in attempts if t.status != Status.INFRASTRUCTURE]


def by_task(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
  """Groups attempts by task id, sorted by `sample`; tasks in order of appearance."""
  groups: dict[str, list[Attempt]] = {}  # a dict keeps the order of appearance
  for t in attempts:
    groups.setdefault(t.task_id, []).append(t)
  return {k: sorted(v, key=lambda t: t.sample) for k, v in groups.items()}


def correct(attempt: Trajectory | Scored) -> bool:
  """Whether the attempt's answer is right, in any format.

  Raises:
    ValueError: the attempt has not been graded.
  """
  if "answer" not in attempt.reward_parts:
    raise ValueError(
      f"task {attempt.task_id!r} sample {attempt.sample}: reward part 'answer' is "
      f"missing (status {attempt.status.value}); grade before scoring"
    )
  return attempt.reward_parts["answer"] >= 1


def pass_at_k(n: int, c: int, k: int) -> float:
  """Computes the unbiased estimate of pass@k from n samples, c of them right.

  1 - C(n-c, k) / C(n, k); Chen et al. 2021, arXiv 2107.03374, equation 1.

  Raises:
    ValueError: fewer than k samples.
  """
  if not 0 <= c <= n or not 1 <= k <= n:
    raise ValueError(f"pass@{k} needs at least {k} samples; got n={n}, c={c}")
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(
  over: Sequence[float], under: Sequence[float] | None = None, seed: int = 0
) -> list[float] | None:
  """Computes a 95 % percentile-bootstrap interval of sum(over) / sum(under).

  Args:
    over: one value per task.
    under: one weight per task; by default 1 each, so the figure is a mean.
    seed: the resampling seed; equal inputs give equal intervals.

  Returns:
    [low, high], or None if there is no task or no resample has any weight. The width
    is zero if all tasks agree: the bootstrap cannot know unseen outcomes. For
    proportions see `proportion_interval`.
  """
  over, under = _as_arrays(over, under)
  sums = resample_sums(np.stack([over, under], axis=1), seed)
  # A resample with zero total weight has no quotient.
  values = sums[sums[:, 1] > 0]
  if not len(values):
    return None
  low, high = np.percentile(values[:, 0] / values[:, 1], [2.5, 97.5])
  return [float(low), float(high)]


def _as_arrays(
  over: Sequence[float], under: Sequence[float] | None
) -> tuple[np.ndarray, np.ndarray]:
  over = np.asarray(over, float)
  if under is None:
    return over, np.ones_like(over)
  return over, np.asarray(under, float)


def proportion_interval(
  over: Sequence[float], under: Sequence[float] | None = None
) -> list[float] | None:
  """Computes the 95 % interval of a proportion sum(over) / sum(under), over tasks.

  Uses Wilson's score interval, which never has zero width, if every task says yes or
  no, or if all tasks have the same share (as with a single task). Otherwise, e.g. for
  several samples per task, uses the bootstrap over tasks.

  Args:
    over: each task's numerator, from 0 to its `under`.
    under: each task's denominator; by default 1 each.

  Returns:
    [low, high], or None if the sum of `under` is 0.
  """
  over, under = _as_arrays(over, under)
  # A task with denominator 0 says nothing about the proportion.
  over = over[under > 0]
  under = under[under > 0]
  share = over / under
  # n is the number of tasks, not of samples, even if all agree. A share varies no more
  # than a yes or no, so the interval is not too narrow.
  yes_or_no = (under == 1) & np.isin(share, (0, 1))
  if yes_or_no.all() or (share == share[0]).all():
    return wilson(math.fsum(share), len(share))
  return interval(over, under)


def wilson(right: float, tasks: int) -> list[float] | None:
  """Computes Wilson's 95 % score interval of a proportion (1927); None for no tasks.

  A task with several samples counts by its share.
  """
  if not tasks:
    return None
  # At the ends both terms are equal; explicit 0 and 1 avoid rounding errors.
  z = statistics.NormalDist().inv_cdf(0.975)
  share = right / tasks
  middle = share + z**2 / (2 * tasks)
  half = z * math.sqrt(share * (1 - share) / tasks + z**2 / (4 * tasks**2))
  scale = 1 + z**2 / tasks
  low = (middle - half) / scale if right else 0.0
  high = (middle + half) / scale if right < tasks else 1.0
  return [low, high]


def resample_sums(columns: np.ndarray, seed: int = 0) -> np.ndarray:
  """Sums columns [tasks, m] over bootstrap resamples of tasks: [RESAMPLES, m]."""
  n = len(columns)
  if n == 0:
    return np.zeros((0, *columns.shape[1:]))
  # A sum depends only on how often each task is drawn. Drawing these counts is
  # equivalent to drawing tasks, and needs no array of all draws.
  draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
  return draws @ columns


def mean_logp(trajectory: Trajectory) -> float:
  """Averages log-probs over policy tokens (nats); -inf if unknown."""
  logps = [x for s in trajectory.segments if s.author == Author.POLICY for x in s.logps]
  return statistics.fmean(logps) if logps else -math.inf


def best_of_k(attempts: Sequence[Scored], k: int) -> Scored:
  """Chooses one of the first k attempts by a majority vote over answers.

  Attempts without an answer have no vote. A tie goes to the answer given with the
  highest mean log-prob per policy token, then to the earlier answer. The same rule
  chooses among the winning answer's attempts.

  Raises:
    ValueError: fewer than k attempts.
  """
  if len(attempts) < k:
    raise ValueError(f"best of {k} needs {k} attempts; got {len(attempts)}")
  attempts = attempts[:k]
  # --- The votes, by key.
  groups: dict[str, list[Scored]] = {}
  for t in attempts:
    if t.vote is not None:
      groups.setdefault(t.vote, []).append(t)
  if not groups:
    return attempts[0]

  # --- The count. `max` returns the first of equals: the earlier attempt.
  most = max(groups.values(), key=lambda g: (len(g), max(t.logp for t in g)))
  return max(most, key=lambda t: t.logp)


def malformed(call: ToolCall, tools: Collection[str] = roles.TOOLS) -> bool:
  """Whether the call itself was wrong; a program that raises is not malformed."""
  if call.name not in tools or roles.find_tag(call.arguments) is not None:
    return True
  return content_fault(call.name, call.arguments) is not None


def summary(
  greedy: Sequence[Trajectory | Scored],
  sampled: Sequence[Trajectory | Scored],
  tools: Collection[str] | None = roles.TOOLS,
  ks: Sequence[int] = KS,
) -> dict[str, Any]:
  """Computes one model's figures on one set of tasks.

  budget: all figures stand side by side.

  Args:
    greedy: one attempt per task; several are averaged.
    sampled: several attempts per task.
    tools: the valid tool names; None for an agent's own, without `malformed_rate`.
    ks: each k of pass@k and of votes.

  Returns:
    `pass1_greedy`, `pass1_sampled`; for each k, `passK` and `best_of_K`, e.g. `pass3`
    (over tasks with at least k graded samples); each figure in `Scored.chosen`, over
    tasks with a choice; `tokens_per_task`, `generated_tokens_per_task`,
    `tool_calls_per_task` (means per attempt: greedy attempts if there are any, else
    sampled), `malformed_rate` (per attempted call) and `protocol_ok` (per attempt,
    greedy and sampled); `ci95`, figure -> [low, high], by `interval` for means per task
    and by `proportion_interval` for all others; `calibration_error`, if a judge read
    confidences; `attempted`, `accuracy_given_attempted` and `f1_given_attempted`, if a
    judge gave SimpleQA's grades; `evidence_recall`, of tasks that name their evidence;
    `status`, name -> number of attempts; `tasks`, the number of tasks with graded
    attempts. A figure without data is None.
  """
  # --- Attempts that count for the model, by task.
  greedy = [scored(t, tools) for t in greedy]
  sampled = [scored(t, tools) for t in sampled]
  status = collections.Counter(t.status.value for t in (*greedy, *sampled))
  greedy = graded(greedy)
  sampled = graded(sampled)
  greedy_tasks = list(by_task(greedy).values())
  sampled_tasks = list(by_task(sampled).values())
  cost_tasks = greedy_tasks or sampled_tasks  # the cost of an answer in normal use
  tasks = list(by_task([*greedy, *sampled]).values())

  # --- Each task's calls: the malformed rate is a share of calls, not of tasks.
  call_counts = [0.0] * len(tasks)
  if tools is not None:
    call_counts = [float(sum(t.calls for t in attempts)) for attempts in tasks]
  malformed_counts = [float(sum(t.malformed for t in attempts)) for attempts in tasks]

  # --- One number for each task; a figure is their mean.
  passes: dict[str, list[float]] = {}
  votes: dict[str, list[float]] = {}
  for k in ks:
    # Fewer than k samples say nothing about k.
    enough = [attempts for attempts in sampled_tasks if len(attempts) >= k]
    passes[f"pass{k}"] = [
      pass_at_k(len(attempts), sum(map(correct, attempts)), k) for attempts in enough
    ]
    votes[f"best_of_{k}"] = _task_means(
      [[best_of_k(attempts, k)] for attempts in enough], correct
    )
  for name in sorted({name for t in sampled for name in t.chosen}):
    chosen = by_task([t for t in sampled if name in t.chosen])
    votes[name] = _task_means(chosen.values(), correct)
  by_figure: dict[str, list[float]] = {
    "pass1_greedy": _task_means(greedy_tasks, correct),
    "pass1_sampled": _task_means(sampled_tasks, correct),
    **passes,
    **votes,
    "tokens_per_task": _task_means(cost_tasks, lambda t: t.usage.total),
    "generated_tokens_per_task": _task_means(cost_tasks, lambda t: t.usage.generated),
    "tool_calls_per_task": _task_means(cost_tasks, lambda t: t.usage.tool_calls),
    "malformed_rate": malformed_counts,
    "protocol_ok": _task_means(tasks, _well_formed),
  }
  with_evidence = [group for group in tasks if group[0].evidence is not None]
  if with_evidence:
    by_figure["evidence_recall"] = _task_means(
      with_evidence, lambda t: t.evidence or 0.0
    )

  # --- The record: each figure and its interval.
  out: dict[str, Any] = {"ci95": {}}
  for name, values in by_figure.items():
    under = call_counts if name == "malformed_rate" else [1.0] * len(values)
    total = sum(under)
    out[name] = sum(values) / total if total else None
    if name.endswith("_per_task"):  # a count; all others are proportions
      out["ci95"][name] = interval(values, under)
    else:
      out["ci95"][name] = proportion_interval(values, under)
  for part, figures in (
    ("confidence", set_figures.calibration_error),
    ("attempted", set_figures.given_attempted),
  ):
    pairs = [
      (t.reward_parts[part], float(correct(t)))
      for t in itertools.chain.from_iterable(tasks)
      if part in t.reward_parts
    ]
    if pairs:
      out.update(figures(pairs))
  out["status"] = {s.value: status[s.value] for s in Status}
  out["tasks"] = len(tasks)
  return out


def _well_formed(attempt: Scored) -> bool:
  return attempt.reward_parts.get("format", 0.0) >= 1


def _task_means(
  groups: Collection[Sequence[Scored]], value: Callable[[Scored], float]
) -> list[float]:
  return [statistics.fmean(float(value(t)) for t in group) for group in groups]


def by_group(
  greedy: Sequence[Attempt],
  sampled: Sequence[Attempt],
  group: Callable[[Attempt], str],
  tools: Collection[str] | None = roles.TOOLS,
  ks: Sequence[int] = KS,
) -> dict[str, dict[str, Any]]:
  """Computes `summary` for each task group, sorted by group name."""
  # Group -> its greedy and its sampled attempts.
  groups: dict[str, tuple[list[Attempt], list[Attempt]]] = {}
  for i, attempts in enumerate((greedy, sampled)):
    for t in attempts:
      groups.setdefault(group(t), ([], []))[i].append(t)
  return {name: summary(*groups[name], tools, ks) for name in sorted(groups)}
