"""A contestant's process: JSON lines in, and out, what each turn took.

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

# Takes the fields of a line, and returns what to answer beside the time.
Turn = Callable[..., dict[str, Any]]


def serve(
  start: Callable[[], Turn], peak_mb: Callable[[], float] | None = None
) -> None:
  """Answers {"ready": true} once started, then every line after its turn.

  Args:
    start: loads what turns need.
    peak_mb: the most memory so far; the process's own where None.
  """
  # What libraries print would stand between the answers.
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)

  def answer(**values: Any) -> None:
    print(json.dumps(values), file=answers, flush=True)

  turn = start()
  answer(ready=True)
  for line in sys.stdin:
    asked = json.loads(line)
    wall, cpu = time.perf_counter(), time.process_time()
    values = turn(**asked)
    took = {
      "seconds": time.perf_counter() - wall,
      "cpu_seconds": time.process_time() - cpu,
    }
    answer(**took, **values, peak_mb=(peak_mb or own_peak_mb)())


def own_peak_mb() -> float:
  """ru_maxrss of this process in MiB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
