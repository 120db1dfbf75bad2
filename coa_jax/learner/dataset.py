"""Stores SFT's trajectories as tokens on disk, and packs them into micro-batches.

Memory does not grow with the tokens: they are in one mapped file, and a process reads
only its own rows. Order, resume and prefetching use grain.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coa_jax.learner.batch import Batch, empty, pack
from coa_jax.model.sharding import Partitioner
from coa_jax.protocol.trajectory import Author, Trajectory

_TOKENS = "tokens.int32"
_ABOUT = "sequences.npy"
_AHEAD = 2  # micro-batches prepared during a step
_FOR_EVER = 2**62  # micro-batches


class Micro(NamedTuple):
  """A micro-batch, [B, T].

  Attributes:
    batch: this process's rows only.
    lengths: tokens per sequence, over all processes' rows.
    policy: policy tokens in all processes' rows.
  """

  batch: Batch
  lengths: list[int]
  policy: int


class Dataset:
  """Token sequences in a folder, one per trajectory.

  Attributes:
    lengths_N: int64 tokens per sequence.
    policy_N: int64 policy tokens per sequence.
    task_N: int64 task number per sequence.
  """

  def __init__(self, folder: str):
    """Opens `write`'s folder.

    Raises:
      FileNotFoundError: there is no such folder.
    """
    # --- Each sequence's counts.
    about_3N = np.load(os.path.join(folder, _ABOUT))
    self.lengths_N, self.policy_N, self.task_N = about_3N
    self._begins_N = np.cumsum(self.lengths_N) - self.lengths_N

    # --- The tokens, sequence after sequence; an empty file can not be mapped.
    file = os.path.join(folder, _TOKENS)
    self._stored = np.zeros(0, np.int32)
    if os.path.getsize(file):
      self._stored = np.memmap(file, np.int32, "r")

  @staticmethod
  def write(folder: str, trajectories: Iterable[Trajectory]) -> None:
    """Writes trajectories, which must have token ids, into a new folder.

    Raises:
      OSError: the folder can not be written.
    """
    about: list[tuple[int, int, int]] = []
    tasks: dict[str, int] = {}  # task numbers, by first trajectory
    os.makedirs(folder)
    with open(os.path.join(folder, _TOKENS), "wb") as f:
      for t in trajectories:
        parts = [np.zeros(0, np.int32)]  # for a trajectory without segments
        for s in t.segments:
          parts.append(_stored(s.ids, s.author == Author.POLICY))
        ids = np.concatenate(parts)
        f.write(ids.data)
        task = tasks.setdefault(t.task_id, len(tasks))
        about.append((len(ids), np.count_nonzero(ids >= 0), task))
    about_3N = np.array(about, np.int64).reshape(-1, 3).T
    buffer = io.BytesIO()  # numpy's own file writes do not say why a disk refuses
    np.save(buffer, about_3N)
    with open(os.path.join(folder, _ABOUT), "wb") as f:
      f.write(buffer.getbuffer())

  def __len__(self) -> int:
    return len(self.lengths_N)

  def read(self, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads sequence i: int32 ids, and whether the policy wrote them; [T] each."""
    # A token not written by the policy is stored as ~id, below 0.
    begin = self._begins_N[i]
    stored_T = self._stored[begin : begin + self.lengths_N[i]]
    ours_T = stored_T >= 0
    return np.where(ours_T, stored_T, ~stored_T), ours_T

  def batch(
    self,
    rows: Sequence[np.ndarray],
    size: int,
    length: int,
    partitioner: Partitioner,
  ) -> Micro:
    """Makes a micro-batch from packed rows, filled up with empty rows.

    Args:
      rows: each row's sequence indices; together at most `length` tokens.
      size: B, rows per batch.
      length: T, tokens per row.
      partitioner: assigns rows to processes; other processes' rows are not read.
    """
    mine = np.flatnonzero(partitioner.rows(size))
    batch = empty(len(mine), length)
    for r, row in enumerate(mine):
      if row >= len(rows):
        break  # missing rows stay empty
      at = 0
      for number, i in enumerate(rows[row], 1):
        end = at + self.lengths_N[i]
        batch.tokens_BT[r, at:end], batch.loss_mask_BT[r, at:end] = self.read(i)
        batch.segment_BT[r, at:end] = number
        batch.position_BT[r, at:end] = np.arange(end - at)
        at = end
    # Figures cover all processes' rows.
    members = np.concatenate(rows)
    return Micro(
      batch, self.lengths_N[members].tolist(), int(self.policy_N[members].sum())
    )

  def once(
    self, members: np.ndarray, size: int, length: int, partitioner: Partitioner
  ) -> Iterator[Micro]:
    """Yields micro-batches with each member once; arguments as for `batch`."""
    rows = _packed(self, members, length)
    for start in range(0, len(rows), size):
      yield self.batch(rows[start : start + size], size, length, partitioner)

  def endless(
    self,
    members: np.ndarray,
    size: int,
    length: int,
    partitioner: Partitioner,
    seed: int,
    first: int,
  ) -> Iterator[Micro]:
    """Yields endless micro-batches, prepared ahead in a thread.

    Every epoch has each packed row exactly once, in its own order; a micro-batch may
    span the end of one epoch and the beginning of the next. In every process the n-th
    micro-batch depends only on (seed, n), so the position in the data is a number.

    Args:
      members: indices of sequences with 1 to `length` tokens each.
      size: as for `batch`, like `length` and `partitioner`.
      seed: the order's seed, 0 to 2**32 - 1.
      first: the first micro-batch's number.
    """
    import grain  # takes seconds to import, and only training needs it

    # An order by (seed, epoch), computed on demand, not stored.
    rows = _packed(self, members, length)
    order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()

    def micro(number: int) -> Micro:
      # Places in the endless row order, across epochs.
      begin = number * size
      batch_rows = [rows[order[i]] for i in range(begin, begin + size)]
      return self.batch(batch_rows, size, length, partitioner)

    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
    numbers = grain.MapDataset.range(first, _FOR_EVER)
    yield from numbers.map(micro).to_iter_dataset(options)


def check_ids(trajectory: Trajectory, vocab_size: int) -> None:
  """Refuses ids outside the model's vocabulary.

  Raises:
    ValueError: an id is outside; the message names task, id and segment.
  """
  for s in trajectory.segments:
    # A fast check first: nearly every segment is right, and these calls run in C.
    # `type` tells a bool from an int.
    right = set(map(type, s.ids)) <= {int}
    if right and s.ids:
      right = min(s.ids) >= 0 and max(s.ids) < vocab_size
    if right:
      continue
    for i in s.ids:
      if type(i) is not int or not 0 <= i < vocab_size:
        raise ValueError(
          f"task {trajectory.task_id!r} has token id {i!r} in {s.text[:40]!r}; ids are "
          f"whole numbers from 0 to {vocab_size - 1}"
        )


def _packed(dataset: Dataset, members: np.ndarray, length: int) -> list[np.ndarray]:
  rows = pack(dataset.lengths_N[members].tolist(), length)
  return [members[row] for row in rows]


def _stored(ids: Sequence[int], policy: bool) -> np.ndarray:
  """Returns ids as stored: ~id, below 0, for tokens not written by the policy."""
  array = np.asarray(ids, np.int32)
  if policy:
    return array
  return ~array
