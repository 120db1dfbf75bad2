"""SandboxPool: runs programs on zygotes, one per slot, for any number of threads.

There are two back-ends. "jail" gives every run namespaces, its own root and a seccomp
filter. "subprocess" uses processes with resource limits, without namespaces or seccomp,
and contains accidents and much abuse, not a determined attacker. README.md lists each
back-end's limits.

budget: slots, who waits for one and who holds one for a session, under one lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tools_sandbox.faults import NoJail
from tools_sandbox.host import slot
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.session import Session
from tools_sandbox.jail import keeper as jail
from tools_sandbox.jail import wire

BACKENDS = ("jail", "subprocess")
_WEAKER = (
  "Nothing weaker is taken unasked. backend='subprocess' is there for programs you "
  "trust: they can read and change what this user's files are, and use the network. "
  "tools_sandbox/README.md says what a container needs for the jail"
)
# Common imports of code and math programs, and sympy's lazy imports for solve, simplify
# and lambdify: preloading saves a run 25 to 150 ms.
DEFAULT_PRELOAD = (
  "heapq",
  "queue",
  "statistics",
  "csv",
  "calendar",
  "logging",
  "unittest",
  "concurrent.futures",
  "multiprocessing",
  "numpy",
  "numpy.random",
  "sympy",
  "sympy.combinatorics",
  "sympy.assumptions.wrapper",
  "sympy.integrals.heurisch",
  "sympy.integrals.risch",
  "sympy.physics.units",
  "sympy.tensor.tensor",
  "sympy.codegen.ast",
  "sympy.sets.setexpr",
  "scipy.special",
)

_CLOSED = "the sandbox pool is closed"


class SandboxPool:
  """Runs programs on slots, one at a time per slot. Thread-safe.

  Callers get slots first come first served. A slot's zygote starts when first needed,
  in the calling thread, so several zygotes start in parallel. A zygote is replaced when
  it dies and after `runs_per_zygote` runs.
  """

  def __init__(
    self,
    slots: int = 4,
    limits: wire.Limits | None = None,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    runs_per_zygote: int = 2000,
    backend: str = "jail",
  ):
    """Starts nothing yet; see `client.Sandbox` for the arguments.

    Args:
      slots, preload, backend: as for `Sandbox`.
      limits: a run's default limits; None for `Limits()`.
      runs_per_zygote: runs after which a fresh zygote replaces the old one.

    Raises:
      ValueError, NoJail: as for `Sandbox`.
      OSError: no requirement is missing, but the jail fails; the message says why.
    """
    if backend not in BACKENDS:
      raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    for name, value in (("slots", slots), ("runs_per_zygote", runs_per_zygote)):
      if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    if backend == "jail" and (missing := jail.check()):
      # Never fall back to another back-end: the caller must choose it.
      raise NoJail(
        f"backend 'jail' cannot be used here: {'; '.join(missing)}. {_WEAKER}"
      )
    self.limits = limits or wire.Limits()

    # --- How zygotes are made, and when they are replaced.
    self._backend = backend
    self._preload = tuple(preload)
    self._runs_per_zygote = runs_per_zygote

    # --- Slots, waiting callers and sessions; `_changed` guards all of them.
    self._changed = threading.Condition()
    self._idle: list[slot.Zygote] = []
    self._unstarted = slots
    # Callers without a slot, in order of arrival; the first gets the next free slot.
    # Nobody waits while a slot is free.
    self._waiting: deque[Future[slot.Zygote | None]] = deque()
    self._live: set[slot.Zygote] = set()
    self._sessions: dict[_LentSlot, Session] = {}
    self._closed = False
    self._replaced = 0
    self._landlord: threading.Thread | None = None  # starts with the first session

  def run(
    self,
    program: str,
    stdin: str = "",
    limits: wire.Limits | None = None,
    cancel: Cancel | None = None,
  ) -> wire.Result:
    """Waits for a free slot, then runs a program in a fresh process until it ends.

    Args:
      program, stdin: as in `Sandbox.run`.
      limits: the run's limits; None for the pool's.
      cancel: cancels the run; the verdict is then `infrastructure`.

    Returns:
      The result. A service failure is a result too (`infrastructure`, with the reason
      in stderr). If the zygote dies before the program starts, the run is retried once
      on a fresh zygote.

    Raises:
      TypeError: program or stdin is not a string.
      ValueError: program and stdin together exceed wire.MAX_INPUT.
      RuntimeError: the pool is closed.
    """
    wire.check_texts(program, stdin)
    limits = limits or self.limits
    request = _request(program, stdin, limits, session=False)

    # --- Wait for a slot and run; always give the slot back.
    zygote = self._acquire()
    try:
      for last in (False, True):
        if cancel is not None and cancel.requested:
          return wire.failure("called off")
        try:
          zygote = zygote or self._start()
          result = zygote.run(request, limits.wall_s, cancel)
          break
        except slot.ZygoteDied as e:
          zygote = self._retire(zygote)
          if e.started or last:  # no second run after a possible first
            zygote = self._spare()
            return e.result()
      zygote = self._unless_worn(zygote)
      return result
    except OSError as e:  # no process, descriptor or disk for a zygote
      zygote = self._retire(zygote)
      return wire.failure(f"{type(e).__name__}: {e}")
    except BaseException:
      # An interrupted caller leaves an unread answer in the zygote's pipe.
      zygote = self._retire(zygote)
      raise
    finally:
      self._release(zygote)

  def session(
    self,
    limits: wire.Limits | None = None,
    wait_s: float | None = None,
    lease_s: float = wire.LEASE_S,
    ended: Callable[[], None] | None = None,
  ) -> Session:
    """Waits for a free slot and opens a session, which holds the slot until its end.

    Args:
      limits: the session's limits; None for the pool's. Wall seconds and output apply
        to each cell, the other limits to the whole session.
      wait_s, lease_s: as in `Sandbox.session`.
      ended: called once, from any thread, when the slot is free; must not raise.

    Raises: as `Sandbox.session`.
    """
    if self._backend != "jail":
      raise ValueError(f"back-end {self._backend!r} has no sessions; 'jail' has")
    if not lease_s > 0:
      raise ValueError(f"lease_s must be above 0, got {lease_s!r}")
    limits = limits or self.limits
    request = _request("", "", limits, session=True)

    # --- Wait for a slot and start the session's process.
    zygote = self._acquire(wait_s)
    try:
      for last in (False, True):
        try:
          zygote = zygote or self._start()
          zygote.open(request)
          break
        except slot.ZygoteDied:
          zygote = self._retire(zygote)
          if last:
            raise

      # --- From here on, the end of the session or its lease gives the slot back.
      lent = _LentSlot(self._retire, self._end_session, zygote, limits.wall_s, ended)
      session = Session(lent, lease_s)
      with self._changed:
        self._check_open()
        self._sessions[lent] = session
        if self._landlord is None:
          self._landlord = threading.Thread(
            target=self._watch_leases, name="leases", daemon=True
          )
          self._landlord.start()
        self._changed.notify_all()
      return session
    except BaseException as e:
      self._release(self._retire(zygote))
      if isinstance(e, (OSError, slot.ZygoteDied)):
        raise RuntimeError(f"no session: {type(e).__name__}: {e}") from e
      raise

  def _end_session(self, lent: _LentSlot, zygote: slot.Zygote | None) -> None:
    """Takes a session's slot back."""
    with self._changed:
      self._sessions.pop(lent, None)
    self._release(self._unless_worn(zygote))
    # Last, and without the lock: the callback may request the slot at once.
    if lent.ended is not None:
      lent.ended()

  def _watch_leases(self) -> None:
    """Closes expired sessions until the pool closes; runs in its own thread."""
    while True:
      with self._changed:
        if self._closed:
          return
        now = time.monotonic()
        late = [s for s in self._sessions.values() if s.expires <= now]
        if not late:
          # A cell that ends meanwhile sets an expiry one lease later.
          sessions = self._sessions.values()
          waits = [min(s.expires - now, s.lease_s) for s in sessions]
          self._changed.wait(min(waits, default=None))
          continue
      # Without the lock: ending a session takes time, and needs the lock for its slot.
      for session in late:
        session.expire()

  def _unless_worn(self, zygote: slot.Zygote | None) -> slot.Zygote | None:
    if zygote is None or zygote.runs < self._runs_per_zygote:
      return zygote
    # The new zygote does its imports while nobody waits for it.
    self._retire(zygote)
    return self._spare()

  @property
  def replaced(self) -> int:
    """The number of replaced zygotes: worn out, broken or killed."""
    return self._replaced

  @property
  def waiting(self) -> int:
    """The number of callers waiting for a slot."""
    return len(self._waiting)

  def close(self) -> None:
    """Kills every zygote, busy ones too; runs in flight end as `infrastructure`."""
    with self._changed:
      # --- Refuse new callers and wake the waiting ones with an error.
      self._closed = True
      self._changed.notify_all()
      idle = self._idle
      self._idle = []
      while self._waiting:
        self._waiting.popleft().set_exception(RuntimeError(_CLOSED))
      # A busy zygote's caller still reads from its pipes, and retires the zygote.
      for zygote in self._live:
        zygote.process.kill()
      sessions = list(self._sessions.values())

    # --- Without the lock, which threads that retire zygotes need too.
    for zygote in idle:
      self._retire(zygote)
    for session in sessions:
      session.close()
    with self._changed:
      self._changed.wait_for(lambda: not self._live)

  def __enter__(self) -> SandboxPool:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _acquire(self, wait_s: float | None = None) -> slot.Zygote | None:
    """Takes a slot: returns its zygote, or None if the caller must start one."""
    with self._changed:
      self._check_open()
      if self._idle or self._unstarted:
        return self._take()
      place: Future[slot.Zygote | None] = Future()
      self._waiting.append(place)
    try:
      return place.result(wait_s)
    except BaseException as e:  # closed, timed out, or an interrupted caller
      with self._changed:
        waits = place in self._waiting
        if waits:
          self._waiting.remove(place)
      if not waits and place.exception() is None:
        self._release(place.result())  # the slot came at the same moment
      if isinstance(e, TimeoutError):
        raise TimeoutError(f"no slot came free in {wait_s:g} s") from None
      raise

  def _take(self) -> slot.Zygote | None:
    """Takes a free slot; the caller has checked for one and holds the lock."""
    if self._idle:
      return self._idle.pop()
    self._unstarted -= 1
    return None

  def _start(self) -> slot.Zygote:
    zygote = slot.Zygote(self._preload, self._backend)
    with self._changed:
      self._live.add(zygote)
      closed = self._closed
    if closed:  # `close` may have read `_live` before this zygote was in it
      self._retire(zygote)
    self._check_open()
    return zygote

  def _spare(self) -> slot.Zygote | None:
    """Starts a spare zygote that imports in advance; None if it cannot start."""
    try:
      return None if self._closed else self._start()
    except (OSError, RuntimeError):  # RuntimeError: closed by now
      return None

  def _retire(self, zygote: slot.Zygote | None) -> None:
    """Kills a zygote and counts it as replaced."""
    if zygote is not None:
      zygote.kill()
      with self._changed:
        self._live.discard(zygote)
        self._replaced += 1
        self._changed.notify_all()

  def _release(self, zygote: slot.Zygote | None) -> None:
    with self._changed:
      closed = self._closed
      # A slot without a zygote is free too: its next caller starts a zygote.
      if zygote is None or closed:
        self._unstarted += 1
      elif zygote.ready:
        self._idle.append(zygote)
      else:
        self._idle.insert(0, zygote)  # taken last: it is still importing
      while self._waiting and (self._idle or self._unstarted):
        self._waiting.popleft().set_result(self._take())
    if closed:
      self._retire(zygote)

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError(_CLOSED)


class _LentSlot:
  """The slot that a session holds. See `session.SessionSlot`."""

  def __init__(
    self,
    retire: Callable[[slot.Zygote], None],
    give_back: Callable[[_LentSlot, slot.Zygote | None], None],
    zygote: slot.Zygote,
    wall_s: float,
    ended: Callable[[], None] | None,
  ):
    self.ended = ended
    self._retire = retire
    self._give_back = give_back
    self._zygote = zygote
    self._wall_s = wall_s

  def run(
    self, program: str, stdin: str, cancel: Cancel | None
  ) -> tuple[wire.Result, bool]:
    zygote: slot.Zygote | None = self._zygote
    try:
      result, alive = self._zygote.cell(program, stdin, self._wall_s, cancel)
    except (slot.ZygoteDied, OSError) as e:  # the cell may have run: no retry
      alive = False
      zygote = self._retire(self._zygote)
      result = e.result() if isinstance(e, slot.ZygoteDied) else wire.failure(str(e))
    except BaseException:  # interrupted: the next cell would read this cell's answer
      self._give_back(self, self._retire(self._zygote))
      raise
    if not alive:
      self._give_back(self, zygote)
    return result, alive

  def close(self) -> None:
    zygote: slot.Zygote | None = self._zygote
    try:
      self._zygote.end_session()
    except BaseException as e:
      zygote = self._retire(self._zygote)
      if not isinstance(e, (slot.ZygoteDied, OSError)):
        raise
    finally:
      self._give_back(self, zygote)


def _request(
  program: str, stdin: str, limits: wire.Limits, session: bool
) -> dict[str, Any]:
  row = {"program": program, "stdin": stdin, "limits": limits.to_json()}
  return {**row, "session": session}
