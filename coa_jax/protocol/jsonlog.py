"""An append-only log of JSON lines that a kill cannot spoil.

A row is handed to the kernel at once, so it survives the process by SIGKILL too; a
power cut may cost the last ones. The half line that a kill can leave is dropped when
the log is opened again, and a row that the disk had no room for leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from coa_jax.json_io import parse_json

Place = tuple[int, int]  # a line's first byte in the file, and its length in bytes


def read_rows(path: str, replay: Callable[[Any, str, Place], None]) -> int:
  """Reads the whole rows of a log and changes nothing: another process may write it.

  Args:
    path: of the file; where it is missing there are no rows.
    replay: as of `JsonLog`.

  Returns:
    Where the last whole row ends, in bytes.

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
  """A file of JSON lines; the first row that is appended creates it.

  Threads may share one. No descriptor stays open, so there is nothing to close.
  """

  def __init__(self, path: str, replay: Callable[[Any, str, Place], None]):
    """Reads the rows that are there and drops half a last line.

    Args:
      path: of the file, in a folder that exists by the first append.
      replay: called with each row, its "FILE:LINE" for messages, and its place for
        `read`. What it raises leaves the file as it is.

    Raises:
      ValueError: a line is not JSON; the message names file and line.
    """
    self.path = path
    self._lock = threading.Lock()
    end = read_rows(path, replay)
    # What a kill left after the whole lines is cut off.
    if os.path.exists(path):
      os.truncate(path, end)

  def append(self, row: Any) -> Place:
    """Adds a row, anything that json.dumps takes, and returns its place."""
    line = json.dumps(row).encode() + b"\n"
    # Unbuffered: what `write` returns from is the kernel's, and outlives this process.
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
