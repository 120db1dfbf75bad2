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

from coa_jax.runtime import heartbeat

_AT_ONCE = 8  # programs; each takes some GB of the host's memory
_SAY_S = 10.0  # between two lines that say how far compiling is
_TURN = threading.Lock()  # of those who compile one after the other


def compile_all(
  of: str,
  lowered: Sequence[Callable[[], jax.stages.Lowered]],
  replica_on: str = "",
) -> None:
  """Compiles programs beside each other; says on standard error how far it is.

  JAX calls what was compiled so without compiling it again, and its persistent cache,
  if there is one, has it at the next start. Only process 0 writes there. On GPUs one
  entry serves the programs of all replicas of the model: those of a process compile one
  after the other, so that all but the first find them there. Elsewhere each replica has
  an entry of its own, since a TPU's compiler makes another program for other chips:
  replicas of later processes are compiled again at every start.

  Args:
    of: whose they are, for messages.
    lowered: what traces each.
    replica_on: the backend, where they are a replica's.
  """
  in_turn = replica_on not in ("", "tpu") and jax.config.jax_compilation_cache_dir
  with _TURN if in_turn else contextlib.nullcontext():
    _compile_all(of, lowered)


def _compile_all(of: str, lowered: Sequence[Callable[[], jax.stages.Lowered]]) -> None:
  began = said = time.monotonic()
  total = len(lowered)
  print(f"compiling programs of {of}: {total}", file=sys.stderr)
  at_once = min(_AT_ONCE, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
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
