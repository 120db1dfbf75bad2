"""Runs an MCP server over stdio, and ends it where it writes a line without an end.

  python mcp_relay.py MOST_BYTES PROGRAM ARGUMENT...

The SDK keeps a line in memory until its end comes. The server has our standard input
and error; its output goes through here.
"""

from __future__ import annotations

import os
import subprocess
import sys

_CHUNK = 65536


def main() -> int:
  """Passes on what the server writes; its exit status, or 1 where it is ended here."""
  most = int(sys.argv[1])
  command = sys.argv[2:]
  try:
    server = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
  except OSError as e:
    print(f"{command[0]}: {e.strerror}", file=sys.stderr)
    return 127
  os.close(0)  # the server's alone, so that its end is seen by whoever writes to it
  # Passed on as it comes: only the length of its last line is kept.
  length = 0  # of the line that has no end yet
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
    while data:  # a pipe may take less than it is given
      data = data[os.write(1, data) :]
  return server.wait()


if __name__ == "__main__":
  try:
    sys.exit(main())
  except BrokenPipeError:  # nobody reads any more
    os._exit(1)
