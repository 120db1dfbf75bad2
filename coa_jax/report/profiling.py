"""Traces some steps for XProf: the work of devices and host over time.

XProf and TensorBoard's profile plug-in read the trace (`pip install xprof`), and
ui.perfetto.dev reads its `trace.json.gz`. Rollouts, weight transfer to the sampler and
learning are named in the trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import jax

from coa_jax.report.metrics import say

FOLDER = "profile"


def traced(
  steps: Iterable[int],
  profile: tuple[int, ...],
  stage: str,
  workdir: str,
  offset: int = 0,
) -> Iterator[int]:
  """Yields the steps, and traces the requested ones.

  Args:
    steps: the stage's step numbers.
    profile: `log.profile`: the first traced step and the first untraced one after it;
      () for none.
    stage: the steps' name in the trace.
    workdir: the run's directory; the trace goes to its folder `profile`.
    offset: added to a step number, gives the number in metrics.jsonl.
  """
  if not profile:
    yield from steps
    return
  first, end = profile
  folder = os.path.join(workdir, FOLDER)
  is_tracing = False
  try:
    for step in steps:
      number = step + offset
      if first <= number < end and not is_tracing:
        jax.profiler.start_trace(folder)
        is_tracing = True
      elif number >= end and is_tracing:
        is_tracing = _stop(folder)
      with jax.profiler.StepTraceAnnotation(stage, step_num=number):
        yield step
  finally:  # the run may end before step `end`
    if is_tracing:
      _stop(folder)


def _stop(folder: str) -> bool:
  """Ends and writes the trace; returns False, the new `is_tracing`."""
  jax.profiler.stop_trace()
  say(f"the profile is in {folder}; look into it with: xprof --logdir={folder}")
  return False
