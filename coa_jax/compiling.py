"""Compiling before work begins, with progress: for a large model it takes minutes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import jax

from coa_jax import heartbeat

_AT_ONCE = 8  # programs; each takes some GB of the host's memory
_SAY_S = 10.0  # between two lines that say how far compiling is
_TURN = threading.Lock()  # of those who compile one after the other


def compile_all(
  of: str,
  lowered: Sequence[Callable[[], jax.stages.Lowered]],
  take_turns: bool = False,
) -> None:
  """Compiles programs beside each other; says on standard error how far it is.

  JAX calls what was compiled so without compiling it again.

  Args:
    of: whose they are, for messages.
    lowered: what traces each.
    take_turns: whether other threads compile programs that JAX's persistent cache takes
      for the same: one after the other, so that all but the first find them there.
  """
  shared = take_turns and jax.config.jax_compilation_cache_dir
  with _TURN if shared else contextlib.nullcontext():
    _compile_all(of, lowered)


def _compile_all(of: str, lowered: Sequence[Callable[[], jax.stages.Lowered]]) -> None:
  began = said = time.monotonic()
  total = len(lowered)
  print(f"compiling programs of {of}: {total}", file=sys.stderr)
  with concurrent.futures.ThreadPoolExecutor(
    min(_AT_ONCE, os.cpu_count() or 1)
  ) as pool:
    compiling = [
      pool.submit(lambda trace=trace: trace().compile()) for trace in lowered
    ]
    done = concurrent.futures.as_completed(compiling)
    for number, program in enumerate(done, 1):
      program.result()  # raises where it does not compile
      heartbeat.beat()
      now = time.monotonic()
      if now - said > _SAY_S or number == len(lowered):
        said = now
        line = f"compiled programs of {of}: {number} of {total} in {now - began:.0f} s"
        print(line, file=sys.stderr)
