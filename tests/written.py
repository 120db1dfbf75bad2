"""Trajectories written span by span, and a judge, for tests of filters."""

from __future__ import annotations

from coa_jax.data.tasks.task import Task
from coa_jax.protocol.roles import get_variant, wrap
from coa_jax.protocol.trajectory import Author, Segment, ToolCall, Trajectory

UNIFIED = get_variant("unified")
SEARCH = ("wiki_search", "Tarn Hollow")
SEEN = ("observation", "a town")
END = [("suggested_answer", "x"), ("double_check", "4"), ("answer", "x")]
PLAIN = [("think", "t"), ("plan", "p"), ("think", "t"), SEARCH, SEEN]
GOOD = [*PLAIN, ("reflection", "r"), *END]


def make(spans, number=0) -> tuple[Task, Trajectory]:
  """A task with the answer x, and a trajectory with these (tag, content) spans."""
  task = Task(f"t{number}", "q?", ("x",))
  segments = [
    Segment(Author.TOOL if r == "observation" else Author.POLICY, r, wrap(r, c))
    for r, c in spans
  ]
  calls = [ToolCall(r, c) for r, c in spans if r in UNIFIED.tools]
  return task, Trajectory(task.id, segments, calls)


def judge(task, prediction):
  """Returns 1 if the answer is one of the task's."""
  return float(prediction in task.answers)
