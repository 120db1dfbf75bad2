"""Packs trajectories into rows of arrays.

Several trajectories share a row; segment numbers keep them apart. The loss mask follows
the recorded author: 1 for the policy, 0 for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import flax.struct
import jax
import numpy as np

from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.protocol.trajectory import Author, Trajectory, grammar_parts

Array = np.ndarray | jax.Array


@flax.struct.dataclass
class Batch:
  """Packed rows, [B, T]. On the host, each of several processes has its own rows only.

  Attributes:
    tokens_BT: int32 ids.
    segment_BT: int32 trajectory number in the row, from 1; 0 for padding.
    position_BT: int32 token position in its trajectory.
    loss_mask_BT: float32, 1 for policy tokens, 0 for others.
    advantage_BT: float32 advantage; zeros outside RL.
    logp_BT: float32 log-prob at sampling; zeros outside RL.
    grammar_BT: int32 grammar state at sampling; -1 if any token was allowed.
    loss_weight_BT: float32 weight in the loss, 0 if masked; None if equal to the mask.
      The following fields are float32, and None if unused.
    old_BT: log-prob under the learner before the step's first update.
    reference_BT: log-prob under the reference policy.
    value_BT: the critic's value before the token.
    return_BT: the critic's target.
  """

  tokens_BT: Array
  segment_BT: Array
  position_BT: Array
  loss_mask_BT: Array
  advantage_BT: Array
  logp_BT: Array
  grammar_BT: Array
  loss_weight_BT: Array | None = None
  old_BT: Array | None = None
  reference_BT: Array | None = None
  value_BT: Array | None = None
  return_BT: Array | None = None


def empty(rows: int, length: int) -> Batch:
  """Makes a numpy batch of padding only."""
  shape = (rows, length)
  return Batch(
    tokens_BT=np.zeros(shape, np.int32),
    segment_BT=np.zeros(shape, np.int32),
    position_BT=np.zeros(shape, np.int32),
    loss_mask_BT=np.zeros(shape, np.float32),
    advantage_BT=np.zeros(shape, np.float32),
    logp_BT=np.zeros(shape, np.float32),
    grammar_BT=np.full(shape, -1, np.int32),
  )


def pack(lengths: Sequence[int], length: int) -> list[list[int]]:
  """Assigns sequences to rows: longest first, each to the fullest row with room.

  Returns:
    Each row's sequence indices, ascending. Empty sequences, and sequences longer than a
    row, are left out; see `fits`.
  """
  # Best fit decreasing; ties go by index.
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  rows: list[list[int]] = []
  # Rows by free room, so that each sequence finds its row in O(T).
  by_room: list[list[int]] = [[] for _ in range(length + 1)]
  for i in order:
    n = lengths[i]
    if not fits(n, length):
      continue
    # The fullest row with room, or a new one.
    room = n
    while room <= length and not by_room[room]:
      room += 1
    if room > length:
      room = length
      row = len(rows)
      rows.append([])
    else:
      row = by_room[room].pop()
    rows[row].append(i)
    by_room[room - n].append(row)
  return [sorted(row) for row in rows]


def fits(n: int | np.ndarray, length: int) -> bool | np.ndarray:
  """Tells whether `pack` puts a sequence of n tokens into a row."""
  return (n > 0) & (n <= length)


def fill(
  batch: Batch,
  row: int,
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float] | None = None,
  constraint: Constraint | None = None,
) -> None:
  """Writes trajectories one after the other into a numpy batch's row.

  Args:
    batch: as from `empty`; written in place.
    advantages: in RL, one per trajectory; policy segments then need log-probs.
  """
  at = 0
  # Segment 0 is padding, so trajectories are numbered from 1.
  for number, t in enumerate(trajectories, 1):
    begin = at
    state = 0  # the grammar's
    for s in t.segments:
      end = at + len(s.ids)
      batch.tokens_BT[row, at:end] = s.ids
      if s.author == Author.POLICY:
        batch.loss_mask_BT[row, at:end] = 1.0
        if advantages is not None:
          batch.advantage_BT[row, at:end] = advantages[number - 1]
          batch.logp_BT[row, at:end] = s.logps
        if constraint is not None:
          states = constraint.states(s.ids, state)  # before each, and after the last
          batch.grammar_BT[row, at:end] = states[:-1]
          state = states[-1]
      elif constraint is not None:
        state = constraint.after(grammar_parts([s]), state)
      at = end
    batch.segment_BT[row, begin:at] = number
    batch.position_BT[row, begin:at] = np.arange(at - begin)


def batches(
  trajectories: Sequence[Trajectory],
  rows: int,
  length: int,
  advantages: Sequence[float] | None = None,
  constraint: Constraint | None = None,
  mine_B: np.ndarray | None = None,
) -> Iterator[Batch]:
  """Packs trajectories into batches of shape [rows, length].

  The last batch is filled up with empty rows, so every batch has the same shape.
  Trajectories longer than a row are left out; count them with `fits`.

  Args:
    mine_B: rows to make, [B] bool; None for all.
  """
  packed = pack([t.num_tokens for t in trajectories], length)
  mine = range(rows) if mine_B is None else np.flatnonzero(mine_B)
  for start in range(0, len(packed), rows):
    batch = empty(len(mine), length)
    for place, row in enumerate(mine):
      if start + row >= len(packed):
        break  # the last batch's missing rows stay padding
      members = packed[start + row]
      row_trajectories = [trajectories[i] for i in members]
      row_advantages = None
      if advantages is not None:
        row_advantages = [advantages[i] for i in members]
      fill(batch, place, row_trajectories, row_advantages, constraint)
    yield batch


class Packed:
  """Packed batches; policy tokens are read and written by trajectory.

  A process makes only its own rows.

  Attributes:
    batches: as from `batches`, with the sampler's log-probs; advantages are zeros.
    counts: policy tokens per trajectory, on any process.
    own: indices of the trajectories in this process's rows, ascending.
  """

  def __init__(
    self,
    trajectories: Sequence[Trajectory],
    rows: int,
    length: int,
    constraint: Constraint | None = None,
    partitioner: Partitioner = ONE_DEVICE,
  ):
    """Packs the trajectories.

    Args:
      trajectories: the same in every process, in one order.
      rows: as for `batches`, like `length` and `constraint`.
      partitioner: assigns rows to processes.

    Raises:
      ValueError: a trajectory does not fit a row.
    """
    lengths = [t.num_tokens for t in trajectories]
    # Every trajectory needs a place for its advantages.
    if not np.all(fits(np.array(lengths), length)):
      raise ValueError(f"a trajectory of {max(lengths)} tokens, rows of {length}")
    self.counts = [t.num_policy for t in trajectories]

    # --- This process's rows.
    mine_B = partitioner.rows(rows)
    # Zeros, not None: `fill` writes log-probs only beside advantages.
    zeros = [0.0] * len(trajectories)
    self.batches = list(batches(trajectories, rows, length, zeros, constraint, mine_B))

    # --- Each own trajectory's batch, and its policy tokens' flat indices.
    self._where: dict[int, tuple[int, np.ndarray]] = {}
    place_B = np.cumsum(mine_B) - 1
    # The same rows as in `batches`: packing depends on lengths alone.
    for r, members in enumerate(pack(lengths, length)):
      m, row = divmod(r, rows)
      if not mine_B[row]:
        continue
      batch = self.batches[m]
      place = place_B[row]
      for number, i in enumerate(members, 1):
        policy_T = (batch.segment_BT[place] == number) & (batch.loss_mask_BT[place] > 0)
        self._where[i] = (m, place * length + np.flatnonzero(policy_T))
    self.own = sorted(self._where)

  def read(self, name: str) -> list[np.ndarray]:
    """Reads the field `name` at each own trajectory's policy tokens."""
    out = []
    for i in self.own:
      m, at = self._where[i]
      out.append(getattr(self.batches[m], name).ravel()[at])
    return out

  def write(self, name: str, values: Sequence[np.ndarray | float]) -> None:
    """Sets the field `name` at each own trajectory's policy tokens; 0 elsewhere."""
    arrays = [np.zeros(b.tokens_BT.shape, np.float32) for b in self.batches]
    for i, value in zip(self.own, values, strict=True):
      m, at = self._where[i]
      arrays[m].ravel()[at] = value  # in place: `ravel` of a fresh array is no copy
    self.replace(name, arrays)

  def replace(self, name: str, arrays: Sequence[Array]) -> None:
    """Sets the field `name` of each batch, [B, T]."""
    for m, (batch, array) in enumerate(zip(self.batches, arrays, strict=True)):
      self.batches[m] = batch.replace(**{name: array})
