"""Joins the processes of one run: waiting, time limits and the shared workdir."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator

from absl import flags

from coa_jax.runtime.bucket import mirror
from coa_jax.runtime.bucket.objects import BucketError

_MOST_PROCESSES = 1 << 16
_SAY_EVERY_S = 3.0

WHERE = flags.DEFINE_string(
  "distributed",
  "",
  "This process among several that train together: 'auto' on a TPU pod or under "
  "Slurm, otherwise HOST:PORT,PROCESSES,PROCESS with the address of process 0.",
)

_WAIT_S = flags.DEFINE_integer(
  "distributed_wait_s",
  0,
  "Seconds to wait for the other processes of --distributed=HOST:PORT,...; 0 for 300, "
  "or 45 where HOST is this machine's loopback.",
  lower_bound=0,
)

_HEARTBEAT_S = flags.DEFINE_integer(
  "heartbeat_s",
  100,
  "Seconds without a heartbeat after which a process of --distributed counts as dead, "
  "and all others end.",
  lower_bound=10,
)


def join(where: str) -> None:
  """Joins the run's other processes; `where` is the value of --distributed."""
  import jax

  if where == "auto":
    try:
      jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_S.value)
    except (ValueError, RuntimeError) as e:
      raise ValueError(
        f"--distributed=auto: {e}; elsewhere give HOST:PORT,PROCESSES,PROCESS"
      ) from e
  else:
    _join_at(where)


def leave_devices_alone() -> None:
  """Makes Orbax synchronise processes through JAX's coordination service.

  By default Orbax synchronises over all devices. Meanwhile other threads dispatch work
  to the devices of `mesh.rollout`, and two programs with collectives could deadlock. At
  the service a process waits at most 300 s.
  """
  import orbax.checkpoint  # noqa: F401  # defines the flag

  flags.FLAGS.set_default("experimental_orbax_use_distributed_barrier", True)


def _join_at(where: str) -> None:
  import jax

  # --- Read the flag.
  match = re.fullmatch(r"(.+):(\d+),(\d+),(\d+)", where)
  host = ""
  port = processes = process = 0
  if match:
    host = match[1]
    port, processes, process = map(int, match.groups()[1:])
  if not 0 < port < 2**16 or not process < processes <= _MOST_PROCESSES:
    raise ValueError(
      f"--distributed={where}: give 'auto' or HOST:PORT,PROCESSES,PROCESS; a port is "
      f"from 1 to {2**16 - 1}, PROCESS below PROCESSES, which are at most "
      f"{_MOST_PROCESSES}"
    )
  address = f"{host}:{port}"
  # --- Wait for process 0, or for the others.
  here = host == "localhost" or host.startswith("127.") or host == "[::1]"
  seconds = _WAIT_S.value or (45 if here else 300)
  began = time.monotonic()
  if process:
    _await_coordinator(host.strip("[]"), port, seconds)
  left = max(1.0, seconds - (time.monotonic() - began))
  if not process:
    print(
      f"--distributed: process 0 at {address} waits for {processes - 1} others, "
      f"{seconds} s at most (--distributed_wait_s)",
      file=sys.stderr,
    )

  def give_up() -> None:
    print(
      f"error: --distributed={where}: not all of {processes} processes came within "
      f"{seconds} s; start them, or wait longer with --distributed_wait_s",
      file=sys.stderr,
    )
    os._exit(2)  # JAX's own timeout aborts the process

  # JAX waits longer than we do, so that the user sees our message.
  watch = threading.Timer(left, give_up)
  watch.daemon = True
  watch.start()
  jax.distributed.initialize(
    address,
    processes,
    process,
    initialization_timeout=round(left) + 60,
    heartbeat_timeout_seconds=_HEARTBEAT_S.value,
  )
  watch.cancel()


def _await_coordinator(host: str, port: int, seconds: float) -> None:
  """Waits until process 0 listens, and reports the wait; fails after `seconds`.

  JAX's own wait is silent until its end.
  """
  began = time.monotonic()
  reason = ""
  while (waited := time.monotonic() - began) < seconds:
    try:
      with socket.create_connection((host, port), timeout=_SAY_EVERY_S):
        return
    except OSError as e:
      reason = e.strerror or str(e)
    print(
      f"--distributed: waiting for process 0 at {host}:{port}, {waited:.0f} of "
      f"{seconds:.0f} s ({reason})",
      file=sys.stderr,
    )
    time.sleep(_SAY_EVERY_S)
  raise ValueError(
    f"--distributed: no process 0 at {host}:{port} within {seconds:.0f} s ({reason}); "
    "start it, or wait longer with --distributed_wait_s"
  )


def check_shared(workdir: str) -> None:
  """Stops all processes if the workdir is not one shared folder.

  Otherwise the processes would wait for each other at the first checkpoint.
  """
  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  token = multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31)))
  path = os.path.join(workdir, f".shared-{int(token)}")
  if jax.process_index() == 0:
    os.makedirs(workdir, exist_ok=True)
    with open(path, "w", encoding="ascii"):
      pass
  multihost_utils.sync_global_devices("workdir")
  for _ in range(50):  # a network disk may be late
    if os.path.exists(path):
      break
    time.sleep(0.1)
  sees = multihost_utils.process_allgather(np.array(os.path.exists(path)))
  if jax.process_index() == 0:
    os.remove(path)
  if not sees.all():
    blind = ", ".join(map(str, np.flatnonzero(~sees)))
    raise ValueError(
      f"--workdir={workdir}: process {blind} does not see the files of process 0; all "
      "need one folder on a shared disk"
    )


@contextlib.contextmanager
def in_bucket(uri: str, scratch: str) -> Iterator[str]:
  """Yields this process's local folder for a workdir in a bucket.

  Raises:
    ValueError: another run works there, or the bucket cannot be used. If process 0
      raises this error, all stop.
  """
  if not WHERE.value:
    with mirror.opened(uri, scratch) as folder:
      yield folder
    return

  import jax
  import numpy as np
  from jax.experimental import multihost_utils

  process = jax.process_index()
  processes = jax.process_count()
  if processes > 1 and not uri.startswith("gs://"):
    # Orbax writes each process's part, and supports no other store.
    raise BucketError(f"{uri}: several processes need gs:// or a shared disk")
  with contextlib.ExitStack() as stack:
    # --- Process 0 takes the lease; the others receive the lease's number.
    refusal = None
    epoch = 0  # the lease's number
    if process == 0:
      try:
        first = stack.enter_context(mirror.Mirror(uri, scratch, 0, processes))
        folder = first.folder
        epoch = first.epoch
      except ValueError as e:
        refusal = e
    epoch = int(multihost_utils.broadcast_one_to_all(np.int32(epoch)))
    if refusal:
      raise refusal
    if not epoch:
      raise ValueError(f"{uri}: process 0 may not work there; see its message")
    if process:
      folder = stack.enter_context(
        mirror.opened(uri, scratch, process, processes, epoch)
      )
    yield folder
