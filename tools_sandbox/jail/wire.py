"""Limits, Verdict, Result, and the framed JSON between host and zygote.

A frame is a 4-byte big-endian length followed by that many bytes of ASCII JSON. This
file imports nothing but the standard library: the zygote loads it by path.

budget: loaded by path, so it can import nothing of ours.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import select
import struct
import sys
import time
from typing import Any

_HEADER = struct.Struct(">I")
# A length beyond this is a corrupt stream, not a long program.
MAX_FRAME = 256 << 20
# Both fit a frame even if JSON writes six bytes for each.
MAX_INPUT = 32 << 20  # characters of program and stdin together
MAX_OUTPUT = 16 << 20  # bytes kept of each stream
LARGEST = sys.float_info.max  # JSON's integers may be too large for a float
_CHUNK = 65536
LEASE_S = 600.0  # longer than a policy takes between two calls
_LAST_SECOND = 253_402_214_400  # still in year 9999 in every time zone


class Verdict(enum.StrEnum):
  """A run's verdict, from the kernel: never read from the program's output."""

  OK = "ok"  # exit status 0
  ERROR = "error"  # raised, non-zero exit, killed by a signal, too many processes
  TIMEOUT = "timeout"  # used up its wall or CPU seconds
  MEMORY = "memory"  # used up its memory
  INFRASTRUCTURE = "infrastructure"  # the service failed; no verdict on the program


@dataclasses.dataclass(frozen=True)
class Limits:
  """A run's limits, and its fixed seed and clock.

  Attributes:
    wall_s: seconds from start to end of the run.
    cpu_s: CPU seconds of each process, rounded up to whole seconds by the kernel.
    memory_mb: MiB of address space per process, and MiB of resident memory for all
      processes together, both beyond the pre-imported template.
    output_bytes: bytes kept per stream (stdout, stderr): the first half and the last.
    file_mb: MiB of the largest file that the program may write.
    processes: processes and threads alive at once (back-end subprocess: sampled, so
      briefly more).
    disk_mb: MiB for all files together (back-end jail only).
    inodes: files and folders together (back-end jail only).
    seed: the seed of `random` and `numpy.random`; None derives it from the program and
      its stdin.
    clock_s: Unix seconds for Python's stopped clock; None for the real one. A
      convenience, not a security limit: see README.md.
  """

  wall_s: float = 10.0
  cpu_s: float = 10.0
  memory_mb: int = 1024
  output_bytes: int = 65536
  file_mb: int = 64
  processes: int = 64
  disk_mb: int = 128
  inodes: int = 4096
  seed: int | None = None
  clock_s: float | None = None

  def __post_init__(self) -> None:
    # --- Seed and clock, which may be None.
    if self.seed is not None and type(self.seed) is not int:
      raise ValueError(f"limits.seed must be an integer, got {self.seed!r:.100}")
    clock = 0 if self.clock_s is None else self.clock_s
    if type(clock) not in (int, float) or not 0 <= clock <= _LAST_SECOND:
      raise ValueError(
        f"limits.clock_s must be Unix seconds up to {_LAST_SECOND}, got {clock!r:.100}"
      )

    # --- Limits: positive numbers of the field's type. Check the type first: other
    # types may not compare.
    for field in dataclasses.fields(self):
      if field.name in ("seed", "clock_s"):
        continue
      value = getattr(self, field.name)
      whole = field.type == "int"
      kind = int if whole else (int, float)
      if isinstance(value, bool) or not isinstance(value, kind):
        expected = "an integer" if whole else "a number"
        raise ValueError(f"limits.{field.name} must be {expected}, got {value!r}")
      if not 0 < value <= LARGEST:
        raise ValueError(
          f"limits.{field.name} must be positive and finite, got {value!r:.100}"
        )
    if self.output_bytes > MAX_OUTPUT:
      raise ValueError(f"limits.output_bytes must be at most {MAX_OUTPUT}")

  def to_json(self) -> dict[str, Any]:
    """Makes a JSON-serialisable dict; `from_json` reads it back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, row: dict[str, Any]) -> Limits:
    """Builds limits from `to_json`'s dict.

    Raises:
      ValueError: a field is unknown, missing or out of range.
    """
    return _build(cls, row)


@dataclasses.dataclass(frozen=True)
class Result:
  """A run's result.

  Attributes:
    stdout: the program's output, UTF-8 with replacement, the middle cut if too long.
    stderr: likewise; a kill by the sandbox adds one line with the reason.
    exit_code: the exit status, or -N for death by signal N, or None if no program ended
      (verdict `infrastructure`).
    verdict: how the run ended.
    seconds: the program's wall seconds, without the service's start-up.
    truncated: True if stdout or stderr lost bytes.
  """

  stdout: str
  stderr: str
  exit_code: int | None
  verdict: Verdict
  seconds: float
  truncated: bool = False

  def __post_init__(self) -> None:
    # A result may come from a stranger's service: `type` accepts no bool as an int.
    for name, kinds in _RESULT.items():
      value = getattr(self, name)
      if type(value) not in kinds:
        raise ValueError(f"Result.{name} is of type {type(value).__name__}")
    if not 0 <= self.seconds <= LARGEST:
      raise ValueError(f"Result.seconds is {self.seconds!r:.100}")

  def to_json(self) -> dict[str, Any]:
    """Makes a JSON-serialisable dict; `from_json` reads it back."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, row: dict[str, Any]) -> Result:
    """Builds a result from `to_json`'s dict.

    Raises:
      ValueError: a field is unknown, missing or of another type, or the verdict is
        unknown.
    """
    result = _build(cls, row)
    return dataclasses.replace(result, verdict=Verdict(result.verdict))


def failure(reason: str) -> Result:
  """Makes a run's result after a service failure."""
  return Result("", reason, None, Verdict.INFRASTRUCTURE, 0.0)


# Field -> accepted types, for replies from a service or zygote.
_RESULT = {
  "stdout": (str,),
  "stderr": (str,),
  "exit_code": (int, type(None)),
  "seconds": (int, float),
  "truncated": (bool,),
}


class Clip:
  """Keeps a stream's first and last bytes, `limit` in all."""

  def __init__(self, limit: int):
    self._head = bytearray()
    self._tail = bytearray()
    self._head_size = limit - limit // 2
    self._tail_size = limit // 2
    self._total = 0

  def feed(self, data: bytes) -> None:
    """Adds bytes at the end."""
    self._total += len(data)
    room = self._head_size - len(self._head)
    self._head += data[:room]
    self._tail += data[room:]
    # Not at every feed: to cut off the front moves the rest.
    if len(self._tail) > self._tail_size + 4 * _CHUNK:
      del self._tail[: len(self._tail) - self._tail_size]

  def text(self) -> tuple[str, bool]:
    """Returns the bytes as text, and whether any were cut out."""
    tail = self._tail[max(0, len(self._tail) - self._tail_size) :]
    # Bytes between head and tail were cut off, here or in `feed`.
    cut = self._total - len(self._head) - len(tail)
    if not cut:  # decoded together: a character may lie across the border
      return (self._head + tail).decode("utf-8", "replace"), False
    head, tail = (b.decode("utf-8", "replace") for b in (self._head, tail))
    return f"{head}...[{cut} bytes cut]...{tail}", True


def _build(cls: type, row: dict[str, Any]) -> Any:
  # Require exactly these names: both ends have the same version.
  names = {field.name for field in dataclasses.fields(cls)}
  if not isinstance(row, dict) or set(row) != names:
    fields = sorted(row) if isinstance(row, dict) else type(row).__name__
    raise ValueError(f"{cls.__name__}: expected fields {sorted(names)}, got {fields}")
  return cls(**row)


def check_texts(program: str, stdin: str) -> None:
  """Refuses a program or stdin that cannot be run.

  Raises:
    TypeError: one is not a string.
    ValueError: together they exceed MAX_INPUT characters.
  """
  for name, value in (("program", program), ("stdin", stdin)):
    if not isinstance(value, str):
      raise TypeError(f"{name} must be a string, got {type(value).__name__}")
  if len(program) + len(stdin) > MAX_INPUT:
    raise ValueError(f"program and stdin exceed {MAX_INPUT} characters")


def frame(message: dict[str, Any]) -> bytes:
  """Encodes a message for `read_frame`.

  Raises:
    ValueError: the message is longer than MAX_FRAME.
  """
  body = json.dumps(message).encode("ascii")
  if len(body) > MAX_FRAME:
    raise ValueError(f"message of {len(body)} bytes; at most {MAX_FRAME} can be sent")
  return _HEADER.pack(len(body)) + body


def write_frame(fd: int, message: dict[str, Any], deadline: float = math.inf) -> None:
  """Writes one frame to a pipe.

  Args:
    fd: a descriptor; non-blocking if `deadline` is to hold against a stuck reader.
    message: JSON values only.
    deadline: `time.monotonic()` seconds.

  Raises:
    EOFError: the other end is closed.
    TimeoutError: the deadline passed.
    ValueError: the message is longer than MAX_FRAME.
  """
  # A pipe takes as much as fits; the deadline covers the waits between parts.
  data = memoryview(frame(message))
  while data:
    _wait(fd, select.POLLOUT, deadline)
    try:
      data = data[os.write(fd, data[:_CHUNK]) :]
    except BlockingIOError:
      continue
    except OSError as e:
      raise EOFError(f"the other end is closed: {e}") from e


def read_frame(fd: int, deadline: float = math.inf) -> dict[str, Any]:
  """Reads one frame from a pipe.

  Args:
    fd: a descriptor.
    deadline: `time.monotonic()` seconds.

  Raises:
    EOFError: the other end closed before a whole frame arrived.
    TimeoutError: the deadline passed.
    ValueError: the bytes are not a frame.
  """
  # Check the size before reading the rest.
  (size,) = _HEADER.unpack(_read(fd, _HEADER.size, deadline))
  if size > MAX_FRAME:
    raise ValueError(f"frame of {size} bytes; at most {MAX_FRAME} are sent")
  message = json.loads(_read(fd, size, deadline))
  if not isinstance(message, dict):
    raise ValueError(f"frame holds {type(message).__name__}, not an object")
  return message


def _read(fd: int, size: int, deadline: float) -> bytes:
  data = bytearray()
  while len(data) < size:
    _wait(fd, select.POLLIN, deadline)
    try:
      chunk = os.read(fd, min(size - len(data), _CHUNK))
    except BlockingIOError:
      continue
    if not chunk:
      raise EOFError("the other end closed")
    data += chunk
  return bytes(data)


def _wait(fd: int, event: int, deadline: float) -> None:
  # poll, not select: a host with many open files has descriptors above 1023.
  poll = select.poll()
  poll.register(fd, event)
  seconds = deadline - time.monotonic()
  timeout = None if math.isinf(seconds) else max(0, math.ceil(seconds * 1000))
  if not poll.poll(timeout):
    raise TimeoutError("no answer before the deadline")
