"""Compiling before work begins, with progress: for a large model it takes minutes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import compilation_cache, compiler

from coa_jax import heartbeat

_AT_ONCE = 8  # programs; each takes some GB of the host's memory
_SAY_S = 10.0  # between two lines that say how far compiling is
_TURN = threading.Lock()  # of those who compile one after the other


class _Thread(threading.local):
  """What is true of the programs that a thread compiles."""

  own = False  # they run on this process's devices alone


_thread = _Thread()


def compile_all(
  of: str,
  lowered: Sequence[Callable[[], jax.stages.Lowered]],
  replica_on: str = "",
) -> None:
  """Compiles programs beside each other; says on standard error how far it is.

  JAX calls what was compiled so without compiling it again, and its persistent cache,
  if there is one, has it at the next start. There the programs of one replica of the
  model are another matter than those that all processes run together:

  * On GPUs one entry is for the programs of all replicas. Those of a process compile
    one after the other, so that all but the first find them there.
  * Elsewhere each replica has its own, since a TPU's compiler makes another program for
    other chips. So each process writes its replicas'. (JAX lets the first alone write.)

  Args:
    of: whose they are, for messages.
    lowered: what traces each.
    replica_on: the backend, where they are a replica's.
  """
  in_turn = replica_on not in ("", "tpu") and jax.config.jax_compilation_cache_dir
  with _TURN if in_turn else contextlib.nullcontext():
    _compile_all(of, lowered, own=replica_on not in ("", "gpu"))


def _compile_all(
  of: str, lowered: Sequence[Callable[[], jax.stages.Lowered]], own: bool
) -> None:
  began = said = time.monotonic()
  total = len(lowered)
  print(f"compiling programs of {of}: {total}", file=sys.stderr)
  at_once = min(_AT_ONCE, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(
    at_once, initializer=setattr, initargs=(_thread, "own", own)
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


# What JAX calls to write a program, as of 0.10 to 0.12; private, so another version may
# not have it so. There processes after the first compile their replicas' programs at
# every start.
_write = getattr(compiler, "_cache_write", None)
_WRITTEN = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")


def _write_own(
  key: str, seconds: float, name: str, backend: Any, program: Any, *more: Any
) -> None:
  """Writes a program into JAX's persistent cache, from the process that it is of."""
  if not _thread.own or jax.process_index() == 0:
    _write(key, seconds, name, backend, program, *more)
  elif seconds >= jax.config.jax_persistent_cache_min_compile_time_secs:
    try:
      compilation_cache.put_executable_and_time(
        key, name, program, backend, int(seconds)
      )
    except Exception as e:  # of a disk or a bucket; the program is there all the same
      warnings.warn(f"{name} is not kept for the next start: {e}", stacklevel=2)


if _write and tuple(inspect.signature(_write).parameters)[:5] == _WRITTEN:
  compiler._cache_write = _write_own
