"""Rewards for answers: extraction from a text, and grading by text alone.

`grader` computes a trajectory's whole reward, hidden tests and judges included.
"""

from __future__ import annotations

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.protocol import roles
from coa_jax.protocol.roles import ANSWER
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rewards import math, qa


def written_answer(text: str) -> str | None:
  """Returns the last closed `answer` span's content, stripped; None if there is none.

  A trajectory's text has escaped observations, so none can pass for an answer.
  """
  # From the end: the last answer counts. An answer without a closing tag was cut off,
  # so the answer before counts.
  before, closing, _ = text.rpartition(roles.close_tag(ANSWER))
  _, opening, content = before.rpartition(roles.open_tag(ANSWER))
  if closing and opening:
    return content.strip()
  return None


AGENT_ANSWER = "agent_answer"  # in `meta`: what an agent's own loop returned


def answer_of(trajectory: Trajectory) -> str | None:
  """Returns a trajectory's answer: its agent's, or else its last `answer` span's."""
  if AGENT_ANSWER in trajectory.meta:
    return trajectory.meta[AGENT_ANSWER]
  return written_answer(trajectory.text)


def grade_known(task: Task, prediction: str | None) -> float | None:
  """As `grade`; None if no answer is known, or the task needs hidden tests."""
  if not task.answers or task.kind == Kind.CODE:
    return None
  return grade(task, prediction)


def grade(task: Task, prediction: str | None) -> float:
  """Grades an `answer` span's content: 1.0 right, 0.0 wrong or missing (None).

  Raises:
    ValueError: a code task, which needs its hidden tests run.
  """
  if task.kind == Kind.CODE:
    raise ValueError(
      f"task {task.id!r}: code tasks need hidden tests; their reward comes from "
      "running task.meta['tests'] in the sandbox, not from comparing text"
    )
  if prediction is None:
    return 0.0
  if task.kind == Kind.MATH:
    return float(math.equivalent(prediction, task.answers))
  return float(qa.every_part(prediction, task.answers))
