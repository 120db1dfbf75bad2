"""Figures that some benchmarks publish in addition to the score."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Sequence

import numpy as np

from coa_jax.protocol.trajectory import Trajectory

Pairs = Sequence[tuple[float, float]]  # at least one


def calibration_error(pairs: Pairs, size: int = 100) -> dict[str, float]:
  """Computes HLE's RMS calibration error from (confidence, 1 if right else 0).

  The pairs are sorted by confidence and cut into bins of `size`, the rest joining the
  last bin; the error is the root of the mean of (mean confidence - accuracy)^2,
  weighted by the bins' sizes (arXiv 2501.14249).
  """
  ordered = np.array(sorted(pairs, key=lambda pair: pair[0]))
  bins = np.array_split(
    ordered, [size * n for n in range(1, max(len(ordered) // size, 1))]
  )
  squares = [len(b) * float(b[:, 0].mean() - b[:, 1].mean()) ** 2 for b in bins]
  return {"calibration_error": math.sqrt(math.fsum(squares) / len(ordered))}


def given_attempted(pairs: Pairs) -> dict[str, float]:
  """Computes SimpleQA's figures from (1 if attempted else 0, 1 if right else 0).

  `f1_given_attempted` is the harmonic mean of the shares of right answers among all and
  among the attempted (arXiv 2411.04368).
  """
  attempted = statistics.fmean(pair[0] for pair in pairs)
  right = statistics.fmean(pair[1] for pair in pairs)
  accuracy = right / attempted if attempted else 0.0
  f1 = 2 * right * accuracy / (right + accuracy) if right else 0.0
  return {
    "attempted": attempted,
    "accuracy_given_attempted": accuracy,
    "f1_given_attempted": f1,
  }


def evidence_recall(t: Trajectory, names: Collection[str]) -> float | None:
  """Returns the share of a task's evidence that its tools showed; None without any.

  Args:
    t: the attempt.
    names: the documents' titles. A document counts as shown if a line of a result
      begins with its title, or with a number and its title, as in `wiki_search`.
  """
  if not names:
    return None
  results = "\n".join(call.result for call in t.calls)
  found = [
    re.search(rf"^(?:\d+\. )?{re.escape(name)}(?!\w|\. )", results, re.MULTILINE)
    for name in names
  ]
  return sum(map(bool, found)) / len(found)
