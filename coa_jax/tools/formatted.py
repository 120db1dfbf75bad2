"""Tools under other names and layouts: what a policy writes, read for the real ones."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math

from coa_jax.protocol.tool_naming import ToolNaming
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from coa_jax.tools.code_session import Cells
from coa_jax.tools.toolbox import Toolbox


class FormattedTools:
  """A toolbox whose tools are called and written to as a format says."""

  def __init__(self, toolbox: Toolbox, tool_format: ToolNaming):
    """Args: the tools, which the caller closes; the format."""
    self._toolbox, self._format = toolbox, tool_format

  def cells(self) -> Cells | None:
    """As `Toolbox.cells`."""
    return self._toolbox.cells()

  def submit(
    self,
    name: str,
    arguments: str,
    seconds: float = math.inf,
    cells: Cells | None = None,
  ) -> concurrent.futures.Future[ToolCall]:
    """As `Toolbox.submit`; the call on record is as it was written.

    What is not in the tool's layout is answered with how to write it, and runs nothing.
    """
    out: concurrent.futures.Future[ToolCall] = concurrent.futures.Future()
    try:
      tag, body = self._format.read(name, arguments)
      error = f"{name} cannot read this; write {self._format.formats[tag].description}"
    except KeyError:
      tag, body, error = name, None, f"no tool {name}"
    if body is None:
      refused = ToolCall(name, arguments, f"error: {error}", CallStatus.MODEL)
      out.set_result(refused)
      return out

    def done(answered: concurrent.futures.Future[ToolCall]) -> None:
      call = dataclasses.replace(answered.result(), name=name, arguments=arguments)
      out.set_result(call)

    self._toolbox.submit(tag, body, seconds, cells).add_done_callback(done)
    return out
