"""Trajectories written span by span, and a judge: what tests of filters share."""

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
  """A task whose answer is x, and a trajectory of these (tag, content)."""
  task = Task(f"t{number}", "q?", ("x",))
  segments = [
    Segment(Author.TOOL if r == "observation" else Author.POLICY, r, wrap(r, c))
    for r, c in spans
  ]
  calls = [ToolCall(r, c) for r, c in spans if r in UNIFIED.tools]
  return task, Trajectory(task.id, segments, calls)


def judge(task, prediction):
  """The reward of an answer: 1 if it is one of the task's."""
  return float(prediction in task.answers)
