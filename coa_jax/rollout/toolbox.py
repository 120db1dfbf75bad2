"""The tools of one run behind one call: the only door to `tools_sandbox`.

A `Toolbox` turns the content of a tool span into a `ToolCall`: it refuses malformed
calls in words that a model can act on, runs the others, and says whose fault a failure
is. Calls run concurrently; results do not depend on the order.

Every call that runs has a thread of its own and a deadline. A call that has not
answered by then is answered for (the tool's fault) and given up: its thread, which
nothing can end, takes no place from others. Only programs wait for places, for they
use the machine's cores, and that wait is on no call's clock. What a tool raises is the
infrastructure's fault: whatever a model can bring about is a result, so an exception
says that the tool is broken, and that must not be scored as a wrong answer.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import threading
import time

from coa_jax.protocol import roles
from coa_jax.protocol.parser import content_fault
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from tools_sandbox.client import Sandbox, Verdict

_WITH_PLACES = "code"  # the tool that uses cores: its calls wait for places
_CLOSE_S = 2.0  # what `close` waits for calls that the sandbox does not end
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ToolsConfig:
  """Config section `tools`.

  Attributes:
    tools: tags of the tools a policy may call; of `wiki_search` and `code`.
    corpus: JSON-lines pages that `wiki_search` searches (rows of id, title, text).
    top_k: pages returned per search.
    timeout_s: wall seconds one call may take.
    grace_s: seconds beyond those after which a call without an answer is given up;
      long enough for a sandbox process to start on a busy machine.
    memory_mb: memory one program may use, in MiB.
    workers: programs that run at once; other tools run as they are called. A program
      that sleeps keeps its place, so give more places than there are cores.
    max_hung: calls given up and still running at which the tools count as down.
    max_chars: a result is cut to this many characters (head and tail are kept);
      `rollout.observation_tokens` says how much of it a policy reads.
    enabled: False answers every call with "tools are off": what a model can do alone.
  """

  tools: tuple[str, ...] = ("wiki_search", "code")
  corpus: str | None = None
  top_k: int = 3
  timeout_s: float = 7.0
  grace_s: float = 10.0
  memory_mb: int = 1024
  workers: int = 2
  max_hung: int = 64
  max_chars: int = 16384
  enabled: bool = True

  def __post_init__(self):
    for tool in self.tools:
      if tool not in _RUNNERS:
        raise ValueError(f"tools: no tool {tool!r}; there are {', '.join(_RUNNERS)}")
    if "wiki_search" in self.tools and self.corpus is None:
      raise ValueError("corpus: wiki_search needs the path of a JSON-lines corpus")
    if min(self.top_k, self.workers, self.max_hung) < 1 or self.max_chars < 64:
      raise ValueError(
        "top_k, workers and max_hung must be at least 1, max_chars at least 64"
      )
    if self.timeout_s <= 0 or self.grace_s <= 0:
      raise ValueError("timeout_s and grace_s must be above 0")


@dataclasses.dataclass(eq=False)
class _Call:
  """A call on its way; times are `time.monotonic()` seconds."""

  name: str
  arguments: str
  seconds: float  # it may take
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
    """Opens the sandbox and, where `wiki_search` is asked for, its index.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or malformed; the message
        names file, line and field.
    """
    self.config = config
    corpus = config.corpus if "wiki_search" in config.tools else None
    # A slot starts no process before it is used; those of hung calls are not missed.
    self._sandbox = Sandbox(slots=config.workers + config.max_hung, corpus=corpus)
    self._changed = threading.Condition()
    self._waiting: list[_Call] = []
    self._running: set[_Call] = set()
    self._hung = 0
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
    self._sandbox.close()
    self._watcher.join(_CLOSE_S)

  @property
  def hung(self) -> int:
    """Calls that were given up and are still running."""
    return self._hung

  def submit(
    self, name: str, arguments: str, seconds: float = math.inf
  ) -> concurrent.futures.Future[ToolCall]:
    """Starts a call in the background.

    Args:
      name: the tool's tag.
      arguments: the content of its span, verbatim.
      seconds: that it may take at most, however much `timeout_s` allows.

    Returns:
      A future of the call with its result. Failures are results with a status: the
      future never raises, cannot be cancelled, and is done by the call's deadline.
      `seconds` of the call counts from when it began to run.
    """
    call = _Call(name, arguments, min(seconds, self.config.timeout_s))
    call.future.set_running_or_notify_cancel()
    refusal = self._refusal(name, arguments)
    if refusal is not None:
      call.finish(*refusal)
      return call.future
    with self._changed:
      self._waiting.append(call)
      self._start_waiting()
    return call.future

  def call(self, name: str, arguments: str) -> ToolCall:
    """Runs one call to its end, as `submit` does, and waits for it."""
    return self.submit(name, arguments).result()

  def answer(self, name: str, arguments: str, seconds: float) -> tuple[CallStatus, str]:
    """What a well-formed call gives; a subclass may answer in another way.

    It runs in a thread of the call's own. What it raises ends the call as
    `infrastructure`.

    Args:
      name: one of `config.tools`.
      arguments: well-formed content of its span.
      seconds: that it may take; past `grace_s` more nobody waits for it.
    """
    return _RUNNERS[name](self._sandbox, arguments, self.config, seconds)

  def _refusal(self, name: str, arguments: str) -> tuple[CallStatus, str] | None:
    if not self.config.enabled:
      return CallStatus.TOOL, "tools are off"
    if name not in self.config.tools:
      return CallStatus.MODEL, f"error: no tool {name}"
    fault = content_fault(name, arguments)
    return None if fault is None else (CallStatus.MODEL, f"error: {fault}")

  def _start_waiting(self) -> None:
    """Starts the calls that have a place. The caller holds the lock."""
    waiting, self._waiting = self._waiting, []
    for call in waiting:
      if self._closed:
        call.finish(CallStatus.INFRASTRUCTURE, "error: the tools are closed")
      elif self._hung >= self.config.max_hung:
        call.finish(CallStatus.INFRASTRUCTURE, "error: the tools do not answer")
      elif call.name == _WITH_PLACES and self._places() < 1:
        self._waiting.append(call)
      else:
        self._start(call)

  def _places(self) -> int:
    return self.config.workers - sum(c.name == _WITH_PLACES for c in self._running)

  def _start(self, call: _Call) -> None:
    call.began = time.monotonic()
    call.deadline = call.began + call.seconds + self.config.grace_s
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
      status, result = self.answer(call.name, call.arguments, call.seconds)
      result = _cut(result, self.config.max_chars)
    except BaseException:
      if not self._closed:
        _log.exception("tool %s failed on %.200r", call.name, call.arguments)
      status, result = CallStatus.INFRASTRUCTURE, "error: the tool failed"
    with self._changed:
      if call in self._running:
        self._running.remove(call)
        call.finish(status, result)
      else:  # given up; nobody waits any more
        self._hung -= 1
      self._start_waiting()
      if self._closed:
        self._changed.notify_all()

  def _watch(self) -> None:
    """Gives up calls at their deadlines, until the toolbox is closed."""
    with self._changed:
      while self._running or not self._closed:
        now = time.monotonic()
        late = [c for c in self._running if c.deadline <= now]
        for call in late:
          self._running.remove(call)
          self._hung += 1
          call.finish(CallStatus.TOOL, f"error: no answer after {call.seconds:.3g} s")
          _log.warning("tool %s hangs on %.200r", call.name, call.arguments)
        if late:
          self._start_waiting()
          self._changed.notify_all()
        self._wake = min((c.deadline for c in self._running), default=math.inf)
        wait = None if self._wake == math.inf else max(0.0, self._wake - now)
        self._changed.wait(wait)


def _search(
  sandbox: Sandbox, query: str, config: ToolsConfig, seconds: float
) -> tuple[CallStatus, str]:
  del seconds  # it computes for less than milliseconds
  hits = sandbox.search(query.strip(), config.top_k)
  if not hits:
    return CallStatus.OK, "no result"
  pages = []
  for hit in hits:
    title, text = hit.document.title, hit.document.text
    pages.append(text if text.startswith(title) else f"{title}: {text}")
  if config.top_k == 1:
    return CallStatus.OK, pages[0]
  return CallStatus.OK, "\n".join(f"{i}. {p}" for i, p in enumerate(pages, 1))


def _code(
  sandbox: Sandbox, body: str, config: ToolsConfig, seconds: float
) -> tuple[CallStatus, str]:
  call = roles.parse_code(body)
  assert call is not None  # content_fault has refused every other body
  result = sandbox.run(
    call.program,
    call.stdin,
    timeout_s=seconds,
    memory_mb=config.memory_mb,
  )
  out = result.stdout.strip()
  if result.verdict == Verdict.OK:
    return CallStatus.OK, out or "no output; print what you want to see"
  if result.verdict == Verdict.INFRASTRUCTURE:
    return CallStatus.INFRASTRUCTURE, "error: the sandbox is unavailable"
  if result.verdict == Verdict.TIMEOUT:
    return CallStatus.TOOL, f"{out}\nerror: stopped after {seconds:.3g} s".strip()
  if result.verdict == Verdict.MEMORY:
    return CallStatus.TOOL, f"{out}\nerror: more than {config.memory_mb} MB".strip()
  return CallStatus.MODEL, f"{out}\nerror: {result.stderr.strip()}".strip()


_RUNNERS = {"wiki_search": _search, "code": _code}


def _cut(text: str, limit: int) -> str:
  """Keeps the head and the tail of a long text, with a marker between."""
  if len(text) <= limit:
    return text
  marker = f"\n...[{len(text) - limit} characters cut]...\n"
  head = (limit - len(marker)) // 2
  return text[:head] + marker + text[len(text) - (limit - len(marker) - head) :]
