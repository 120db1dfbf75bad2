"""Runs a stage repeatedly in one workdir, and kills each process at a given place.

  python tests/killed.py JOB.json

JOB: {"journey": "rl", "config": {...}, "workdir": DIR, "ends": [[PLACE, N, SIGNAL]]}.
Each end is one process. It gets the signal at its N-th visit to the place; at "random",
N milliseconds after its first update or tool call; at "", never: the run completes.
"damage" is not a process: it changes a byte of the newest checkpoint. One line of JSON
on standard output reports how each process ended, and how long after its signal.

With "scratch": DIR, the workdir is in a bucket, and each process acts as another
machine: it gets a new local folder in DIR.

Tool calls and the results kept by the journal are written to WORKDIR.calls (DIR.calls)
as they happen. Processes are forked before JAX starts, which saves the imports. The
library has no code for these kills.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import re
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax
import ml_collections

from coa_jax.learner import checkpoint
from coa_jax.learner.state import Learner
from coa_jax.report.metrics import Metrics
from coa_jax.rollout import sampler
from coa_jax.runtime.bucket import lease, mirror
from coa_jax.runtime.bucket.objects import Bucket
from coa_jax.runtime.interruption import Interrupted
from coa_jax.tools.journal import ToolJournal
from coa_jax.tools.toolbox import Toolbox


class Calls:
  """Counts tool calls and kept results, and writes them to a file."""

  def __init__(self, path: str):
    self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    self.counts = {"asked": 0, "kept": 0}
    self._lock = threading.Lock()
    self._watch(Toolbox, "start", "asked")
    self._watch(ToolJournal, "keep", "kept")

  def _watch(self, owner: type, name: str, event: str) -> None:
    real = getattr(owner, name)

    def watched(*args):
      out = real(*args)
      with self._lock:
        self.counts[event] += 1
        os.write(self._fd, f"{os.getpid()} {event}\n".encode())
      return out

    setattr(owner, name, watched)

  def wait(self) -> None:
    """Waits until every call's result is kept."""
    while self.counts["asked"] != self.counts["kept"]:
      time.sleep(0.001)


_PROOF = r"checkpoints/\d+/manifest\.json"
# Before or after a function; last, a pattern of an object's name in its arguments.
PLACES = {
  "tool": ("after", Toolbox, "answer", ""),  # nobody has read the answer
  "update": ("after", Learner, "step", ""),  # between two updates from one batch
  "log": ("after", Metrics, "log", ""),
  "save": ("after", checkpoint.Checkpoints, "save", ""),  # orbax writes asynchronously
  "seal": ("before", checkpoint, "write_manifest", ""),  # orbax is done; no proof yet
  "push": ("before", mirror, "push", ""),  # proven, but not in the bucket
  "lease": ("after", lease.Lease, "__enter__", ""),  # nothing is fetched yet
  "put": ("after", Bucket, "put", ""),
  "upload": ("after", Bucket, "put", r"checkpoints/(?!\d+/manifest\.json)"),
  "proof": ("before", Bucket, "put", _PROOF),  # only the proof is missing
  "proven": ("after", Bucket, "put", _PROOF),
  "forget": ("after", Bucket, "delete", _PROOF),  # an old one lacks only its proof
  "model": ("after", Bucket, "put", "model/"),  # in the last push
  "fetch": ("after", Bucket, "_get", ""),  # at the start
}


def at_calls(
  when: str, owner: object, name: str, objects: str, do: Callable[[], None]
) -> None:
  """Calls `do` before or after every call of a function; see `PLACES`."""
  real = getattr(owner, name)

  def wrapped(*args, **kwargs):
    texts = (x for x in args if isinstance(x, str))
    here = not objects or any(re.match(objects, text) for text in texts)
    if here and when == "before":
      do()
    out = real(*args, **kwargs)
    if here and when == "after":
      do()
    return out

  setattr(owner, name, wrapped)


def end_at(place: str, n: int, number: int, calls: Calls, signalled: mmap.mmap) -> None:
  """Makes this process signal itself at its n-th visit to the place.

  Writes the time to `signalled`, except at "random".
  """
  visits = []

  def visit() -> None:
    visits.append(1)
    if len(visits) == n:
      struct.pack_into("d", signalled, 0, time.monotonic())
      os.kill(os.getpid(), number)

  if place == "decode":  # after a tool result, with no call running
    real = sampler.window

    def window(*args):
      if calls.counts["kept"]:
        calls.wait()
        visit()
      return real(*args)

    sampler.window = window
  elif place == "random":
    began = threading.Event()

    def wait() -> None:
      began.wait()
      time.sleep(n / 1000)
      os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()
    for owner, name in ((Toolbox, "start"), (Learner, "step")):
      at_calls("before", owner, name, "", began.set)
  elif place == "micro-batch":  # as the n-th starts, inside a device step
    # This makes the step a different program, so the kill has to come in the process's
    # first step.
    init = Learner.__init__

    def make(self, loss, *rest):
      def counted(trained, frozen, batch):
        jax.debug.callback(visit)
        return loss(trained, frozen, batch)

      init(self, counted, *rest)

    Learner.__init__ = make
  elif place:
    at_calls(*PLACES[place], visit)


def life(job: dict, place: str, n: int, number: int, signalled: mmap.mmap) -> int:
  """Runs one forked process; returns its exit status."""
  calls = Calls(job.get("scratch", job["workdir"]) + ".calls")
  end_at(place, n, number, calls, signalled)
  config = ml_collections.ConfigDict(job["config"])
  run = importlib.import_module(f"coa_jax.{job['journey']}").run
  try:
    if "scratch" in job:
      scratch = os.path.join(job["scratch"], str(os.getpid()))
      with mirror.opened(job["workdir"], scratch) as folder:
        run(config, folder)
    else:
      run(config, job["workdir"])
  except Interrupted as e:
    return e.status
  except BaseException:
    traceback.print_exc()
    return 1
  return 0


def damage(folder: str) -> None:
  """Flips a bit in the middle of the newest checkpoint's largest file."""
  newest = os.path.join(folder, str(checkpoint.whole_steps(folder)[-1]))
  files = [os.path.join(d, n) for d, _, names in os.walk(newest) for n in names]
  with open(max(files, key=os.path.getsize), "r+b") as f:
    f.seek(os.path.getsize(f.name) // 2)
    byte = f.read(1)[0]
    f.seek(-1, os.SEEK_CUR)
    f.write(bytes([byte ^ 1]))


def damage_object(bucket: Bucket) -> None:
  """Flips a bit in the middle of the newest checkpoint's largest object."""
  stored = bucket.list("checkpoints")
  newest = f"checkpoints/{whole_objects(bucket)[-1]}/"
  names = [name for name in stored if name.startswith(newest)]
  largest = max(names, key=lambda name: stored[name].size)
  data = bytearray(bucket.read(largest))
  data[len(data) // 2] ^= 1
  bucket.write(largest, bytes(data))


def whole_objects(bucket: Bucket) -> list[int]:
  """`whole_steps` for a bucket."""
  found = (re.fullmatch(r"checkpoints/(\d+)/manifest.json", n) for n in bucket.list())
  return sorted(int(match[1]) for match in found if match)


def main(path: str) -> None:
  """Runs the job."""
  with open(path, encoding="utf-8") as f:
    job = json.load(f)
  importlib.import_module(f"coa_jax.{job['journey']}")
  folder = os.path.join(job["workdir"], "checkpoints")
  bucket = Bucket(job["workdir"]) if "scratch" in job else None
  # No other run wants the lease: a silent owner is dead.
  lease.BEAT_S = 0.2
  lease.SILENT_S = 1.0
  for place, n, number in job["ends"]:
    if place == "damage":
      if bucket:
        damage_object(bucket)
      else:
        damage(folder)
      continue
    signalled = mmap.mmap(-1, 8)  # shared with the child
    began = time.monotonic()
    pid = os.fork()
    if not pid:
      os._exit(life(job, place, n, number, signalled))
    _, status = os.waitpid(pid, 0)
    ended = time.monotonic()
    (at,) = struct.unpack("d", signalled)
    row = {
      "pid": pid,
      "code": os.waitstatus_to_exitcode(status),
      "steps": whole_objects(bucket) if bucket else checkpoint.whole_steps(folder),
      "seconds": ended - began,
      "seconds_to_end": ended - at if at else None,  # from the signal
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
