"""SandboxFusion's `POST /run_code`, both ways: as we serve it, and as we ask it.

A request is {"code", "language", "stdin", "run_timeout", "compile_timeout",
"memory_limit_MB", "files" (path -> base64), "fetch_files", "args"}. A reply has status
(Success, Failed or SandboxError), message, compile_result, run_result and files;
run_result is {"status" (Finished, TimeLimitExceeded or Error), "execution_time",
"return_code", "stdout", "stderr"}. After bytedance/SandboxFusion,
sandbox/server/sandbox_api.py and sandbox/runners/base.py (2025); nothing is copied.
"""

from __future__ import annotations

import base64
import dataclasses
import signal
from typing import Any

from tools_sandbox.jail.wire import Clip, Limits, Result, Verdict

# Files lie in the working directory before the program begins, and its tracebacks are
# as without: the frame of this text is left out, and the lines are the program's own.
_WITH_FILES = """\
def _begin():
  import base64, linecache, os, sys
  code, files = {code!r}, {files!r}
  for path, data in files.items():
    folder = os.path.dirname(path)
    if folder:
      os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as f:
      f.write(base64.b64decode(data))
  name = "<program>"
  linecache.cache[name] = len(code), None, code.splitlines(True), name
  del globals()["_begin"]
  try:
    exec(compile(code, name, "exec", dont_inherit=True), globals())
  except (SystemExit, MemoryError):
    raise
  except BaseException as e:
    sys.excepthook(type(e), e, e.__traceback__.tb_next)
    sys.exit(1)
_begin()
"""


class Malformed(ValueError):
  """A request that is not one of this API, as FastAPI would say it: status 422."""

  def __init__(self, field: str, message: str):
    super().__init__(f"{field}: {message}")
    # What FastAPI's validation answers, so that clients can read it.
    self.detail = [{"type": "value_error", "loc": ["body", field], "msg": message}]


class Unsupported(ValueError):
  """A request that SandboxFusion would serve and we do not: a SandboxError."""


def read_request(body: dict[str, Any], limits: Limits) -> tuple[str, str, Limits]:
  """The program, its stdin and its limits.

  Args:
    body: a decoded request; fields that the API does not have are ignored, as there.
    limits: of a run that does not say otherwise.

  Raises:
    Malformed: a field is missing or has another type.
    Unsupported: another language, files to fetch, or arguments.
  """
  code, language = _field(body, "code", str), _field(body, "language", str)
  if language != "python":
    raise Unsupported(f"language {language!r} is not served here; accepted: python")
  for name in ("fetch_files", "args"):
    if _field(body, name, list, []):
      raise Unsupported(f"{name} is not served here; accepted: []")
  stdin = "" if body.get("stdin") is None else _field(body, "stdin", str)
  seconds = _field(body, "run_timeout", (int, float), 10)
  memory_mb = _field(body, "memory_limit_MB", int, -1)
  files = {k: v for k, v in _field(body, "files", dict, {}).items() if v is not None}
  for path, data in files.items():
    try:
      base64.b64decode(data, validate=True)
    except (ValueError, TypeError):
      raise Malformed("files", f"{path!r} must be base64") from None
  name = "memory_limit_MB"
  try:
    if memory_mb > 0:
      limits = dataclasses.replace(limits, memory_mb=memory_mb)
    name = "run_timeout"
    limits = dataclasses.replace(limits, wall_s=seconds, cpu_s=seconds)
  except ValueError as e:
    raise Malformed(name, str(e).partition(" ")[2]) from None
  return (_WITH_FILES.format(code=code, files=files) if files else code), stdin, limits


def write_reply(result: Result) -> dict[str, Any]:
  """A run's result in SandboxFusion's words."""
  verdict = result.verdict
  if verdict == Verdict.INFRASTRUCTURE:
    return write_error(result.stderr)
  late = verdict == Verdict.TIMEOUT
  return {
    "status": "Success" if verdict == Verdict.OK else "Failed",
    "message": "",
    "compile_result": None,
    "run_result": {
      "status": "TimeLimitExceeded" if late else "Finished",
      "execution_time": result.seconds,
      "return_code": None if late else result.exit_code,
      "stdout": result.stdout,
      "stderr": result.stderr,
    },
    "executor_pod_name": None,
    "files": {},
  }


def write_error(message: str) -> dict[str, Any]:
  """A request that could not be run, in SandboxFusion's words."""
  return {
    "status": "SandboxError",
    "message": message,
    "compile_result": None,
    "run_result": None,
    "executor_pod_name": None,
    "files": {},
  }


def write_request(program: str, stdin: str, limits: Limits) -> dict[str, Any]:
  """A run in SandboxFusion's words; of the limits it knows time and memory only."""
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
  """The result in a reply. What used up its memory is an `error`: it is not told apart.

  Args:
    reply: decoded.
    limits: those asked for; each stream is cut to their `output_bytes`.

  Raises:
    ValueError, TypeError, KeyError: not a reply of this API.
  """
  if reply["status"] == "SandboxError":
    reason = f"SandboxFusion: {reply['message']}"
    return Result("", reason, None, Verdict.INFRASTRUCTURE, 0.0)
  run = reply["run_result"]
  late, code = run["status"] == "TimeLimitExceeded", run["return_code"]
  if not late and (run["status"] != "Finished" or type(code) is not int):
    raise ValueError(f"run_result: status {run['status']!r}, return_code {code!r}")
  verdict = Verdict.TIMEOUT if late else Verdict.ERROR if code else Verdict.OK
  (stdout, cut_out), (stderr, cut_err) = (
    _clipped(run[name] or "", limits.output_bytes) for name in ("stdout", "stderr")
  )
  return Result(
    stdout,
    stderr,
    -signal.SIGKILL if late else code,
    verdict,
    float(run["execution_time"] or 0.0),
    cut_out or cut_err,
  )


def _clipped(text: str, size: int) -> tuple[str, bool]:
  clip = Clip(size)
  clip.feed(text.encode("utf-8", "replace"))
  return clip.text()


def _field(body: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
  value = body.get(name, default)
  if value is None:
    raise Malformed(name, "Field required")
  if not isinstance(value, kind) or isinstance(value, bool):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = " or ".join(k.__name__ for k in kinds)
    raise Malformed(name, f"must be of type {wanted}, got {type(value).__name__}")
  return value
