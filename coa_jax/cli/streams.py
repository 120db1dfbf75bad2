"""Keeps a program running after the reader of its output has ended."""

from __future__ import annotations

import errno
import io
import os
import sys

# The pipe's reader ended; the terminal closed.
_GONE = (errno.EPIPE, errno.EIO)


class _Outliving(io.FileIO):
  """A file descriptor that becomes /dev/null when its reader is gone."""

  def write(self, data: bytes) -> int:
    """Writes to the reader, otherwise to /dev/null."""
    try:
      return super().write(data)
    except OSError as e:
      if e.errno not in _GONE:
        raise
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, self.fileno())  # for other writers and child processes, too
    os.close(null)
    return len(data)


def outlive_readers() -> None:
  """Lets the program continue when its output's reader ends (`program 2>&1 | head`).

  A run writes its numbers to its workdir, so it loses only the printed lines.
  """
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is None or stream is not getattr(sys, f"__{name}__"):
      continue  # closed, or another program's, e.g. a test's or a notebook's
    stream.flush()
    raw = _Outliving(stream.fileno(), "w", closefd=False)
    outliving = io.TextIOWrapper(
      io.BufferedWriter(raw),
      stream.encoding,
      stream.errors,
      line_buffering=stream.line_buffering,
    )
    setattr(sys, name, outliving)
