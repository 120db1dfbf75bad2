"""Checkpoints of a run: train state plus whatever says where the run stands (orbax)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import orbax.checkpoint as ocp

from coa_jax.learner.state import TrainState


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Config section `checkpoint`.

  Attributes:
    every: updates between two checkpoints; the last update is always saved.
    keep: how many of the newest stay.
  """

  every: int = 100
  keep: int = 2


class Checkpoints:
  """The checkpoints of one run, in one folder; use as a context manager."""

  def __init__(self, path: str | os.PathLike[str], keep: int = 2):
    """Opens (or makes) the folder; `keep` is how many of the newest stay."""
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, enable_async_checkpointing=True
    )
    self._manager = ocp.CheckpointManager(os.path.abspath(path), options=options)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def close(self) -> None:
    """Waits for saves under way."""
    self._manager.close()

  def save(self, state: TrainState, cursor: dict[str, Any]) -> None:
    """Saves in the background.

    Args:
      state: copied to the host before this returns, so it may be donated after.
      cursor: JSON values that say where the run stands (data position, counters).
    """
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(state), cursor=ocp.args.JsonSave(cursor)
    )
    self._manager.save(int(state.step), args=args)

  def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest complete checkpoint, or None where there is none.

    Args:
      like: a state of the same shapes; its values are not read.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    args = ocp.args.Composite(
      state=ocp.args.StandardRestore(abstract), cursor=ocp.args.JsonRestore()
    )
    restored = self._manager.restore(step, args=args)
    return restored["state"], restored["cursor"]
