"""All tools of one run behind one `submit`, with permits and deadlines.

A `Toolbox` turns a tool span's content into a `ToolCall`: it refuses malformed calls
with a message for the model, runs the others, and classifies failures. Calls run
concurrently; results do not depend on their order.

Each running call has its own thread and a deadline. A call without an answer at its
deadline gets a tool failure and is abandoned: its thread cannot be stopped, but its
permit is free for others. Waiting for a permit does not count as a call's time. A
tool's unexpected exception is an infrastructure failure. `tools` lists the tools and
their requirements.

budget: permits, deadlines and the cause of failures are one invariant.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from coa_jax.protocol.excerpt import cut_middle
from coa_jax.protocol.parser import content_fault
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from coa_jax.runtime import capacity
from coa_jax.tools.code_session import CodeSession, SandboxSession
from coa_jax.tools.environments import (
  EnvironmentSession,
  JailedEnvironment,
  load_class,
)
from coa_jax.tools.tools import TOOLS, CodeTool, Tool, ToolsConfig, open_tool, run_tool
from coa_jax.tools.types import (
  CALL_CONTEXT,
  CallContext,
  CallFuture,
  CallRequest,
  Tools,
)
from tools_sandbox.client import Sandbox
from tools_sandbox.faults import NoJail
from tools_sandbox.mcp_client import McpTool

MAX_HUNG = 64  # with this many abandoned calls still running, the tools count as down
_CODE = "code"  # the tool that uses cores: its calls need permits
_CLOSE_S = 2.0  # seconds that `close` waits for calls the sandbox does not end
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Call:
  """A waiting or running call; times are `time.monotonic()` seconds."""

  name: str
  arguments: str
  seconds: float  # time limit
  session: CodeSession | None = None  # only for programs
  environment: EnvironmentSession | None = None  # only for its functions
  context: CallContext | None = None
  began: float = 0.0
  deadline: float = math.inf
  future: CallFuture = dataclasses.field(default_factory=CallFuture)

  def finish(self, status: CallStatus, result: str) -> None:
    # A refused call never began.
    seconds = time.monotonic() - self.began if self.began else 0.0
    call = ToolCall(self.name, self.arguments, result, status, seconds)
    self.future.set_result(call)


class Toolbox(Tools):
  """Runs tool calls; use as a context manager, or call `close`. Thread-safe.

  Attributes:
    hung: the number of abandoned calls still running.
    session_owners: trajectories with a session, or with their first program running.
  """

  def __init__(self, config: ToolsConfig):
    """Opens the sandbox, the corpus index if a tool searches the corpus, and the tools.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or malformed; the message
        names file, line and field. Or this machine cannot run the configured sandbox,
        or a tool's key, folder or server is missing.
    """
    self.config = config
    needs = {}
    for field in ("workers", "max_sessions"):
      count = getattr(config, field)
      needs[f"tools.{field}={count}"] = count * capacity.THREAD
    capacity.check_host(needs)

    # --- Open the sandbox and the tools.
    self._sandbox = _open_sandbox(config)
    self._tools: dict[str, Tool | McpTool] = {}
    try:
      if config.enabled:
        for name in config.tags:
          self._tools[name] = open_tool(name, config, self._sandbox)
        if config.environment is not None:
          load_class(config.environment)
    except BaseException:
      self._close_tools()
      raise

    # --- The calls, changed only under the lock of `_changed`.
    self._changed = threading.Condition()
    self._waiting: list[_Call] = []
    self._running: set[_Call] = set()
    self.hung = 0
    self.session_owners: set[CodeSession] = set()
    self._closed = False

    # --- Start the thread that watches deadlines.
    self._wake = math.inf  # when the watcher next checks deadlines
    self._watcher = threading.Thread(target=self._watch, name="tools", daemon=True)
    self._watcher.start()

  def __enter__(self) -> Toolbox:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def close(self) -> None:
    """Ends running programs and frees the sandbox's processes.

    Ends calls without a result as `infrastructure`, or at their deadlines.
    """
    # Waiting calls end now, running ones with the sandbox or at their deadlines.
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

  def code_session(self) -> CodeSession | None:
    """Returns a session if `tools.session` is on and the sandbox runs `code`."""
    # Programs on an MCP server have no session here.
    runs_code = isinstance(self._tools.get(_CODE), CodeTool)
    if not (self.config.session and runs_code):
      return None
    return CodeSession(self._session_ended)

  def environment(self) -> EnvironmentSession | None:
    """Returns a new instance of `tools.environment`."""
    config = self.config.environment
    if config is None or not self.config.enabled:
      return None
    found = load_class(config)
    make: Callable[[], Any] = found
    if config.jail:
      make = functools.partial(JailedEnvironment, found, self._open_session)
    return EnvironmentSession(config, found, make)

  def _open_session(self) -> SandboxSession:
    """Opens a sandbox session for an environment."""
    limit = self._limit(FUNCTION_TAG)
    return self._sandbox.session(limit, self.config.memory_mb, wait_s=limit)

  def _session_ended(self, session: CodeSession) -> None:
    # Its sandbox slot is free for a waiting call.
    with self._changed:
      self.session_owners.discard(session)
      self._start_waiting()

  def start(self, request: CallRequest) -> CallFuture:
    """Starts a call, or queues it until a permit is free."""
    call = _Call(
      request.name,
      request.arguments,
      min(request.seconds, self._limit(request.name)),
      context=request.context,
    )
    if request.name == _CODE:
      call.session = request.session
    environment = request.environment
    if environment and environment.takes(request.name, request.arguments):
      call.environment = environment
    # Marked as running, so that nobody can cancel it.
    call.future.set_running_or_notify_cancel()
    refusal = self._refusal(request.name, request.arguments)
    if refusal is not None:  # takes no permit and no thread
      call.finish(*refusal)
      return call.future
    with self._changed:
      self._waiting.append(call)
      self._start_waiting()
    return call.future

  def _limit(self, name: str) -> float:
    """Returns a tool's time limit per call, in seconds."""
    return self.config.timeouts.get(name, self.config.timeout_s)

  def call(self, name: str, arguments: str) -> ToolCall:
    """Submits one call and waits for its result."""
    return self.submit(name, arguments).result()

  def answer(self, name: str, arguments: str, seconds: float) -> tuple[CallStatus, str]:
    """Answers a well-formed call in the call's own thread; subclasses may override.

    An exception ends the call as `infrastructure`.

    Args:
      name: one of `config.tags`.
      arguments: the call's well-formed span content.
      seconds: the time limit; the call is abandoned `grace_s` later.
    """
    return run_tool(self._tools[name], arguments, seconds)

  def _refusal(self, name: str, arguments: str) -> tuple[CallStatus, str] | None:
    if not self.config.enabled:
      return CallStatus.TOOL, "tools are off"
    if name not in self.config.tags:
      return CallStatus.MODEL, f"error: no tool {name}"
    if name not in self.config.mcp:
      fault = content_fault(name, arguments)
    else:  # its server checks the rest
      fault = None if arguments.strip() else f"<{name}> is empty"
    if fault is None:
      return None
    return CallStatus.MODEL, f"error: {fault}"

  def _start_waiting(self) -> None:
    """Starts the waiting calls that get a permit. The caller holds the lock."""
    # In order, but calls do not wait behind a call without a permit.
    waiting = self._waiting
    self._waiting = []
    for call in waiting:
      if self._closed:
        call.finish(CallStatus.INFRASTRUCTURE, "error: the tools are closed")
      elif self.hung >= MAX_HUNG:
        call.finish(CallStatus.INFRASTRUCTURE, "error: the tools do not answer")
      elif call.name == _CODE and not self._get_permit(call):
        self._waiting.append(call)
      else:
        self._run(call)

  def _get_permit(self, call: _Call) -> bool:
    """Takes a permit if a program may run now; its trajectory then owns a session."""
    # Only programs need permits: they use the machine's cores, while other tools wait.
    programs = [c for c in self._running if c.name == _CODE]
    if len(programs) >= self.config.workers:
      return False
    session = call.session
    if session is None or session in self.session_owners:
      return True
    if session.closed:  # opens no session, so it would never free one
      return True
    if len(self.session_owners) >= self.config.max_sessions:
      return False
    self.session_owners.add(session)
    return True

  def _run(self, call: _Call) -> None:
    """Starts a call's thread. The caller holds the lock."""
    call.began = time.monotonic()
    call.deadline = call.began + call.seconds
    if call.session is None or not call.session.allows_more_than(call.seconds):
      # An open session needs no grace to start; if its own limit is higher, the grace
      # would only give the program more time.
      call.deadline += self.config.grace_s
    try:
      # A daemon thread: a hung tool must not keep the process alive.
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
    """Runs one call in its thread."""
    # --- The answer, without the lock.
    CALL_CONTEXT.set(call.context)
    try:
      if call.environment is not None:
        status, result = run_tool(call.environment, call.arguments, call.seconds)
      elif call.session is None:
        status, result = self.answer(call.name, call.arguments, call.seconds)
      else:
        code = self._tools[call.name]
        assert isinstance(code, CodeTool)  # no other tool has sessions
        status, result = code.in_session(call.session, call.arguments, call.seconds)
      # Half a surrogate pair, which JSON can hold, is not a character.
      result = result.encode("utf-8", "replace").decode()
      result = _cut(result, self.config.max_chars)
    except BaseException:
      # A failure caused by a model is a result. An exception means a broken tool, which
      # must not be scored as a wrong answer.
      if not self._closed:  # otherwise it failed because its sandbox was closed
        _log.exception("tool %s failed on %.200r", call.name, call.arguments)
      status = CallStatus.INFRASTRUCTURE
      result = "error: the tool failed"
    if status == CallStatus.INFRASTRUCTURE and self._out_of_budget(call):
      status = CallStatus.TOOL
      result = _no_answer(call)
    # --- Deliver the answer, unless the watcher has already answered.
    with self._changed:
      if call in self._running:
        self._running.remove(call)
        call.finish(status, result)
      else:  # abandoned; nobody waits for it
        self.hung -= 1
      self._start_waiting()
      if self._closed:
        self._changed.notify_all()

  def _out_of_budget(self, call: _Call) -> bool:
    """Whether a call had less time than the tool's limit, and used all of it.

    Always False for programs: the sandbox itself distinguishes slow programs from its
    own failures.
    """
    short = call.name != _CODE and call.seconds < self._limit(call.name)
    return short and time.monotonic() - call.began >= call.seconds

  def _watch(self) -> None:
    """Abandons calls at their deadlines, until the toolbox is closed and none runs."""
    with self._changed:
      while self._running or not self._closed:
        # --- Answer late calls; their threads run on and count as hung.
        now = time.monotonic()
        late = [c for c in self._running if c.deadline <= now]
        for call in late:
          self._running.remove(call)
          self.hung += 1
          call.finish(CallStatus.TOOL, _no_answer(call))
          _log.warning("tool %s hangs on %.200r", call.name, call.arguments)
        if late:
          self._start_waiting()
          self._changed.notify_all()
        # --- Sleep until the next deadline; `_run` wakes the watcher if needed.
        self._wake = math.inf
        for call in self._running:
          self._wake = min(self._wake, call.deadline)
        wait = None
        if self._wake < math.inf:
          wait = max(0.0, self._wake - now)
        self._changed.wait(wait)


def _open_sandbox(config: ToolsConfig) -> Sandbox:
  """Opens a toolbox's sandbox; raises the errors of `Toolbox.__init__`."""
  # --- Open only the parts needed by the config's tools.
  own_tags = set(config.tags) - set(config.mcp)
  corpus = backend = remote = None
  if config.enabled and any(TOOLS[tag].reads_corpus(config) for tag in own_tags):
    corpus = config.corpus
  jailed = config.environment is not None and config.environment.jail
  if config.enabled and (_CODE in own_tags or jailed):
    backend = config.sandbox
    remote = config.remote
  # A slot starts its process on first use, so slots for hung calls cost nothing.
  slots = config.workers + MAX_HUNG
  if config.session or jailed:
    slots += config.max_sessions
  try:
    return Sandbox(slots=slots, corpus=corpus, backend=backend, remote=remote)
  except NoJail as e:
    hint = "To take the weaker one: --config.tools.sandbox=subprocess"
    raise ValueError(f"tools.sandbox={config.sandbox!r}: {e}. {hint}") from e
  except RuntimeError as e:
    raise ValueError(f"tools.sandbox={config.sandbox!r}: {e}") from e


def _no_answer(call: _Call) -> str:
  return f"error: no answer after {call.seconds:.3g} s"


def _cut(text: str, limit: int) -> str:
  """Cuts a text to at most `limit` characters, the marker included."""
  if len(text) <= limit:
    return text
  marker = len(f"\n...[{len(text)} characters cut]...\n")
  return cut_middle(text, limit - marker)
