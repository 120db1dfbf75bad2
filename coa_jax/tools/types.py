"""The interface of tools: submit a call now, get its result later."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable

from coa_jax.protocol.trajectory import ToolCall
from coa_jax.tools.code_session import CodeSession

CallFuture = concurrent.futures.Future[ToolCall]


@dataclasses.dataclass(frozen=True)
class CallRequest:
  """A tool call to be made.

  Attributes:
    name: the tool's tag.
    arguments: its span's content, verbatim.
    seconds: a limit below `timeout_s`. An infrastructure failure after such a shorter
      limit counts as the tool's, because the call may only have been slow.
    session: the trajectory's session, from `Tools.code_session`.
  """

  name: str
  arguments: str
  seconds: float = math.inf
  session: CodeSession | None = None


class Tools(abc.ABC):
  """Answers the calls of trajectories: a `Toolbox`, or something before one."""

  def submit(
    self,
    name: str,
    arguments: str,
    seconds: float = math.inf,
    session: CodeSession | None = None,
  ) -> CallFuture:
    """Starts a call in the background; see `CallRequest` for its fields.

    Returns:
      A future with the call's result. Failures are results with a status: the
      future never raises, cannot be cancelled, and is done by the call's deadline.
      `seconds` of the call counts from when it began to run.
    """
    return self.start(CallRequest(name, arguments, seconds, session))

  @abc.abstractmethod
  def start(self, request: CallRequest) -> CallFuture:
    """Starts a call; see `submit`."""

  @abc.abstractmethod
  def code_session(self) -> CodeSession | None:
    """Returns a session for one trajectory's programs, or None if they share none.

    Whoever has it closes it, at whatever end of the trajectory.
    """


def done_call(call: ToolCall) -> CallFuture:
  """Makes a future of a call with a known result."""
  future = CallFuture()
  future.set_result(call)
  return future


def then(future: CallFuture, change: Callable[[ToolCall], ToolCall]) -> CallFuture:
  """Makes a future of the changed call; it raises the error of `change` or of the
  call."""
  changed = CallFuture()
  changed.set_running_or_notify_cancel()  # nobody can cancel it

  def finish(answered: CallFuture) -> None:
    # Whatever `change` does, the future is done: somebody waits for it.
    try:
      changed.set_result(change(answered.result()))
    except BaseException as e:
      changed.set_exception(e)

  future.add_done_callback(finish)
  return changed
