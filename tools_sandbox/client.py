"""`Sandbox`: runs programs and searches a corpus, with any back-end."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence

from tools_sandbox.host import pool
from tools_sandbox.host.session import CELLS_OF_CPU, Session
from tools_sandbox.jail import wire
from tools_sandbox.jail.wire import Result
from tools_sandbox.search import index as search
from tools_sandbox.search.index import Hit
from tools_sandbox.service.remote import RemoteConfig, RemotePool

BACKENDS = (*pool.BACKENDS, "remote")


class Sandbox:
  """Runs programs and searches a corpus. Thread-safe; close it or use `with`."""

  def __init__(
    self,
    slots: int = 4,
    timeout_s: float = wire.Limits.wall_s,
    memory_mb: int = wire.Limits.memory_mb,
    output_bytes: int = wire.Limits.output_bytes,
    preload: Sequence[str] = pool.DEFAULT_PRELOAD,
    corpus: str | None = None,
    index_cache: str | None = None,
    backend: str | None = "jail",
    remote: RemoteConfig | None = None,
  ):
    """Loads the corpus, if given; processes for programs start when first needed.

    Args:
      slots: the number of concurrent programs; not for `remote` (the services set it).
      timeout_s: the default wall and CPU seconds for a run.
      memory_mb: the default MiB for a run (see `wire.Limits`).
      output_bytes: bytes kept per output stream of a run.
      preload: modules imported ahead of every program, if installed; not for `remote`.
      corpus: a file for `search.read_corpus`, or None to disable search.
      index_cache: a directory for the corpus's index, which is named by the corpus's
        hash and memory-mapped after the first build; None to build it in memory each
        time.
      backend: "jail", "subprocess" for trusted programs (README.md), "remote" for
        services over HTTP, or None for search only.
      remote: the services for back-end `remote`.

    Raises:
      ValueError: a limit is out of range, the corpus is malformed, index_cache has no
        corpus, or a back-end's required argument is missing.
      FileNotFoundError: the corpus file does not exist.
      NoJail: this machine cannot build jails; the message names the missing
        requirement.
      RuntimeError: no service answers; the message says why.
    """
    # --- Refuse conflicting arguments before anything starts.
    if (backend == "remote") != (remote is not None):
      raise ValueError(
        f"backend {backend!r} and remote={remote!r}: one needs the other"
      )
    if index_cache is not None and corpus is None:
      raise ValueError("index_cache needs a corpus")

    # --- Default limits, corpus, back-end.
    self._limits = wire.Limits(
      wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb, output_bytes=output_bytes
    )
    self._index = None
    if corpus is not None:
      self._index = _open_index(corpus, index_cache)
    self._pool: pool.SandboxPool | RemotePool | None = None
    if remote is not None:
      self._pool = RemotePool(remote, self._limits)
    elif backend is not None:
      self._pool = pool.SandboxPool(slots, self._limits, preload, backend=backend)

  def run(
    self,
    program: str,
    stdin: str = "",
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    seed: int | None = None,
    clock_s: float | None = None,
  ) -> Result:
    """Runs a Python program in a fresh process.

    Args:
      program: Python source, run as `__main__`.
      stdin: the program's standard input.
      timeout_s: wall and CPU seconds; None for the sandbox's default.
      memory_mb: MiB of memory; None for the sandbox's default.
      seed: the random seed; None derives it from `program` and `stdin`.
      clock_s: Unix seconds for a stopped clock; None for the real one (see
        `wire.Limits`).

    Returns:
      The result; its verdict is `infrastructure` if the service failed.

    Raises:
      TypeError: program or stdin is not a string.
      ValueError: a limit is out of range, or the sandbox only searches.
      RuntimeError: the sandbox is closed.
    """
    if self._pool is None:
      raise ValueError("this sandbox has no back-end to run programs")
    limits = self._limits_with(
      wall_s=timeout_s, cpu_s=timeout_s, memory_mb=memory_mb, seed=seed, clock_s=clock_s
    )
    return self._pool.run(program, stdin, limits)

  def session(
    self,
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    cpu_s: float | None = None,
    wait_s: float | None = None,
    lease_s: float = wire.LEASE_S,
    seed: int | None = None,
    clock_s: float | None = None,
  ) -> Session:
    """Opens a session, in which programs share one process and its variables.

    Args:
      timeout_s: wall seconds per cell; None for the sandbox's default.
      memory_mb: MiB for the session; None for the sandbox's default.
      cpu_s: CPU seconds for the session; None for ten times `timeout_s`.
      wait_s: seconds to wait for a slot (held until the session ends); None waits
        without a limit; `remote` ignores it (its config sets the wait).
      lease_s: idle seconds before the session is closed.
      seed: as in `run`, set once at the start.
      clock_s: as in `run`.

    Raises:
      ValueError: a limit is out of range, or the back-end has no sessions (only "jail"
        and "remote" with our own services have them).
      TimeoutError: no slot became free in time.
      RuntimeError: the sandbox is closed, or the service failed.
    """
    if self._pool is None:
      raise ValueError("only back-ends 'jail' and 'remote' have sessions")

    # --- The limits; CPU time covers all cells together.
    if cpu_s is None:
      cpu_s = CELLS_OF_CPU * (self._limits.wall_s if timeout_s is None else timeout_s)
    limits = self._limits_with(
      wall_s=timeout_s, cpu_s=cpu_s, memory_mb=memory_mb, seed=seed, clock_s=clock_s
    )

    if isinstance(self._pool, RemotePool):
      return self._pool.session(limits, lease_s)
    return self._pool.session(limits, wait_s, lease_s)

  def _limits_with(self, **changes: float | None) -> wire.Limits:
    """Returns the sandbox's limits with all changes except None."""
    # `replace` makes new limits, whose check refuses and names values out of range.
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(self._limits, **given)

  def search(self, query: str, k: int = 5) -> list[Hit]:
    """Finds at most k matching pages, best first; [] if none matches.

    Raises:
      ValueError: k is below 1, or the sandbox has no corpus.
    """
    if self._index is None:
      raise ValueError("this sandbox has no corpus to search")
    return self._index.search(query, k)

  def close(self) -> None:
    """Ends all the sandbox's programs and processes."""
    if self._pool is not None:
      self._pool.close()

  def __enter__(self) -> Sandbox:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _open_index(corpus: str, cache: str | None) -> search.SearchIndex:
  documents = search.read_corpus(corpus)
  if cache is None:
    return search.SearchIndex.build(documents, corpus)
  # The key is the content's hash, not name and time: a changed corpus gets a new index.
  with open(corpus, "rb") as f:
    key = hashlib.file_digest(f, "blake2b").hexdigest()[:32]
  # The suffix decides how the file is read, so the key includes the suffix.
  suffix = os.path.splitext(corpus)[1]
  directory = os.path.join(cache, f"{key}{suffix}-{search.FORMAT}")
  if not os.path.isdir(directory):
    os.makedirs(cache, exist_ok=True)
    # Build in a temporary folder, then rename: another process sees a complete index or
    # none. `tempfile` would create folders that other users of the cache cannot read.
    partial = os.path.join(cache, f"building-{secrets.token_hex(8)}")
    os.mkdir(partial)
    try:
      search.SearchIndex.build(documents, corpus).save(partial)
      os.rename(partial, directory)
    except OSError:
      if not os.path.isdir(directory):  # else another process was faster
        raise
    finally:
      shutil.rmtree(partial, ignore_errors=True)
  return search.SearchIndex.load(directory)
