"""Hidden tests as a task has them, and how a program meets them."""

from __future__ import annotations

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.rewards.code.grader import CodeGrader


def task(tests: dict | None) -> Task:
  """A code task with these tests."""
  return Task("t", "add", ("-",), Kind.CODE, meta={"tests": tests})


def outcome(grader: CodeGrader, tests: dict, program: str) -> tuple[float, str]:
  """The reward of a program, and what is on record of it."""
  graded = grader.grade(task(tests), program)
  return graded.answer, graded.record["outcome"]
