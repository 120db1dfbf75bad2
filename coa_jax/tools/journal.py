"""What tools said to trajectories that are not learnt from yet, on disk.

A step of RL that is interrupted is made again from the policy that it began with; the
same tokens are sampled, so the same calls are asked for, and this journal answers those
that were answered before. No side effect happens twice, and a tool that would answer
differently today can not change a trajectory. A call that was on its way when the
process died has no answer here and is made again.

Rollouts that go on beside the learner (`ahead.py`) promise less. Which policy samples a
token is a matter of time there, and a group that is not learnt from yet is sampled anew
by whatever policy there is then, with the random numbers that it had. A call that it
asks for again, word for word at the same place, is answered from here; another is made,
and what the one before it did outside stays done. With the quickstart's model 90 % of
the calls are asked again after one more update, 78 % after two and 73 % after three.

Failures of infrastructure are not kept: they are what a second attempt is for, and
tools that are being closed fail so. A line is handed to the kernel at once and survives
the process; a power cut may cost the last ones.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from coa_jax.json_io import to_dataclass
from coa_jax.protocol.jsonlog import JsonLog, Place
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from coa_jax.tools.code_session import Cells

_FILE = re.compile(r"step_(\d+)\.jsonl")


class Tools(Protocol):
  """Who answers the calls of a trajectory: a `Toolbox`, or one with a journal."""

  def cells(self) -> Cells | None:
    """As `Toolbox.cells`."""
    ...

  def submit(
    self,
    name: str,
    arguments: str,
    seconds: float = math.inf,
    cells: Cells | None = None,
  ) -> concurrent.futures.Future[ToolCall]:
    """As `Toolbox.submit`."""
    ...


class ToolJournal:
  """A folder with a file of JSON lines for every step; threads may share it."""

  def __init__(self, folder: str):
    """Touches nothing yet; the folder is made with the first result."""
    self._folder = folder
    self._lock = threading.Lock()
    # By step, the results that were there when its file was opened: no call is made
    # twice in one process.
    self._before: dict[int, tuple[JsonLog, dict[str, ToolCall]]] = {}

  def tools(
    self, tools: Tools, step: int, who: tuple[Any, ...], within: int = 0
  ) -> Tools:
    """The tools as one trajectory calls them, answered from here where they can be.

    Args:
      tools: who answers new calls.
      step: in which the trajectory is made.
      who: tells it from all others of the step; JSON values.
      within: how many steps earlier or later it may have been made before; `who` then
        tells it from all others of these steps too.
    """
    return _Journalled(self, tools, step, who, within)

  def forget(self, before: int) -> None:
    """Deletes what belongs to steps before this one: they are never made again."""
    with self._lock:
      for step in [n for n in self._before if n < before]:
        del self._before[step]
    for name in os.listdir(self._folder) if os.path.isdir(self._folder) else ():
      match = _FILE.fullmatch(name)
      if match and int(match[1]) < before:
        os.remove(os.path.join(self._folder, name))

  def find(self, steps: Iterable[int], key: str) -> ToolCall | None:
    """The result of a call that was made before in one of the steps, if it is there."""
    with self._lock:
      found = (self._open(step)[1].get(key) for step in steps)
      return next(filter(None, found), None)

  def keep(self, step: int, key: str, call: ToolCall) -> None:
    """Appends a result; on disk when this returns, unless the power fails."""
    with self._lock:
      log, _ = self._open(step)
      os.makedirs(self._folder, exist_ok=True)
      log.append({"key": key, **vars(call)})

  def _open(self, step: int) -> tuple[JsonLog, dict[str, ToolCall]]:
    """Opens a step's file once; returns it with the results that were there then."""
    if step in self._before:
      return self._before[step]
    calls: dict[str, ToolCall] = {}

    def replay(row: Any, where: str, place: Place) -> None:
      key = str(row.pop("key", "")) if isinstance(row, dict) else ""
      calls[key] = to_dataclass(row, ToolCall, where, needed=("result", "status"))

    path = os.path.join(self._folder, f"step_{step:06d}.jsonl")
    try:
      log = JsonLog(path, replay)
    except ValueError as e:
      message = f"{e}; delete the file, and the step's calls are made again"
      raise ValueError(message) from e
    self._before[step] = (log, calls)
    return log, calls


class _Journalled:
  """The tools of one trajectory; its calls come one after the other."""

  def __init__(
    self,
    journal: ToolJournal,
    tools: Tools,
    step: int,
    who: tuple[Any, ...],
    within: int,
  ):
    self._journal, self._tools, self._step, self._who = journal, tools, step, who
    self._steps = range(max(step - within, 0), step + within + 1)
    self._made = 0

  def cells(self) -> Cells | None:
    """As `Toolbox.cells`."""
    return self._tools.cells()

  def submit(
    self,
    name: str,
    arguments: str,
    seconds: float = math.inf,
    cells: Cells | None = None,
  ) -> concurrent.futures.Future[ToolCall]:
    """As `Toolbox.submit`; done at once where the answer is known.

    Programs of a session are run again, in their order: the next one needs the
    variables, which no journal holds.
    """
    self._made += 1
    if cells is not None and name == "code":
      return self._tools.submit(name, arguments, seconds, cells)
    asked = json.dumps([self._who, self._made, name, arguments]).encode()
    key = hashlib.blake2b(asked, digest_size=16).hexdigest()
    out: concurrent.futures.Future[ToolCall] = concurrent.futures.Future()
    out.set_running_or_notify_cancel()
    found = self._journal.find(self._steps, key)
    if found is not None:
      out.set_result(found)
      return out

    def answered(future: concurrent.futures.Future[ToolCall]) -> None:
      try:  # whoever reads a result finds it kept
        call = future.result()
        if call.status != CallStatus.INFRASTRUCTURE:
          self._journal.keep(self._step, key, call)
        out.set_result(call)
      except BaseException as e:
        out.set_exception(e)

    self._tools.submit(name, arguments, seconds, cells).add_done_callback(answered)
    return out
