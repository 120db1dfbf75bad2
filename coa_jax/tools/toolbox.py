"""The tools of one run behind one call: who calls them, and until when.

A `Toolbox` turns the content of a tool span into a `ToolCall`: it refuses malformed
calls in words that a model can act on, runs the others, and says whose fault a failure
is. Calls run concurrently; results do not depend on the order.

Every call that runs has a thread of its own and a deadline. A call that has not
answered by then is answered for (the tool's fault) and given up: its thread, which
nothing can end, takes no place from others. Only programs wait for places, for they
use the machine's cores, and that wait is on no call's clock. What a tool raises is the
infrastructure's fault: whatever a model can bring about is a result, so an exception
says that the tool is broken, and that must not be scored as a wrong answer. Which tools
there are, and what they need, is in `tools`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import threading
import time

from coa_jax import capacity
from coa_jax.protocol.parser import content_fault
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from coa_jax.tools.code_session import Cells
from coa_jax.tools.tools import TOOLS, Tool, ToolsConfig, open_tool, run_tool
from tools_sandbox.client import McpTool, NoJail, Sandbox

_WITH_PLACES = "code"  # the tool that uses cores: its calls wait for places
_CLOSE_S = 2.0  # what `close` waits for calls that the sandbox does not end
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Call:
  """A call on its way; times are `time.monotonic()` seconds."""

  name: str
  arguments: str
  seconds: float  # it may take
  cells: Cells | None = None  # where it is a program of a session
  began: float = 0.0
  deadline: float = math.inf
  future: concurrent.futures.Future[ToolCall] = dataclasses.field(
    default_factory=concurrent.futures.Future
  )

  def finish(self, status: CallStatus, result: str) -> None:
    seconds = time.monotonic() - self.began if self.began else 0.0
    call = ToolCall(self.name, self.arguments, result, status, seconds)
    self.future.set_result(call)


class Toolbox:
  """Runs tool calls; use as a context manager, or call `close`. Thread-safe."""

  def __init__(self, config: ToolsConfig):
    """Opens the sandbox, the corpus's index where a tool searches it, and the tools.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or malformed; the message
        names file, line and field. Or this machine can not run the sandbox asked for,
        or a tool's key, folder or server is not there.
    """
    self.config = config
    fields = ("workers", "max_hung", "max_sessions")
    counts = {name: getattr(config, name) for name in fields}
    needs = {f"tools.{f}={n}": n * capacity.THREAD for f, n in counts.items()}
    capacity.check_host(needs)
    ours = set(config.tags) - set(config.mcp)
    searches = any(TOOLS[tag].reads_corpus for tag in ours)
    runs = config.enabled and "code" in ours
    # A slot starts no process before it is used; those of hung calls are not missed.
    try:
      self._sandbox = Sandbox(
        slots=config.workers
        + config.max_hung
        + (config.max_sessions if config.session else 0),
        corpus=config.corpus if searches else None,
        backend=config.sandbox if runs else None,
        remote=config.remote if runs else None,
      )
    except NoJail as e:
      hint = "To take the weaker one: --config.tools.sandbox=subprocess"
      raise ValueError(f"tools.sandbox={config.sandbox!r}: {e}. {hint}") from e
    except RuntimeError as e:
      if config.sandbox != "remote":
        raise
      raise ValueError(f"tools.sandbox='remote': {e}") from e
    self._tools: dict[str, Tool | McpTool] = {}
    try:
      for name in config.tags if config.enabled else ():
        self._tools[name] = open_tool(name, config, self._sandbox)
    except BaseException:
      self._close_tools()
      raise
    self._changed = threading.Condition()
    self._waiting: list[_Call] = []
    self._running: set[_Call] = set()
    self._hung = 0
    self._holders: set[Cells] = set()  # that have a session, or are given one
    self._closed = False
    self._wake = math.inf  # when the watch looks at deadlines next
    self._watcher = threading.Thread(target=self._watch, name="tools", daemon=True)
    self._watcher.start()

  def __enter__(self) -> Toolbox:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def close(self) -> None:
    """Ends running programs and frees the sandbox's processes.

    Calls that have no result yet end as `infrastructure`, or at their deadlines.
    """
    with self._changed:
      self._closed = True
      self._start_waiting()
      self._changed.notify_all()
    self._close_tools()
    self._watcher.join(_CLOSE_S)

  def _close_tools(self) -> None:
    self._sandbox.close()
    for tool in self._tools.values():
      tool.close()

  @property
  def hung(self) -> int:
    """Calls that were given up and are still running."""
    return self._hung

  def cells(self) -> Cells | None:
    """The place of one trajectory's session; None where programs share nothing.

    Whoever has it closes it, at whatever end of the trajectory.
    """
    runs = "code" in self._tools and "code" not in self.config.mcp
    if not (self.config.session and runs):
      return None
    return Cells(self._session_ended)

  def _session_ended(self, cells: Cells) -> None:
    with self._changed:
      self._holders.discard(cells)
      self._start_waiting()

  def submit(
    self,
    name: str,
    arguments: str,
    seconds: float = math.inf,
    cells: Cells | None = None,
  ) -> concurrent.futures.Future[ToolCall]:
    """Starts a call in the background.

    Args:
      name: the tool's tag.
      arguments: the content of its span, verbatim.
      seconds: that it may take at most, however much `timeout_s` allows. A failure of
        the infrastructure that uses up what is below the tool's own limit counts as
        the tool's, for it may have been all right and only slow.
      cells: of the trajectory that calls, as `cells` gave it.

    Returns:
      A future of the call with its result. Failures are results with a status: the
      future never raises, cannot be cancelled, and is done by the call's deadline.
      `seconds` of the call counts from when it began to run.
    """
    held = cells if name == _WITH_PLACES else None
    call = _Call(name, arguments, min(seconds, self._limit(name)), held)
    call.future.set_running_or_notify_cancel()
    refusal = self._refusal(name, arguments)
    if refusal is not None:
      call.finish(*refusal)
      return call.future
    with self._changed:
      self._waiting.append(call)
      self._start_waiting()
    return call.future

  def _limit(self, name: str) -> float:
    """Seconds that a call of a tool may take, whoever makes it."""
    return self.config.timeouts.get(name, self.config.timeout_s)

  def call(self, name: str, arguments: str) -> ToolCall:
    """Runs one call to its end, as `submit` does, and waits for it."""
    return self.submit(name, arguments).result()

  def answer(self, name: str, arguments: str, seconds: float) -> tuple[CallStatus, str]:
    """What a well-formed call gives; a subclass may answer in another way.

    It runs in a thread of the call's own. What it raises ends the call as
    `infrastructure`.

    Args:
      name: one of `config.tags`.
      arguments: well-formed content of its span.
      seconds: that it may take; past `grace_s` more nobody waits for it.
    """
    return run_tool(self._tools[name], arguments, seconds)

  def _refusal(self, name: str, arguments: str) -> tuple[CallStatus, str] | None:
    if not self.config.enabled:
      return CallStatus.TOOL, "tools are off"
    if name not in self.config.tags:
      return CallStatus.MODEL, f"error: no tool {name}"
    # What an MCP server takes is its own matter.
    role = "" if name in self.config.mcp else name
    fault = content_fault(role, arguments)
    return None if fault is None else (CallStatus.MODEL, f"error: {fault}")

  def _start_waiting(self) -> None:
    """Starts the calls that have a place. The caller holds the lock."""
    waiting, self._waiting = self._waiting, []
    for call in waiting:
      if self._closed:
        call.finish(CallStatus.INFRASTRUCTURE, "error: the tools are closed")
      elif self._hung >= self.config.max_hung:
        call.finish(CallStatus.INFRASTRUCTURE, "error: the tools do not answer")
      elif call.name == _WITH_PLACES and not self._has_place(call):
        self._waiting.append(call)
      else:
        self._start(call)

  def _has_place(self, call: _Call) -> bool:
    if self._places() < 1:
      return False
    # What is closed opens no session, so its place would never be given back.
    if call.cells is None or call.cells in self._holders or call.cells.closed:
      return True
    if len(self._holders) >= self.config.max_sessions:
      return False
    self._holders.add(call.cells)
    return True

  def _places(self) -> int:
    return self.config.workers - sum(c.name == _WITH_PLACES for c in self._running)

  def _start(self, call: _Call) -> None:
    call.began = time.monotonic()
    # A session that runs needs no grace to start, and would let it have more seconds.
    cut = call.cells is not None and call.cells.allows_more_than(call.seconds)
    call.deadline = call.began + call.seconds + self.config.grace_s * (not cut)
    try:
      # A daemon: a hung tool must not keep the program from ending.
      threading.Thread(
        target=self._work, args=(call,), name="tool", daemon=True
      ).start()
    except RuntimeError:  # the machine has no thread left
      call.finish(CallStatus.INFRASTRUCTURE, "error: no thread for the tool")
      return
    self._running.add(call)
    if call.deadline < self._wake:
      self._changed.notify_all()

  def _work(self, call: _Call) -> None:
    """The thread of one call."""
    try:
      if call.cells is None:
        status, result = self.answer(call.name, call.arguments, call.seconds)
      else:
        code = self._tools[call.name]
        status, result = code.in_session(call.cells, call.arguments, call.seconds)
      result = _cut(result, self.config.max_chars)
    except BaseException:
      if not self._closed:
        _log.exception("tool %s failed on %.200r", call.name, call.arguments)
      status, result = CallStatus.INFRASTRUCTURE, "error: the tool failed"
    if status == CallStatus.INFRASTRUCTURE and self._out_of_budget(call):
      status, result = CallStatus.TOOL, _no_answer(call)
    with self._changed:
      if call in self._running:
        self._running.remove(call)
        call.finish(status, result)
      else:  # given up; nobody waits any more
        self._hung -= 1
      self._start_waiting()
      if self._closed:
        self._changed.notify_all()

  def _out_of_budget(self, call: _Call) -> bool:
    """Whether a call had less than the tool's limit, and has used it up.

    Not a program: the sandbox itself tells one that is slow from its own failures.
    """
    short = call.name != _WITH_PLACES and call.seconds < self._limit(call.name)
    return short and time.monotonic() - call.began >= call.seconds

  def _watch(self) -> None:
    """Gives up calls at their deadlines, until the toolbox is closed."""
    with self._changed:
      while self._running or not self._closed:
        now = time.monotonic()
        late = [c for c in self._running if c.deadline <= now]
        for call in late:
          self._running.remove(call)
          self._hung += 1
          call.finish(CallStatus.TOOL, _no_answer(call))
          _log.warning("tool %s hangs on %.200r", call.name, call.arguments)
        if late:
          self._start_waiting()
          self._changed.notify_all()
        self._wake = min((c.deadline for c in self._running), default=math.inf)
        wait = None if self._wake == math.inf else max(0.0, self._wake - now)
        self._changed.wait(wait)


def _no_answer(call: _Call) -> str:
  return f"error: no answer after {call.seconds:.3g} s"


def _cut(text: str, limit: int) -> str:
  """Keeps the head and the tail of a long text, with a marker between."""
  if len(text) <= limit:
    return text
  marker = f"\n...[{len(text) - limit} characters cut]...\n"
  head = (limit - len(marker)) // 2
  return text[:head] + marker + text[len(text) - (limit - len(marker) - head) :]
