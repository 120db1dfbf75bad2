"""The interface of tools: submit a call now, get its result later."""

from __future__ import annotations

import abc
import concurrent.futures
import contextvars
import dataclasses
import math
from collections.abc import Callable, Sequence

from coa_jax.protocol.trajectory import ToolCall
from coa_jax.tools.code_session import CodeSession
from coa_jax.tools.environments import EnvironmentSession

CallFuture = concurrent.futures.Future[ToolCall]


@dataclasses.dataclass(frozen=True)
class CallContext:
  """The trajectory that makes a call.

  Attributes:
    task_id: its task.
    sample: the attempt's number within the task.
    seed: the run's sampling seed.
  """

  task_id: str
  sample: int
  seed: int


# In a call's thread, its trajectory; None outside of rollouts.
CALL_CONTEXT: contextvars.ContextVar[CallContext | None] = contextvars.ContextVar(
  "call_context", default=None
)


@dataclasses.dataclass(frozen=True)
class CallRequest:
  """A tool call to be made.

  Attributes:
    name: the tool's tag.
    arguments: the span's content, verbatim.
    seconds: a limit below the tool's own. An infrastructure failure after this shorter
      limit counts as the tool's, because the call may only have been slow.
    session: the trajectory's session, from `Tools.code_session`.
    environment: the trajectory's environment, from `Tools.environment`.
    context: the trajectory, for function tools that ask for it.
  """

  name: str
  arguments: str
  seconds: float = math.inf
  session: CodeSession | None = None
  environment: EnvironmentSession | None = None
  context: CallContext | None = None


class Tools(abc.ABC):
  """Answers trajectories' calls: a `Toolbox`, or a layer in front of a `Toolbox`."""

  def submit(
    self,
    name: str,
    arguments: str,
    seconds: float = math.inf,
    session: CodeSession | None = None,
  ) -> CallFuture:
    """Starts a call in the background; see `CallRequest` for the arguments.

    Returns:
      A future with the call's result. Failures are results with a status: the
      future never raises, cannot be cancelled, and is done by the call's deadline.
      `ToolCall.seconds` excludes the wait before the call begins to run.
    """
    return self.start(CallRequest(name, arguments, seconds, session))

  @abc.abstractmethod
  def start(self, request: CallRequest) -> CallFuture:
    """Starts a call; see `submit`."""

  @abc.abstractmethod
  def code_session(self) -> CodeSession | None:
    """Returns a session for one trajectory's programs, or None if they share none.

    The caller closes the session when the trajectory ends, however it ends.
    """

  @abc.abstractmethod
  def environment(self) -> EnvironmentSession | None:
    """Returns one trajectory's environment, or None if the config has none.

    The caller resets it, and closes it when the trajectory is graded or dropped.
    """


def done_call(call: ToolCall) -> CallFuture:
  """Returns a finished future of a call with a known result."""
  future = CallFuture()
  future.set_result(call)
  return future


def then(future: CallFuture, change: Callable[[ToolCall], ToolCall]) -> CallFuture:
  """Returns a future of the changed call, or of the call's or `change`'s error."""
  changed = CallFuture()
  changed.set_running_or_notify_cancel()  # nobody can cancel it

  def finish(answered: CallFuture) -> None:
    # Whatever `change` does, the future must be done: somebody waits for it.
    try:
      changed.set_result(change(answered.result()))
    except BaseException as e:
      changed.set_exception(e)

  future.add_done_callback(finish)
  return changed


def joined(futures: Sequence[CallFuture]) -> concurrent.futures.Future[list[ToolCall]]:
  """Returns a future of all calls, in this order."""
  out: concurrent.futures.Future[list[ToolCall]] = concurrent.futures.Future()
  out.set_running_or_notify_cancel()  # nobody can cancel it
  left = iter(range(len(futures) - 1, -1, -1))  # `next` is atomic

  def finish(_: CallFuture) -> None:
    if next(left) == 0:
      try:
        out.set_result([future.result() for future in futures])
      except BaseException as e:
        out.set_exception(e)

  for future in futures:
    future.add_done_callback(finish)
  return out
