"""A journal of every reply and tool result, on disk before use.

An interrupted run (also by SIGKILL) is repeated from its start; the journal answers its
recorded calls, so nothing is paid for twice and the run ends as if it had never
stopped. A call is identified by its run, the agent, a hash over the whole conversation
(or the tool's arguments), and the number of identical calls before it in the run. Tool
results are stored too, because the later conversation depends on them.

Only a reply in flight when the process died is lost. Infrastructure failures are not
stored: they deserve a second attempt. Each line goes to the kernel at once and survives
the process; a power cut may lose the last lines.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from coa_jax.data.teacher.backend import (
  BackendError,
  CallTool,
  InfrastructureError,
  Message,
  ModelBackend,
  Reply,
)
from coa_jax.protocol.jsonlog import JsonLog, Place
from coa_jax.protocol.trajectory import CallStatus, ToolCall

RunKey = tuple[str, int]  # task id, sample
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Line kinds.
_MODEL = "model"
_TOOL = "tool"
_FAILED = "failed"  # a charged call without a usable reply


@dataclasses.dataclass
class CallUsage:
  """Sums over the journal's calls; tokens as the endpoint counts them.

  Attributes:
    calls: answered model calls.
    failed: charged calls with only unusable replies; the token counts include them.
    prompt: prompt tokens; like the next two, 0 if the endpoint does not count.
    cached: prompt tokens from a prefix cache.
    completion: reply tokens.
    retries: attempts beyond the first.
    seconds: time spent waiting for replies, summed over concurrent calls.
    tool_calls: executed tool calls.
    by_agent: agent -> calls.
    models: model name from the endpoint -> replies.
  """

  calls: int = 0
  failed: int = 0
  prompt: int = 0
  cached: int = 0
  completion: int = 0
  retries: int = 0
  seconds: float = 0.0
  tool_calls: int = 0
  by_agent: dict[str, int] = dataclasses.field(default_factory=dict)
  models: dict[str, int] = dataclasses.field(default_factory=dict)

  def add(self, row: dict[str, Any]) -> None:
    """Counts a journal line."""
    if row["kind"] == _TOOL:
      self.tool_calls += 1
      return
    reply = row["reply"]
    self.prompt += reply["prompt_tokens"]
    self.cached += reply["cached_tokens"]
    self.completion += reply["completion_tokens"]
    if row["kind"] == _FAILED:
      self.failed += 1
      return
    self.calls += 1
    self.retries += reply["retries"]
    self.seconds += reply["seconds"]
    agent = row["name"]
    self.by_agent[agent] = self.by_agent.get(agent, 0) + 1
    model = reply["model"]
    self.models[model] = self.models.get(model, 0) + 1


class Journal:
  """A file with recorded calls. Threads may share it; processes may not."""

  def __init__(
    self,
    path: str,
    done: Callable[[RunKey], bool] = lambda run: False,
    usd: Callable[[int, int, int], float | None] = lambda *counts: None,
  ):
    """Reads the existing rows; a line cut short by a kill is removed.

    Args:
      path: a JSON-lines file, created if missing.
      done: whether a run is finished, so that its calls need no memory.
      usd: the cost of (prompt, cached, completion) tokens; see `ChatConfig.usd`.

    Raises:
      ValueError: a line is not a journal line; the message names file and line.
    """
    self.usage = CallUsage()
    self._usd = usd
    self._lock = threading.Lock()
    self._stopped = False
    self._done = done
    # The replies' places in the file, because the replies need not fit in memory.
    self._at: dict[RunKey, dict[str, Place]] = {}  # run -> key -> its line
    self._log = JsonLog(path, self._replay)

  def _replay(self, row: Any, where: str, place: Place) -> None:
    try:
      self.usage.add(row)
      run = (row["task_id"], row["sample"])
      if not self._done(run):
        self._at.setdefault(run, {})[row["key"]] = place
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise ValueError(f"{where}: not a line of a journal: {e!r}") from e

  def stop(self) -> None:
    """Stops further calls: each raises InfrastructureError.

    Current runs end at their next call; their results would be thrown away.
    """
    self._stopped = True

  def forget(self, run: RunKey) -> None:
    """Frees a finished run's memory."""
    with self._lock:
      self._at.pop(run, None)

  def bill(self) -> dict[str, Any]:
    """Returns the usage over all starts, with its cost `usd` (None without prices)."""
    with self._lock:
      bill = dataclasses.asdict(self.usage)
    bill["usd"] = self._usd(bill["prompt"], bill["cached"], bill["completion"])
    return bill

  def values(self) -> dict[str, float]:
    """Returns the bill's numbers, for a metrics line."""
    out = {}
    for name, value in self.bill().items():
      if isinstance(value, int | float):
        if name not in ("calls", "tool_calls", "usd"):
          name = f"call_{name}"
        out[name] = value
    return out

  def spent(self) -> str:
    """Returns the bill so far as a short text for people."""
    bill = self.bill()
    num_tokens = bill["prompt"] + bill["completion"]
    words = f"{bill['calls']:,} calls  {num_tokens:,} tokens"
    if bill["usd"] is not None:
      words += f"  ${bill['usd']:,.2f}"
    return words

  def in_order(
    self, work: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
  ) -> Iterator[_Result]:
    """Runs `work` on every item in threads, and yields the results in order.

    About twice as many items as workers are taken ahead. An error stops the journal,
    because the other threads would continue to ask and pay.
    """
    waiting: collections.deque[concurrent.futures.Future[_Result]] = collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(workers)
    try:
      for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > 2 * workers:
          yield waiting.popleft().result()
      while waiting:
        yield waiting.popleft().result()
    except BaseException:
      self.stop()
      raise
    finally:
      pool.shutdown(cancel_futures=True)

  def backend(self, backend: ModelBackend, run: RunKey) -> ModelBackend:
    """Wraps a backend: the journal answers the run's recorded calls."""
    seen: collections.Counter[str] = collections.Counter()

    def ask(agent: str, messages: Sequence[Message]) -> Reply:
      # --- A recorded answer.
      key = _key(seen, _MODEL, agent, [[m.role, m.content] for m in messages])
      row = self._recall(run, key)
      if row is not None:
        return Reply(**{**row, "faults": tuple(row["faults"])})

      # --- A new call. Written to disk before use.
      self._check()
      try:
        reply = backend(agent, messages)
      except BackendError as e:
        if any(e.charged):  # paid for, though there is nothing to recall
          self._append(run, _FAILED, agent, f"{_FAILED} {key}", _charge(e.charged))
        raise
      self._append(run, _MODEL, agent, key, dataclasses.asdict(reply))
      return reply

    return ask

  def tools(self, call: CallTool, run: RunKey) -> CallTool:
    """Wraps the tools in the same way, but does not record infrastructure failures."""
    seen: collections.Counter[str] = collections.Counter()

    def ask(name: str, arguments: str) -> ToolCall:
      key = _key(seen, _TOOL, name, arguments)
      row = self._recall(run, key)
      if row is not None:
        return ToolCall(**{**row, "status": CallStatus(row["status"])})
      self._check()
      result = call(name, arguments)
      # An infrastructure failure deserves a second attempt.
      if result.status != CallStatus.INFRASTRUCTURE:
        self._append(run, _TOOL, name, key, dataclasses.asdict(result))
      return result

    return ask

  def _check(self) -> None:
    if self._stopped:
      raise InfrastructureError("the run is being stopped")

  def _recall(self, run: RunKey, key: str) -> dict[str, Any] | None:
    with self._lock:
      place = self._at.get(run, {}).get(key)
    if place is None:
      return None
    return self._log.read(place)["reply"]  # from disk, without the lock

  def _append(
    self, run: RunKey, kind: str, name: str, key: str, reply: Mapping[str, Any]
  ) -> None:
    task_id, sample = run
    row = {
      "task_id": task_id,
      "sample": sample,
      "kind": kind,
      "name": name,
      "key": key,
      "reply": reply,
    }
    # The log has its own lock: this one guards the memory.
    place = self._log.append(row)
    with self._lock:
      self._at.setdefault(run, {})[key] = place
      self.usage.add(row)


def _key(seen: collections.Counter[str], kind: str, name: str, content: object) -> str:
  """Returns a call's key within its run; `seen` counts identical calls before it."""
  text = json.dumps([kind, name, content]).encode()
  name = hashlib.blake2b(text, digest_size=12).hexdigest()
  # A run may repeat the same call and expect two replies.
  seen[name] += 1
  return f"{name}/{seen[name]}"


def _charge(tokens: tuple[int, ...]) -> dict[str, int]:
  names = ("prompt_tokens", "cached_tokens", "completion_tokens")
  return dict(zip(names, tokens, strict=True))
