"""Saves and restores a run's train state and cursor, with orbax.

A checkpoint counts once it is proven whole: after orbax commits the folder,
`manifest.json` with every file's SHA-256 is written beside the files, last and
atomically. Restoring compares the hashes, and takes an older checkpoint if a byte
differs; old checkpoints are deleted only after a new proof. A nonfinite state is never
saved.

budget: save, proof, restore and read are one contract.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from coa_jax.learner import bucket_steps
from coa_jax.learner.state import TrainState
from coa_jax.runtime.bucket import mirror
from coa_jax.runtime.fields import bounded, check_fields
from coa_jax.runtime.interruption import Interrupted, Interruption, SharedSignal
from coa_jax.runtime.manifest import MANIFEST, fault_of, write_manifest
from coa_jax.runtime.names import check_workdir
from coa_jax.runtime.processes import gather_json

_LISTEN_EVERY_S = 0.2
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Config section `checkpoint`.

  Attributes:
    every: steps between two checkpoints; the last step is always saved.
    keep: newest checkpoints kept; an older one replaces a damaged one.
  """

  every: int = bounded(100, least=1)
  keep: int = bounded(2, least=1)

  def __post_init__(self):
    check_fields(self)


class Checkpoints:
  """One run's checkpoints in one folder; a context manager.

  Inside the context, SIGTERM and SIGINT end the run in order; see `interruption`.
  """

  def __init__(
    self, path: str | os.PathLike[str], config: CheckpointConfig | None = None
  ):
    """Opens (or makes) the folder; `config` sets when to save and how many to keep.

    Raises:
      ValueError: orbax can not write to a folder of this name.
    """
    self._path = os.path.abspath(path)
    check_workdir(self._path, with_globs=False)
    self._config = config or CheckpointConfig()
    self._interruption = Interruption()
    # Each of several processes writes its own devices' part straight to the bucket.
    self._mirror = None
    self._bucket = None
    if jax.process_count() > 1 and (found := mirror.of(self._path)):
      self._mirror = found
      self._bucket = found.bucket_below(self._path)
    if self._bucket is None:
      os.makedirs(self._path, exist_ok=True)
    # Orbax's thread writes and another one proves, while the run continues.
    self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    self._sealer = concurrent.futures.ThreadPoolExecutor(1)
    self._sealing: concurrent.futures.Future[None] | None = None
    self._saved: int | None = None  # the last saved or restored step

  def __enter__(self) -> Checkpoints:
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._interruption)
      if jax.process_count() > 1:
        stack.enter_context(SharedSignal(self._interruption))
      self._entered = stack.pop_all()
    return self

  def __exit__(self, *unused: object) -> None:
    with self._entered:
      self.close()

  def close(self) -> None:
    """Waits for running saves, and closes the folder."""
    try:
      self.wait()
    finally:
      self._sealer.shutdown()
      self._orbax.close()

  def wait(self) -> None:
    """Waits until saves are proven whole; raises their failure."""
    sealing = self._sealing
    self._sealing = None  # a failure is raised once
    if sealing:
      sealing.result()

  def reached(
    self, state: TrainState, cursor: dict[str, Any], last: bool = False
  ) -> None:
    """Saves if a checkpoint is due, and exits after a signal.

    Raises:
      Interrupted: a signal came and the run is not over; everything is saved.
    """
    # All processes agree: whichever got the signal, all save and exit.
    number = self._signal()
    if last or number or int(state.step) % self._config.every == 0:
      self.save(state, cursor)
    if number and not last:
      raise self._interrupted(number, state)

  @contextlib.contextmanager
  def resumable(self, state: TrainState, cursor: dict[str, Any]) -> Iterator[None]:
    """Saves this state and ends the run if a signal comes inside the block.

    For work that changes no saved value; a resumed run repeats it. A single process
    exits at once; several processes exit together, in `until_done`.

    Raises:
      Interrupted: a signal came.
    """
    leave_at_once = contextlib.nullcontext()
    if jax.process_count() == 1:
      leave_at_once = self._interruption.at_once()
    try:
      with leave_at_once:
        yield
    except Interrupted as e:
      # The state before the work, which changes no saved value.
      self.save(state, cursor)
      raise self._interrupted(e.number, state) from None

  def until_done(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Waits for this process's work, before processes exchange results.

    A signal to any process ends all waits: then each process raises, and none enters an
    exchange without the others. A failed future ends the wait; its reader raises.

    Raises:
      Interrupted: a signal came to any of several processes. A single process does not
        wait here: `resumable` lets it exit at once.
    """
    if jax.process_count() == 1:
      return
    left = set(futures)
    while left and not self._interruption.number:
      done, left = concurrent.futures.wait(
        left, timeout=_LISTEN_EVERY_S, return_when=concurrent.futures.FIRST_EXCEPTION
      )
      if any(future.cancelled() or future.exception() for future in done):
        return
    if number := self._signal():
      raise Interrupted(number)

  def save(self, state: TrainState, cursor: dict[str, Any]) -> None:
    """Saves in the background; does nothing if the step is saved already.

    Args:
      state: copied to the host before this returns, so it may be donated afterwards.
      cursor: the run's position as JSON values (data position, counters).

    Raises:
      ValueError: a parameter or optimizer value is NaN or infinite; this state would
        replace a good one.
    """
    step = int(state.step)
    if step == self._saved:
      return
    # --- One save at a time; a nonfinite state is refused.
    self.wait()
    if not _finite(state):
      raise ValueError(
        f"step {step}: parameters or optimizer state are NaN or infinite, and are not "
        f"saved; the checkpoints in {self._path} stand. An update diverged: lower "
        "optim.lr, set optim.clip_norm, or compute in float32 (model.dtype)"
      )

    # --- All processes' writes up to here precede this step's proof: orbax commits a
    # step when all have saved.
    if self._bucket:
      mirror.push(self._path)

    # --- Orbax copies the state to the host, then writes in the background.
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state), cursor=ocp.args.JsonSave(cursor)
    )
    folder = os.path.join(self._path, str(step))
    if self._mirror:
      folder = f"{self._bucket.uri}/{bucket_steps.name_of(step, self._mirror.epoch)}"
    self._orbax.save(folder, args=args, force=True)
    self._saved = step
    self._sealing = self._sealer.submit(self._seal, step)

  def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """Restores the newest whole checkpoint; None if there is none.

    Newer damaged checkpoints are set aside as `damaged_STEP`. Unfinished ones are
    deleted; if none is whole, those committed by orbax are set aside instead, as
    `unfinished_STEP`. A bucket sets none aside, but deletes. One log line reports this.

    Args:
      like: a state with the same shapes. If there is a checkpoint, its arrays are
        deleted: both states at once might not fit the device.

    Raises:
      ValueError: all checkpoints are damaged, or the newest whole one does not match
        `like`.
    """
    # --- The first process chooses for all.
    step = -1
    folder = ""
    if jax.process_index() == 0:
      if self._bucket:
        step, name = bucket_steps.choose(self._bucket)
        folder = f"{self._bucket.uri}/{name}"
      else:
        step = self._choose()
        folder = folder_of(self._path, step)
    if jax.process_count() > 1:
      step, folder = gather_json([step, folder])[0]
    if step == -2:
      raise ValueError(
        f"{self._path}: every checkpoint is damaged (the log of the first process says "
        "how); delete the folder to begin anew"
      )
    if step < 0:
      return None

    # --- Every process reads its own devices' part.
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    for x in jax.tree.leaves(like):
      if isinstance(x, jax.Array):
        x.delete()
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore()
    )
    try:
      restored = self._orbax.restore(folder, args=args)
    except (KeyError, TypeError, AttributeError, FileNotFoundError) as e:
      raise ValueError(
        f"{folder}: is not a checkpoint of this run's state ({e!s:.200}); delete it, "
        "and an older one is taken"
      ) from e
    _give_memory_back()
    self._saved = step
    return restored["state"], restored["cursor"]

  @property
  def oldest(self) -> int:
    """Returns the oldest valid checkpoint's step; 0 for none."""
    if self._bucket:
      whole = bucket_steps.whole_in(self._bucket)
      return min(map(bucket_steps.step_of, whole), default=0)
    return min(whole_steps(self._path), default=0)

  def _signal(self) -> int:
    """Returns the signal received by any process; 0 for none."""
    number = self._interruption.number
    if jax.process_count() == 1:
      return number
    return max(gather_json(number))

  def _interrupted(self, number: int, state: TrainState) -> Interrupted:
    """Waits until all saves are proven; returns the exception that ends the run."""
    self.wait()
    return Interrupted(
      number,
      f"stopped after step {int(state.step)}, which is saved in {self._path}; the same "
      "command resumes from there",
    )

  def _seal(self, step: int) -> None:
    """Waits for a save, proves it whole, then deletes old checkpoints."""
    self._orbax.wait_until_finished()
    _give_memory_back()
    # All processes have written by now; the first one proves their files. On a disk it
    # hashes every file: 0.7 s of a core per gigabyte, beside the run.
    if jax.process_index() > 0:
      return
    if self._mirror:
      name = bucket_steps.name_of(step, self._mirror.epoch)
      bucket_steps.prove(self._bucket, name, self._mirror.check)
      for old in bucket_steps.whole_in(self._bucket)[: -self._config.keep]:
        self._mirror.check()
        bucket_steps.forget(self._bucket, old)
      return
    folder = os.path.join(self._path, str(step))
    write_manifest(folder)
    mirror.push(folder)  # in a bucket's workdir, the step counts from here on
    for old in whole_steps(self._path)[: -self._config.keep]:
      # The manifest first: without it a partly deleted folder does not count.
      folder = folder_of(self._path, old)
      os.remove(os.path.join(folder, MANIFEST))
      shutil.rmtree(folder)

  def _choose(self) -> int:
    """Returns the newest whole step; -1 if there is none yet, -2 if all are damaged."""
    # --- Each begun step's folders; orbax renames a folder at commit.
    folders: dict[int, list[str]] = {}
    for name in os.listdir(self._path):
      step = bucket_steps.step_of(re.sub(r"\.orbax-checkpoint-tmp.*", "", name))
      if step >= 0:
        folders.setdefault(step, []).append(name)

    # --- The newest whole step, and newer steps' faults.
    newest = -1
    notes = []
    damaged = []
    unfinished = []
    for step in sorted(folders, reverse=True):
      folder = folder_of(self._path, step)
      if not os.path.exists(os.path.join(folder, MANIFEST)):
        unfinished += folders[step]
        if newest < 0:
          notes.append(f"checkpoint {step} was not finished")
      elif newest < 0:  # older ones are not read: hashing takes time
        fault = fault_of(folder)
        if not fault:
          newest = step
          continue
        notes.append(f"checkpoint {step} is damaged ({fault})")
        damaged.append(os.path.basename(folder))
    if newest < 0 and damaged:
      _log.error("%s: %s", self._path, "; ".join(notes))
      return -2

    # --- Make room for the repeated steps.
    for name in damaged:
      self._set_aside(name, f"damaged_{name}")
    for name in unfinished:
      if newest < 0 and name.isdigit():
        # Maybe the only checkpoints, from a version without manifests.
        self._set_aside(name, f"unfinished_{name}")
      else:
        shutil.rmtree(os.path.join(self._path, name))
    if notes:
      start = "starting at step 0"
      if newest >= 0:
        start = f"resuming from {newest}"
      _log.warning("%s: %s; %s", self._path, "; ".join(notes), start)
    return newest

  def _set_aside(self, name: str, aside: str) -> None:
    # An earlier fault at this step may have left a folder: replace it.
    aside = os.path.join(self._path, aside)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(os.path.join(self._path, name), aside)


@jax.jit
def _finite(state: TrainState) -> jax.Array:
  # Offloaded arrays are in host memory.
  state = jax.device_put(state, jax.memory.Space.Device)
  numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
  return jnp.array([jnp.isfinite(x).all() for x in numbers]).all()


def _give_memory_back() -> None:
  """Returns to the system the memory freed after a state's write or read.

  This memory is as large as the state; threads free it in small pieces, which glibc
  keeps for them.
  """
  if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
    trim(0)


def whole_steps(path: str) -> list[int]:
  """Lists the steps proven whole when written, in order; hashes no file."""
  steps = set()
  for name in os.listdir(path):
    if os.path.exists(os.path.join(path, name, MANIFEST)):
      steps.add(bucket_steps.step_of(name))
  return sorted(steps - {-1})


def folder_of(path: str, step: int) -> str:
  """Returns a step's checkpoint folder, written by one process or several."""
  # Other names count as step -1, and so does a run without checkpoints.
  found = [n for n in os.listdir(path) if bucket_steps.step_of(n) == step >= 0]
  return os.path.join(path, max(found, key=bucket_steps.order, default=str(step)))


def read_params(path: str | os.PathLike[str], step: int) -> dict[str, Any]:
  """Reads only `TrainState.params` from one checkpoint, as numpy arrays.

  Raises:
    ValueError: the checkpoint is damaged; the message names the fault.
  """
  # --- The files must equal the written ones.
  folder = folder_of(os.path.abspath(path), step)
  if fault := fault_of(folder):
    raise ValueError(f"{folder} is damaged: {fault}")

  # --- The state's branch "params", with any shapes.
  with ocp.PyTreeCheckpointer() as orbax:
    state = os.path.join(folder, "state")
    tree = orbax.metadata(state).item_metadata.tree["params"]
    as_numpy = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    args = ocp.args.PyTreeRestore(
      item={"params": tree}, restore_args={"params": as_numpy}, partial_restore=True
    )
    return orbax.restore(state, args=args)["params"]
