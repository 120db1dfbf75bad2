"""Reward functions as a user would write them, for test_grader.py."""

from __future__ import annotations

import numpy as np

from coa_jax.rewards.graded import Ungradable


def length(task, answer, trajectory):
  """0.5 for any answer, 1.0 for a long one; also reads the trajectory."""
  long = len(answer or "") > 3
  return {"answer": 0.5 + 0.5 * long, "calls": len(trajectory.calls)}


def plain(task, answer, trajectory):
  """One value, without parts."""
  return answer == task.answers[0]


def down(task, answer, trajectory):
  """A service that is unreachable."""
  raise Ungradable("my service is down")


def fails(task, answer, trajectory):
  """A function with a bug."""
  return answer.no_such_method()


def nonsense(task, answer, trajectory):
  """A reward above 1."""
  return {"answer": 3.0}


def unnumbered(task, answer, trajectory):
  """A part that is not a number."""
  return {"answer": 1.0, "why": "because"}


def collides(task, answer, trajectory):
  """Part names that other logged numbers have."""
  return {"answer": 1.0, "format": 0.0, "loss": 3.0}


def numpys(task, answer, trajectory):
  """NumPy scalars, as from array comparisons and means."""
  share = np.mean(np.array([0.0, 1.0], np.float32))
  return {"answer": np.array([1]).all(), "share": share, "n": np.int64(2)}
