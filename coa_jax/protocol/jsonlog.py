"""An append-only log of JSON lines, safe against kills.

A row goes to the kernel at once, so it survives SIGKILL; a power cut may lose the last
rows. A half line left by a kill is dropped when the log is opened again, and a row that
does not fit on the disk leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from coa_jax.runtime.json_io import parse_json

Place = tuple[int, int]  # a line's first byte in the file, and its length in bytes


def read_rows(path: str, replay: Callable[[Any, str, Place], None]) -> int:
  """Reads a log's whole rows and changes nothing: another process may be writing.

  Args:
    path: the file; a missing file has no rows.
    replay: as in `JsonLog`.

  Returns:
    The byte offset after the last whole row.

  Raises:
    ValueError: a line is not JSON; the message names file and line.
  """
  end = 0
  with contextlib.suppress(FileNotFoundError), open(path, "rb") as f:
    for number, line in enumerate(f, 1):
      if not line.endswith(b"\n"):
        break
      where = f"{path}:{number}"
      replay(parse_json(line, where, surrogates=True), where, (end, len(line)))
      end += len(line)
  return end


class JsonLog:
  """A file of JSON lines; the first append creates it.

  Threads may share a log. No descriptor stays open, so there is nothing to close.
  """

  def __init__(self, path: str, replay: Callable[[Any, str, Place], None]):
    """Reads the existing rows and drops a half last line.

    Args:
      path: the file, in a folder that exists by the first append.
      replay: called with each row, its "FILE:LINE" for messages, and its place for
        `read`. If it raises, the file stays unchanged.

    Raises:
      ValueError: a line is not JSON; the message names file and line.
    """
    self.path = path
    self._lock = threading.Lock()
    end = read_rows(path, replay)
    # Cut off a kill's remains after the whole lines.
    if os.path.exists(path):
      os.truncate(path, end)

  def append(self, row: Any) -> Place:
    """Appends a row of JSON values, and returns its place."""
    line = json.dumps(row).encode() + b"\n"
    # Unbuffered: when `write` returns, the data is in the kernel and outlives this
    # process.
    with self._lock, open(self.path, "ab", buffering=0) as f:
      start = f.tell()
      left = memoryview(line)
      try:
        while left:  # a full disk may take a part before it raises
          left = left[f.write(left) :]
      except OSError:
        # Half a row would make the next one unreadable too.
        f.truncate(start)
        raise
    return start, len(line)

  def read(self, place: Place) -> Any:
    """Returns the row at a place."""
    start, size = place
    with open(self.path, "rb") as f:
      f.seek(start)
      return json.loads(f.read(size))
