"""SandboxFusion's `POST /run_code`: requests and replies for back-end `remote`.

A request is {"code", "language", "stdin", "run_timeout", "compile_timeout",
"memory_limit_MB", "files" (path -> base64), "fetch_files"}. A reply has status
(Success, Failed or SandboxError), message, compile_result, run_result and files;
run_result is {"status" (Finished, TimeLimitExceeded or Error), "execution_time",
"return_code", "stdout", "stderr"}. After bytedance/SandboxFusion,
sandbox/server/sandbox_api.py and sandbox/runners/base.py (2025); nothing is copied.
"""

from __future__ import annotations

import signal
from typing import Any

from tools_sandbox.jail.wire import Clip, Limits, Result, Verdict


def write_request(program: str, stdin: str, limits: Limits) -> dict[str, Any]:
  """Writes a run as a SandboxFusion request, which limits only time and memory."""
  return {
    "code": program,
    "language": "python",
    "stdin": stdin,
    "compile_timeout": limits.wall_s,
    "run_timeout": limits.wall_s,
    "memory_limit_MB": limits.memory_mb,
    "files": {},
    "fetch_files": [],
  }


def read_reply(reply: dict[str, Any], limits: Limits) -> Result:
  """Reads the result in a reply; out-of-memory has the verdict `error`, too.

  Args:
    reply: the decoded JSON object.
    limits: the requested limits; each stream is cut to their `output_bytes`.

  Raises:
    ValueError, TypeError, KeyError: the reply does not fit this API.
  """
  # "SandboxError" is the service's own failure; "Failed" is the program's.
  if reply["status"] == "SandboxError":
    reason = f"SandboxFusion: {reply['message']}"
    return Result("", reason, None, Verdict.INFRASTRUCTURE, 0.0)
  # --- How the program ended: by the time limit, or with a status.
  run = reply["run_result"]
  late = run["status"] == "TimeLimitExceeded"
  code = run["return_code"]
  if not late and (run["status"] != "Finished" or type(code) is not int):
    raise ValueError(f"run_result: status {run['status']!r}, return_code {code!r}")
  if late:
    verdict = Verdict.TIMEOUT
    code = -signal.SIGKILL
  elif code:
    verdict = Verdict.ERROR
  else:
    verdict = Verdict.OK

  # --- The output. The service cuts at its own length, or not at all.
  stdout, cut_out = _clipped(run["stdout"] or "", limits.output_bytes)
  stderr, cut_err = _clipped(run["stderr"] or "", limits.output_bytes)
  seconds = float(run["execution_time"] or 0.0)
  return Result(stdout, stderr, code, verdict, seconds, cut_out or cut_err)


def _clipped(text: str, size: int) -> tuple[str, bool]:
  clip = Clip(size)
  clip.feed(text.encode("utf-8", "replace"))
  return clip.text()
