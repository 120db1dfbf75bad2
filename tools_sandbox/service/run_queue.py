"""RunQueue: decides which request runs next on a pool, and which stops waiting.

The queue stands between the HTTP service's routes and the pool. A request takes a place
before its body is read, so places bound the memory too. The request then waits for a
slot, first come first served, until its deadline, its client hangs up, or the service
stops. A request that gave up while waiting never runs, and a run is cancelled if its
client hangs up. A session waits like a run and keeps its slot to the end; its cells do
not wait.

The queue lives in one event loop; the pool's calls run in threads.

budget: one queue: who waits, who runs, who gives up.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Awaitable, Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tools_sandbox.faults import SessionEnded
from tools_sandbox.host.cancel import Cancel
from tools_sandbox.host.pool import SandboxPool
from tools_sandbox.host.session import Session
from tools_sandbox.jail.wire import Limits, Result, Verdict

# Seconds: from a print to the longest allowed run.
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_REASONS = ("full", "late", "gone", "stopping", "ended", "busy")
_T = TypeVar("_T")


class Refused(Exception):
  """A request without a result; `reason` is one of `_REASONS`."""

  def __init__(self, reason: str, message: str):
    super().__init__(message)
    self.reason = reason


@dataclasses.dataclass
class _Open:
  """A session with a slot."""

  session: Session
  busy: bool = False  # a cell is being read or run


class RunQueue:
  """The queue of one pool. Not thread-safe: use it in one event loop."""

  def __init__(self, pool: SandboxPool, slots: int, max_waiting: int):
    """Starts nothing yet.

    Args:
      pool: runs the programs; not closed with the queue.
      slots: the pool's slots.
      max_waiting: requests waiting beyond the running ones.

    Raises:
      ValueError: max_waiting is negative.
    """
    if max_waiting < 0:
      raise ValueError(f"max_waiting must be 0 or more, got {max_waiting}")
    # --- Slots and places, and their holders.
    self._pool = pool
    self.slots = slots
    self._capacity = slots + max_waiting
    self._threads = concurrent.futures.ThreadPoolExecutor(slots, "run")
    self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
    self._admitted = 0  # places of requests; sessions' places are additional
    self._busy = 0
    self._sessions: dict[str, _Open] = {}
    self.draining = False

    # --- This queue's own metrics: the process may have another queue.
    self._registry = CollectorRegistry()
    self._runs = Counter(
      "sandbox_runs", "Runs that ended.", ["verdict"], registry=self._registry
    )
    self._refused = Counter(
      "sandbox_refused",
      "Requests that got no result.",
      ["reason"],
      registry=self._registry,
    )
    for verdict in Verdict:
      self._runs.labels(verdict.value)  # a series starting at 0 has a rate
    for reason in _REASONS:
      self._refused.labels(reason)
    self._seconds = Histogram(
      "sandbox_run_seconds",
      "Wall seconds of the programs.",
      buckets=_BUCKETS,
      registry=self._registry,
    )
    self._waits = Histogram(
      "sandbox_wait_seconds",
      "Seconds that runs waited for a slot.",
      buckets=_BUCKETS,
      registry=self._registry,
    )
    self._registry.register(self)

  @property
  def busy(self) -> int:
    """Slots with a running program or a session."""
    return self._busy

  @property
  def waiting(self) -> int:
    """Requests waiting for a slot."""
    return len(self._waiting)

  @contextlib.contextmanager
  def place(self) -> Iterator[None]:
    """Holds one request's place, from before its body is read until the answer.

    Raises:
      Refused: full or stopping.
    """
    if self.draining:
      raise self._refuse("stopping", "the service is stopping")
    if self._admitted + len(self._sessions) >= self._capacity:
      raise self._refuse("full", f"all {self._capacity} places are taken; ask again")
    self._admitted += 1
    try:
      yield
    finally:
      self._admitted -= 1

  async def run(
    self,
    program: str,
    stdin: str,
    limits: Limits,
    start_by: float,
    gone: Awaitable[None],
  ) -> Result:
    """Waits for a slot, then for the program's end.

    Args:
      program, stdin, limits: see `SandboxPool.run`.
      start_by: `time.monotonic()` seconds after which the run no longer starts.
      gone: done when the client has hung up; cancelled here.

    Raises:
      Refused: late or stopping, and the program has not run; or gone, and a started
        program has been cancelled.
    """
    left = asyncio.ensure_future(gone)
    try:
      # --- Wait for a slot, which is this run's until `_ended`.
      await self._turn(start_by, left)

      # --- Run, in a thread: the pool's calls block.
      cancel = Cancel()
      call = functools.partial(self._pool.run, program, stdin, limits, cancel)
      running = asyncio.get_running_loop().run_in_executor(self._threads, call)
      running.add_done_callback(self._ended)
      return await self._unless_gone(running, left, cancel)
    finally:
      left.cancel()

  async def open(
    self, limits: Limits, start_by: float, lease_s: float, gone: Awaitable[None]
  ) -> str:
    """Waits for a slot, opens a session there, and returns the session's name.

    Args:
      limits: see `SandboxPool.session`.
      start_by, gone: see `run`.
      lease_s: seconds without a cell after which the session is closed.

    Raises:
      Refused: late, gone or stopping.
      RuntimeError: the service failed.
    """
    loop = asyncio.get_running_loop()
    name = secrets.token_urlsafe(16)
    left = asyncio.ensure_future(gone)
    try:
      # --- Wait for a slot, which is the session's from `_opened` on.
      await self._turn(start_by, left)

      # --- Open the session; the pool tells the loop when it ends, by its name.
      call = functools.partial(
        self._pool.session,
        limits,
        lease_s=lease_s,
        ended=functools.partial(self._tell_ended, loop, name),
      )
      opening = loop.run_in_executor(self._threads, call)
      opening.add_done_callback(functools.partial(self._opened, name))
      await asyncio.shield(opening)
      if left.done():  # nobody has the session's name
        await self.close(name)
        raise self._refuse("gone", "the client has hung up")
      return name
    finally:
      left.cancel()

  @contextlib.contextmanager
  def cells(self, name: str) -> Iterator[Session]:
    """Holds a session for one cell, from before the cell is read until the answer.

    Raises:
      Refused: ended (or never opened), busy with another cell, or stopping.
    """
    if self.draining:
      raise self._refuse("stopping", "the service is stopping")
    entry = self._sessions.get(name)
    if entry is None:
      raise self._refuse("ended", "there is no such session; open another one")
    if entry.busy:
      raise self._refuse("busy", "the session runs another cell")
    # Two concurrent cells would share variables in an undefined order.
    entry.busy = True
    try:
      yield entry.session
    finally:
      entry.busy = False

  async def cell(
    self, session: Session, program: str, stdin: str, gone: Awaitable[None]
  ) -> Result:
    """Runs a cell in a session from `cells`.

    Raises:
      Refused: ended; or gone, and the session has ended too.
    """
    left = asyncio.ensure_future(gone)
    cancel = Cancel()
    call = functools.partial(session.run, program, stdin, cancel)
    running = asyncio.get_running_loop().run_in_executor(self._threads, call)
    try:
      result = await self._unless_gone(running, left, cancel)
    except SessionEnded as e:
      raise self._refuse("ended", str(e)) from None
    finally:
      left.cancel()
    self._count(result)
    return result

  async def close(self, name: str) -> None:
    """Ends a session, if there is one; the slot is free on return."""
    entry = self._sessions.get(name)
    if entry is not None:  # `_session_ended` removes the entry
      loop = asyncio.get_running_loop()
      await loop.run_in_executor(None, entry.session.close)

  async def _turn(self, start_by: float, left: asyncio.Future[None]) -> None:
    """Waits for a slot, which the caller then holds.

    Raises:
      Refused: late, gone or stopping.
    """
    # --- Join the line's end, which may be its beginning.
    began = time.monotonic()
    turn = asyncio.get_running_loop().create_future()
    self._waiting.append(turn)
    self._grant()

    # --- Wait for the turn, the deadline or the client's hang-up.
    try:
      await asyncio.wait(
        (turn, left), timeout=start_by - began, return_when="FIRST_COMPLETED"
      )
      if left.done():
        raise self._refuse("gone", "the client has hung up")
      # The loop may wake a little early: the request is late all the same.
      if not turn.done() or time.monotonic() >= start_by:
        raise self._refuse("late", "no slot was free before the deadline")
      turn.result()
      self._waits.observe(time.monotonic() - began)
    except BaseException:
      self._leave(turn)
      raise

  async def _unless_gone(
    self, running: asyncio.Future[_T], left: asyncio.Future[None], cancel: Cancel
  ) -> _T:
    """Awaits `running`; cancels it if the client hangs up first.

    Raises:
      Refused: gone.
    """
    # --- The run ends, or the client hangs up.
    try:
      await asyncio.wait((running, left), return_when="FIRST_COMPLETED")
    finally:
      if not running.done():  # also if this task is cancelled
        cancel()

    # --- Return only after the run has ended: it holds the thread and the slot.
    if not running.done():
      await asyncio.wait((running,))
      raise self._refuse("gone", "the client has hung up")
    return running.result()

  def drain(self) -> None:
    """Starts nothing more; refuses waiting requests, lets running ones finish."""
    # Waiting requests are refused at once, later ones by `place` and `cells`.
    self.draining = True
    for turn in self._waiting:
      turn.set_exception(self._refuse("stopping", "the service is stopping"))
    self._waiting.clear()

  def metrics(self) -> bytes:
    """Writes all counts in Prometheus's text format."""
    return generate_latest(self._registry)

  def collect(self) -> Iterable[Metric]:
    """Yields the gauges and the counter, read now. See `prometheus_client.registry`."""
    for name, text, value in (
      ("sandbox_slots", "Programs that may run at once.", self.slots),
      ("sandbox_busy_slots", "Programs that run now.", self.busy),
      ("sandbox_queue_length", "Requests that wait for a slot.", self.waiting),
    ):
      yield GaugeMetricFamily(name, text, value)
    yield CounterMetricFamily(
      "sandbox_zygotes_replaced",
      "Worn out, broken or killed zygotes.",
      self._pool.replaced,
    )

  def _refuse(self, reason: str, message: str) -> Refused:
    self._refused.labels(reason).inc()
    return Refused(reason, message)

  def _grant(self) -> None:
    # Count the slot before its new holder runs: nobody can take the slot in between.
    while self._waiting and self._busy < self.slots:
      self._busy += 1
      self._waiting.popleft().set_result(None)

  def _leave(self, turn: asyncio.Future[None]) -> None:
    """Removes a request that will not run, and frees its slot, if any."""
    if not turn.done():
      self._waiting.remove(turn)
    elif turn.exception() is None:
      self._busy -= 1
      self._grant()

  def _ended(self, running: asyncio.Future[Result]) -> None:
    self._busy -= 1
    if not running.cancelled() and running.exception() is None:
      self._count(running.result())
    self._grant()

  def _count(self, result: Result) -> None:
    self._runs.labels(result.verdict.value).inc()
    self._seconds.observe(result.seconds)

  def _opened(self, name: str, opening: asyncio.Future[Session]) -> None:
    if opening.cancelled() or opening.exception() is not None:  # no session
      self._busy -= 1
      self._grant()
    else:
      self._sessions[name] = _Open(opening.result())

  def _tell_ended(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
    with contextlib.suppress(RuntimeError):  # the service has stopped
      # Only the loop changes the counts; this may be any thread.
      loop.call_soon_threadsafe(self._session_ended, name)

  def _session_ended(self, name: str) -> None:
    self._sessions.pop(name, None)
    self._busy -= 1
    self._grant()
