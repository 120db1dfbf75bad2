"""Runs an MCP server over stdio, and kills a server that writes an endless line.

  python mcp_relay.py MOST_BYTES PROGRAM ARGUMENT...

The SDK keeps an unfinished line in memory. The server inherits our standard input; its
output passes through here, and so does the beginning of its standard error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import IO

_CHUNK = 65536
_LINE = 1000  # bytes of a standard error line
_LOG = 65536  # bytes of standard error in all


def main() -> int:
  """Passes on the server's output; returns its exit status, or 1 after killing it."""
  most = int(sys.argv[1])
  command = sys.argv[2:]
  try:
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  except OSError as e:
    print(f"{command[0]}: {e.strerror}", file=sys.stderr)
    return 127
  log = threading.Thread(target=_log, args=(server.stderr, command[0]), daemon=True)
  log.start()
  os.close(0)  # the server's alone, so that writers notice the server's end
  # Output passes on at once: only the unfinished line's length is kept.
  length = 0
  while data := os.read(server.stdout.fileno(), _CHUNK):
    _, ended, rest = data.rpartition(b"\n")
    if ended:
      length = 0
    length += len(rest)
    if length > most:
      print(f"{command[0]}: a line of more than {most} bytes", file=sys.stderr)
      server.kill()
      server.wait()
      return 1
    while data:  # a pipe may accept only a part
      data = data[os.write(1, data) :]
  code = server.wait()
  log.join(1.0)  # the server's descendants may hold standard error open
  return code


def _log(stream: IO[bytes], name: str) -> None:
  """Copies the beginning of a server's standard error to ours; discards the rest."""
  left = _LOG
  while line := stream.readline(_LINE):
    if left <= 0:
      continue
    left -= len(line)
    text = line.decode("utf-8", "replace").rstrip()
    shown = "".join(c if c.isprintable() or c == "\t" else "?" for c in text)
    if left <= 0:
      shown += f"\n{name}: the rest of its standard error is left out"
    print(shown, file=sys.stderr, flush=True)


if __name__ == "__main__":
  try:
    sys.exit(main())
  except BrokenPipeError:  # nobody reads any more
    os._exit(1)
