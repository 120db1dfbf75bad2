"""Reward functions as a user would write them, for the tests of `grader`."""

from __future__ import annotations

import numpy as np

from coa_jax.rewards.graded import Ungradable


def length(task, answer, trajectory):
  """Half for any answer, all for a long one; and the trajectory is at hand."""
  long = len(answer or "") > 3
  return {"answer": 0.5 + 0.5 * long, "calls": len(trajectory.calls)}


def plain(task, answer, trajectory):
  """One number."""
  return answer == task.answers[0]


def down(task, answer, trajectory):
  """A service that is not there."""
  raise Ungradable("my service is down")


def fails(task, answer, trajectory):
  """A function with a mistake."""
  return answer.no_such_method()


def nonsense(task, answer, trajectory):
  """No reward."""
  return {"answer": 3.0}


def unnumbered(task, answer, trajectory):
  """No number."""
  return {"answer": 1.0, "why": "because"}


def collides(task, answer, trajectory):
  """Parts of names that other numbers have."""
  return {"answer": 1.0, "format": 0.0, "loss": 3.0}


def numpys(task, answer, trajectory):
  """What comparing and averaging arrays gives."""
  share = np.mean(np.array([0.0, 1.0], np.float32))
  return {"answer": np.array([1]).all(), "share": share, "n": np.int64(2)}
