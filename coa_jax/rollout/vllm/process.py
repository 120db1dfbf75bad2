"""A run's own `vllm serve`: started on loopback with the required flags."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence

import httpx

_CHILD = pathlib.Path(__file__).with_name("child.py")
_LOOK_S = 0.5  # seconds between two polls of a starting server
_TAIL = 2_000  # log characters in an error


class VllmProcess:
  """A server that ends with this object, and with this process in any case."""

  def __init__(
    self,
    program: str,
    folder: str,
    max_len: int,
    dtype: str,
    flags: Sequence[str],
    start_s: float,
  ):
    """Starts the server and waits for an answer; its log is the file `folder`.PORT.log.

    Args:
      program: the `vllm` program in its own environment.
      folder: the model, tokenizer included.
      max_len: maximum tokens per trajectory.
      start_s: maximum seconds until an answer.

    Raises:
      ValueError: the server ended or took longer; the message ends with its log's end.
    """
    # The port was free a moment ago; if taken since, the server ends with an error.
    with socket.socket() as s:
      s.bind(("127.0.0.1", 0))
      port = s.getsockname()[1]
    self.url = f"http://127.0.0.1:{port}"
    self.log = f"{folder}.{port}.log"
    # --- The process: `child.py` ends vLLM when our end of the pipe closes.
    command = [sys.executable, str(_CHILD), program, "serve", folder]
    command += ["--host=127.0.0.1", f"--port={port}", f"--dtype={dtype}"]
    command += ["--logprobs-mode=processed_logprobs", f"--max-model-len={max_len}"]
    with open(self.log, "w", encoding="utf-8") as f:
      self._process = subprocess.Popen(
        [*command, *flags],
        stdin=subprocess.PIPE,
        stdout=f,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # an interrupt is for the run only
      )
    self.close = weakref.finalize(self, _end, self._process)
    try:
      self._wait(start_s)
    except BaseException:  # an interrupt too: no orphan may go on starting
      self.close()
      raise

  def _wait(self, start_s: float) -> None:
    until = time.monotonic() + start_s
    with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
      while time.monotonic() < until:
        if self._process.poll() is not None:
          raise ValueError(
            f"vllm.serve: it ended with status {self._process.returncode}; the end of "
            f"{self.log}:\n{self._tail()}"
          )
        # The server listens only after loading its weights.
        with contextlib.suppress(httpx.TransportError):
          if client.get("/health").status_code == 200:
            return
        time.sleep(_LOOK_S)
    raise ValueError(
      f"vllm.serve: no answer within vllm.start_s={start_s:g}; the end of {self.log}:\n"
      f"{self._tail()}"
    )

  def _tail(self) -> str:
    with open(self.log, encoding="utf-8", errors="replace") as f:
      f.seek(max(0, os.path.getsize(self.log) - _TAIL))
      return f.read()


def _end(process: subprocess.Popen) -> None:
  process.stdin.close()  # `child.py` waits for this
  process.wait()
