"""Code tasks with hidden tests, and the outcome of a program on them."""

from __future__ import annotations

from coa_jax.data.tasks.task import Kind, Task
from coa_jax.rewards.code.grader import CodeGrader


def task(tests: dict | None) -> Task:
  """A code task with these tests."""
  return Task("t", "add", ("-",), Kind.CODE, meta={"tests": tests})


def outcome(grader: CodeGrader, tests: dict, program: str) -> tuple[float, str]:
  """A program's reward and its recorded outcome."""
  graded = grader.grade(task(tests), program)
  return graded.answer, graded.record["outcome"]
