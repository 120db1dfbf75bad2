"""Environments: tools with a state, one instance per trajectory.

A user's class plays a game or holds a database: `reset` begins a task, the policy calls
its methods by name, and `reward` may replace the task's grader.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from coa_jax.protocol.tool_bodies import parse_function_call
from coa_jax.protocol.tools import FUNCTION_TAG
from coa_jax.runtime.fields import PYTHON_PATH, check_fields, import_named, plain
from coa_jax.tools.code_session import SandboxSession
from tools_sandbox.faults import BadCall, SessionEnded, ToolFault, Unavailable
from tools_sandbox.jail.wire import Verdict

_RESERVED = ("reset", "reward", "close")


class Environment(Protocol):
  """A user's class, with a method for each function; the other three are optional.

  A function gets keyword arguments and returns text. It may depend on nothing but the
  task and earlier calls: a group's attempts begin alike, and a resumed run makes its
  calls again. A `ValueError` or `TypeError` is the model's mistake, and the model reads
  its message; any other exception means that the environment is broken.
  """

  def reset(self, task: dict[str, Any]) -> str | None:
    """Begins a task (the row, see `Task.to_json`); returns text for the prompt."""

  def reward(self) -> float | None:
    """Returns a reward from 0 to 1, or None if the task's grader decides.

    A parameter called `answer` gets the trajectory's answer, None without one.
    """

  def close(self) -> None:
    """Frees everything."""


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
  """Config section `tools.environment`.

  Attributes:
    path: `module:Class`, an `Environment`; a new instance per trajectory.
    functions: method -> one line for the prompt: what it does, and its arguments.
    jail: True runs the class in the sandbox, where its file is alone with the standard
      library; False in this process.
  """

  path: str
  functions: dict[str, str]
  jail: bool = False

  def __post_init__(self):
    check_fields(self)
    if not PYTHON_PATH.fullmatch(self.path):
      raise ValueError(f"environment.path {self.path!r} must be module:Class")
    if not self.functions:
      raise ValueError("environment.functions is empty; the policy could call nothing")
    for name in self.functions:
      if not name.isidentifier() or name.startswith("_") or name in _RESERVED:
        raise ValueError(
          f"environment.functions: {name!r} must be the name of a public method other "
          f"than {', '.join(_RESERVED)}"
        )


def load_class(config: EnvironmentConfig) -> type:
  """Imports the environment's class.

  Raises:
    ValueError: the module or class does not exist, or lacks a function.
  """
  found = import_named(config.path, "environment")
  for name in config.functions:
    if not callable(getattr(found, name, None)):
      raise ValueError(f"environment {config.path!r} has no method {name}")
  for name in (*config.functions, "reset", "reward", "close"):
    if inspect.iscoroutinefunction(getattr(found, name, None)):
      raise ValueError(f"environment {config.path!r}: {name} is async; write def")
  return found


def _signature(found: type, name: str) -> inspect.Signature:
  """Returns a method's signature without `self`; a static method has none."""
  method = inspect.getattr_static(found, name)
  return inspect.signature(method.__get__(object(), found))


class EnvironmentSession:
  """One trajectory's environment, from its prompt to its reward. Thread-safe."""

  def __init__(
    self, config: EnvironmentConfig, found: type, make: Callable[[], Environment]
  ):
    """Makes nothing yet.

    Args:
      config: the environment's.
      found: its class.
      make: makes the environment, which `close` closes.
    """
    self._config = config
    self._class = found
    self._make = make
    self._environment: Environment | None = None
    self._busy = threading.Lock()  # held by a call

  def reset(self, task: Mapping[str, Any]) -> str:
    """Begins the task; returns text for the prompt, "" for none.

    Raises:
      ValueError: `reset` fails; the message names the environment and the task.
    """
    try:
      self._environment = self._make()
      reset = getattr(self._environment, "reset", lambda task: None)
      return str(reset(dict(task)) or "")
    except Exception as e:  # a user's class may raise anything
      raise ValueError(
        f"environment {self._config.path} on task {task['id']!r}: reset raised "
        f"{type(e).__name__}: {e}"
      ) from e

  def takes(self, tag: str, content: str) -> bool:
    """Whether a span calls a function of the environment."""
    call = parse_function_call(content) if tag == FUNCTION_TAG else None
    return call is not None and call.name in self._config.functions

  def __call__(self, content: str, seconds: float) -> str:
    """Answers a call for which `takes` is true; see `tools.Tool`."""
    del seconds  # the caller abandons a late call
    call = parse_function_call(content)
    assert call is not None and self._environment is not None
    # Checked first: a jailed environment's errors are text.
    signature = _signature(self._class, call.name)
    try:
      signature.bind(**call.arguments)
    except TypeError as e:
      raise BadCall(f"{e}; {call.name} takes {signature}") from None
    # An abandoned call may still run; its successor must not run beside it.
    if not self._busy.acquire(blocking=False):
      raise ToolFault("the environment is busy with an earlier call")
    try:
      return str(getattr(self._environment, call.name)(**call.arguments))
    except (ValueError, TypeError) as e:
      raise BadCall(str(e)) from None
    finally:
      self._busy.release()

  def reward(self, answer: str | None = None) -> float | None:
    """Returns the environment's reward, or None if the task's grader decides.

    `answer` is the trajectory's, for a class whose `reward` takes it.

    Raises:
      ValueError: `reward` fails, or is not a number from 0 to 1.
      RuntimeError: the sandbox fails.
    """
    reward = getattr(self._environment, "reward", None)
    if reward is None:
      return None
    where = f"environment {self._config.path}: reward"
    if self._busy.locked():
      raise RuntimeError(f"{where}: an abandoned call still runs")
    takes = inspect.signature(getattr(self._class, "reward", reward)).parameters
    given = {"answer": answer} if "answer" in takes else {}
    try:
      value = plain(reward(**given))
    except (ToolFault, Unavailable) as e:
      raise RuntimeError(f"{where}: {e}") from e
    except Exception as e:  # as for `reset`
      raise ValueError(f"{where} raised {type(e).__name__}: {e}") from e
    if value is None:
      return None
    if not isinstance(value, int | float) or not 0 <= value <= 1 or math.isnan(value):
      raise ValueError(f"{where} gave {value!r}; it must be from 0 to 1, or None")
    return float(value)

  def close(self) -> None:
    """Closes the environment, once."""
    environment = self._environment
    self._environment = None
    close = getattr(environment, "close", None)
    if close is not None:
      close()


# Run once in a sandbox session, after the environment's file.
_BEGIN = "\n_environment = {name}()\n"
# Run for each call; the result is the last line.
_CALL = """
import json as _json, sys as _sys
_method, _arguments = _json.load(_sys.stdin)
_method = getattr(_environment, _method, lambda **_: None)
try:
  _out = {"value": _method(**_arguments)}
except (ValueError, TypeError) as _error:
  _out = {"error": str(_error)}
print()
print(_json.dumps(_out, default=str))
"""


class JailedEnvironment:
  """An environment whose class runs in the sandbox.

  A prompt is made before its rollout has a sandbox slot: `reset` runs twice, once for
  the prompt, and once in the session of the first call.
  """

  def __init__(self, found: type, open_session: Callable[[], SandboxSession]):
    """Opens nothing yet.

    Args:
      found: the environment's class.
      open_session: opens a sandbox session.
    """
    with open(inspect.getfile(found), encoding="utf-8") as f:
      self._program = f.read() + _BEGIN.format(name=found.__name__)
    self._open = open_session
    self._session: SandboxSession | None = None
    self._task: dict[str, Any] = {}

  def __getattr__(self, name: str) -> Callable[..., Any]:
    """Returns the class's method `name`, as run in the session."""
    return functools.partial(self._call, name)

  def reset(self, task: dict[str, Any]) -> str | None:
    """See `Environment`; the session ends."""
    self._task = task
    try:
      return self._begin()
    finally:
      self.close()

  def close(self) -> None:
    """Ends the session."""
    if self._session is not None:
      self._session.close()
      self._session = None

  def _begin(self) -> str | None:
    try:
      self._session = self._open()
    except (TimeoutError, RuntimeError) as e:
      raise Unavailable(f"no session for an environment: {e}") from e
    self._run(self._program, "")
    return self._call("reset", task=self._task)

  def _call(self, method: str, /, **arguments: Any) -> Any:
    if self._session is None:  # the first call
      self._begin()
    out = self._run(_CALL, json.dumps([method, arguments]))
    try:
      answer = json.loads(out.splitlines()[-1])
    except ValueError:  # the sandbox cuts long output
      raise ToolFault("the environment's result is too long") from None
    if "error" in answer:
      raise ValueError(answer["error"])
    return answer["value"]

  def _run(self, program: str, stdin: str) -> str:
    assert self._session is not None
    try:
      result = self._session.run(program, stdin)
    except SessionEnded:  # an earlier call used up its time or memory
      raise Unavailable("the environment's session has ended") from None
    if result.verdict == Verdict.OK:
      return result.stdout
    if result.verdict in (Verdict.TIMEOUT, Verdict.MEMORY):
      raise ToolFault(f"the environment used up its {result.verdict.value}")
    raise Unavailable(f"the environment failed: {result.stderr.strip()[-500:]}")
