"""A config's functions: called by name in the tag `tool`, without their own tag."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Mapping

from coa_jax.protocol.tool_bodies import parse_function_call
from coa_jax.runtime.fields import PYTHON_PATH, import_named
from coa_jax.tools.types import CALL_CONTEXT
from tools_sandbox.faults import BadCall, Unavailable
from tools_sandbox.mcp_client import McpConfig, McpTool


@dataclasses.dataclass(frozen=True)
class FunctionTool:
  """A tool called by its name.

  Attributes:
    description: one line for the prompt: its purpose and arguments.
    mcp: the MCP server's tool for its calls.
    function: or `module:name` of a Python function; called from several threads with
      keyword arguments, returns text. A parameter called `context` gets the
      trajectory's `CallContext`. It may raise the exceptions of `tools_sandbox.faults`;
      any other counts as an infrastructure failure.
  """

  description: str
  mcp: McpConfig | None = None
  function: str | None = None

  def __post_init__(self):
    if (self.mcp is None) == (self.function is None):
      raise ValueError("a function tool has either mcp or function")
    if self.function is not None and not PYTHON_PATH.fullmatch(self.function):
      raise ValueError(f"function {self.function!r} must be module:name")


class _Function:
  """A Python function as a tool; a call's content is a JSON object of arguments."""

  def __init__(self, path: str):
    self._function = import_named(path, "function")
    if inspect.iscoroutinefunction(self._function):
      raise ValueError(f"function {path!r} is async; write def")
    signature = inspect.signature(self._function)
    self._takes_context = "context" in signature.parameters
    # The model does not see this parameter, and can not set it.
    own = [p for name, p in signature.parameters.items() if name != "context"]
    self._signature = signature.replace(parameters=own)

  def __call__(self, content: str, seconds: float) -> str:
    del seconds  # the caller abandons a late call
    arguments = json.loads(content)
    # Bound first: a TypeError of the function itself is not the model's fault.
    try:
      self._signature.bind(**arguments)
    except TypeError as e:
      raise BadCall(f"{e}; it takes {self._signature}") from None
    if self._takes_context:
      arguments["context"] = CALL_CONTEXT.get()
    # `run_tool` handles its exceptions, as for any tool.
    return str(self._function(**arguments))

  def close(self) -> None:
    """Does nothing."""


class Functions:
  """A config's functions, opened."""

  def __init__(self, functions: Mapping[str, FunctionTool], names: Iterable[str] = ()):
    """Opens every function.

    Args:
      functions: name -> function.
      names: all names that the policy may call, for messages; by default `functions`.

    Raises:
      ValueError: a function, package, server or tool is missing.
    """
    self._names = tuple(names) or tuple(functions)
    self._tools: dict[str, McpTool | _Function] = {}
    for name, tool in functions.items():
      try:
        if tool.mcp:
          self._tools[name] = McpTool(tool.mcp)
        else:
          self._tools[name] = _Function(tool.function or "")
      except BaseException as e:
        self.close()  # servers started before this one
        if isinstance(e, (ValueError, Unavailable)):
          raise ValueError(f"functions.{name}: {e}") from e
        raise

  def __call__(self, content: str, seconds: float) -> str:
    """Answers a call; see `tools.Tool`."""
    call = parse_function_call(content)
    assert call is not None  # ToolSpec.find_fault has refused every other body
    tool = self._tools.get(call.name)
    if tool is None:
      raise BadCall(f"no tool {call.name}; there are {', '.join(self._names)}")
    return tool(json.dumps(dict(call.arguments)), seconds)

  def close(self) -> None:
    """Ends the started servers."""
    for tool in self._tools.values():
      tool.close()
