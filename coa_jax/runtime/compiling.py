"""Compiles programs ahead of work, with progress: a large model takes minutes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import jax

from coa_jax.runtime import heartbeat

_AT_ONCE = 8  # programs; each uses some GB of host memory
_SAY_S = 10.0  # between two progress lines
_TURN = threading.Lock()  # held while compiling in turn


def compile_all(
  of: str,
  lowered: Sequence[Callable[[], jax.stages.Lowered]],
  replica_on: str = "",
) -> None:
  """Compiles programs in parallel; reports progress on standard error.

  JAX then runs these programs without recompiling them, and its persistent cache, if
  enabled, has them at the next start. Only process 0 writes to the cache. On GPUs all
  replicas share one entry per program: a process's replicas compile in turn, so that
  all but the first find the entry. On TPUs each replica has its own entry, because the
  compiler makes a different program for other chips: replicas of later processes are
  recompiled at every start.

  Args:
    replica_on: the replica's backend; "" if the programs belong to no replica.
  """
  in_turn = replica_on not in ("", "tpu") and jax.config.jax_compilation_cache_dir
  at_once = min(_AT_ONCE, os.cpu_count() or 1)
  turn = _TURN if in_turn else contextlib.nullcontext()
  with turn, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
    began = said = time.monotonic()
    total = len(lowered)
    print(f"compiling programs of {of}: {total}", file=sys.stderr)
    compiling = [
      pool.submit(lambda trace=trace: trace().compile()) for trace in lowered
    ]
    done = concurrent.futures.as_completed(compiling)
    for number, program in enumerate(done, 1):
      program.result()  # raises if compilation failed
      heartbeat.beat()
      now = time.monotonic()
      if now - said > _SAY_S or number == total:
        said = now
        line = f"compiled programs of {of}: {number} of {total} in {now - began:.0f} s"
        print(line, file=sys.stderr)
