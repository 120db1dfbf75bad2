"""A running `vllm serve`, for tests against the real server.

Needs vLLM in a separate environment (docs/vllm.md): COA_VLLM=/its/bin/vllm.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

VLLM = os.environ.get("COA_VLLM")
NEEDED = pytest.mark.skipif(not VLLM, reason="COA_VLLM names no vLLM")


@contextlib.contextmanager
def served(folder: str, log: str, *flags: str) -> Iterator[httpx.Client]:
  """Serves the folder in float32 as model "m"; yields a client once it answers."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
  command = [VLLM, "serve", folder, "--host=127.0.0.1", f"--port={port}"]
  command += ["--dtype=float32", "--max-model-len=256", "--served-model-name=m", *flags]
  env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
  with open(log, "w") as f:
    # A separate session, so that its workers can be killed with it.
    process = subprocess.Popen(
      command, stdout=f, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )
  try:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
      for _ in range(300):
        assert process.poll() is None, pathlib.Path(log).read_text()[-3_000:]
        with contextlib.suppress(httpx.TransportError):
          if client.get("/health").status_code == 200:
            break
        time.sleep(1)
      else:
        raise AssertionError(f"no answer: {pathlib.Path(log).read_text()[-3_000:]}")
      yield client
  finally:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(60)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
