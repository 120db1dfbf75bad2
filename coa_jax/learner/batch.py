"""Trajectories to packed rows of arrays.

Several trajectories share a row; segments keep them apart. Trained tokens are fixed at
writing: the loss mask is 1 if the policy is the author.
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
  """Packed rows; [B, T] each. On the host of one of several processes B counts its own.

  Attributes:
    tokens_BT: int32 ids.
    segment_BT: int32, 1 and up for the trajectories of a row, 0 for padding.
    position_BT: int32 position of a token in its own trajectory.
    loss_mask_BT: float32, 0 unless the policy wrote the token.
    advantage_BT: float32, the token's trajectory's advantage; zeros outside RL.
    logp_BT: float32 log p of the token at sampling; zeros outside RL.
    grammar_BT: int32 grammar state at the token's sampling; -1 if any token was
      allowed.
    loss_weight_BT: float32, the token's weight in the loss, 0 if masked; None if equal
      to the mask. The following are float32, and None if unused.
    old_BT: log p under the learner before the step's first update.
    reference_BT: log p under the reference policy.
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
  """Makes a batch of padding only, as numpy arrays."""
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

  Args:
    lengths: tokens of each sequence.
    length: T, tokens of a row.

  Returns:
    For each row the indices of its sequences, in order of their index. Empty sequences,
    and those longer than a row, are in no row: see `fits`.
  """
  # Best fit decreasing; ties go by index.
  order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
  rows: list[list[int]] = []
  # Rows by the room left in them, so that each sequence finds its row in O(T).
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
  """Writes trajectories one after the other into a row of a numpy batch.

  Args:
    batch: as from `empty`; written in place.
    row: index of its row.
    trajectories: with ids; together at most T tokens.
    advantages: one per trajectory, in RL; their segments then carry log-probs.
    constraint: the policy tokens' sampling grammar.
  """
  at = 0
  # Segment 0 is padding, so trajectories are numbered from 1.
  for number, t in enumerate(trajectories, 1):
    begin = at
    state = 0  # of the grammar
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
  """Packs trajectories into batches of `rows` rows of `length` tokens.

  The last batch is filled up with empty rows, so every batch has the same shape.
  Trajectories longer than a row are left out; count them with `fits`.

  Args:
    trajectories: with ids.
    rows: B.
    length: T.
    advantages: as `fill` takes them, like `constraint`.
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
  """Trajectories in batches, with the places of each one's policy tokens.

  A process makes only its own rows.

  Attributes:
    batches: as from `batches`, with the sampler's log-probs; advantages are zeros.
    counts: policy tokens per trajectory, in any row.
    own: indices of those in this process's rows, in their order.
  """

  def __init__(
    self,
    trajectories: Sequence[Trajectory],
    rows: int,
    length: int,
    constraint: Constraint | None = None,
    partitioner: Partitioner = ONE_DEVICE,
  ):
    """Packs them.

    Args:
      trajectories: the same in every process, in one order.
      rows: as `batches` takes it, like `length` and `constraint`.
      partitioner: assigns rows to processes.

    Raises:
      ValueError: a trajectory does not fit a row.
    """
    lengths = [t.num_tokens for t in trajectories]
    # A missing one would be missing among the advantages.
    if not np.all(fits(np.array(lengths), length)):
      raise ValueError(f"a trajectory of {max(lengths)} tokens, rows of {length}")
    self.counts = [t.num_policy for t in trajectories]

    # --- The rows of this process.
    mine_B = partitioner.rows(rows)
    # Of 0, not None: `fill` writes log-probs only beside advantages.
    zeros = [0.0] * len(trajectories)
    self.batches = list(batches(trajectories, rows, length, zeros, constraint, mine_B))

    # --- For each trajectory in them its batch, and its policy tokens' flat indices.
    self._where: dict[int, tuple[int, np.ndarray]] = {}
    place_B = np.cumsum(mine_B) - 1
    # These are the rows of `batches`: packing depends on lengths alone.
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
    """Reads the field `name` at the policy tokens of each trajectory of `own`."""
    out = []
    for i in self.own:
      m, at = self._where[i]
      out.append(getattr(self.batches[m], name).ravel()[at])
    return out

  def write(self, name: str, values: Sequence[np.ndarray | float]) -> None:
    """Sets the field `name` at the policy tokens of each of `own`; 0 elsewhere."""
    arrays = [np.zeros(b.tokens_BT.shape, np.float32) for b in self.batches]
    for i, value in zip(self.own, values, strict=True):
      m, at = self._where[i]
      arrays[m].ravel()[at] = value  # in place: `ravel` of a fresh array is no copy
    self.replace(name, arrays)

  def replace(self, name: str, arrays: Sequence[Array]) -> None:
    """Sets the field `name` of each batch, [B, T]."""
    for m, (batch, array) in enumerate(zip(self.batches, arrays, strict=True)):
      self.batches[m] = batch.replace(**{name: array})
