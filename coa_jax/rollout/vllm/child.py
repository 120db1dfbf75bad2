"""Runs `vllm serve` while its own standard input stays open.

  python child.py VLLM ARGUMENT ...  (`process` starts it)

The pipe closes when the process at its other end is gone, so the server ends with its
run in any case, SIGKILL included. This script imports none of our modules.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading

GRACE_S = 20.0


def main(command: list[str]) -> int:
  """Runs the command; returns its exit status."""
  # Endpoints for loading weights; no usage statistics.
  os.environ.update(VLLM_SERVER_DEV_MODE="1", VLLM_NO_USAGE_STATS="1")
  # For importing `vllm.plugin`.
  paths = [str(pathlib.Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  # A separate session, so that the server's workers are killed with the server.
  server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

  def end() -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(server.pid, signal.SIGKILL)

  def end_with_the_run() -> None:
    sys.stdin.buffer.read()
    server.terminate()
    threading.Timer(GRACE_S, end).start()

  threading.Thread(target=end_with_the_run, daemon=True).start()
  status = server.wait()
  end()
  os._exit(status % 256)  # a running timer would delay a normal exit


if __name__ == "__main__":
  main(sys.argv[1:])
