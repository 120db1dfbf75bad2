"""Sends the tokens of trajectories to the processes in whose rows of a batch they lie.

They go as compact arrays of int32: 4 bytes an id, and 4 more for the log-prob of one
that the policy wrote, which keeps every bit of it as float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from coa_jax.processes import send
from coa_jax.protocol.outcome import Outcome
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

_AUTHORS = tuple(Author)


def with_tokens(
  trajectories: Sequence[Trajectory | Outcome], readers: Mapping[int, Collection[int]]
) -> list[Trajectory | Outcome]:
  """Returns the trajectories, with tokens where this process reads them.

  All processes have to call this. What came from another one has authors, ids and
  log-probs, and neither roles nor texts.

  Args:
    trajectories: those of one update, in the same order everywhere; played here, or the
      outcomes of others.
    readers: for the index of each, the processes that read its tokens.
  """
  if jax.process_count() == 1:
    return list(trajectories)
  own = {}
  for i, t in enumerate(trajectories):
    if isinstance(t, Trajectory):
      own[i] = to_words(t)
  out = list(trajectories)
  for i, words in send(own, readers).items():
    if i not in own:
      out[i] = from_words(words)
  return out


def to_words(trajectory: Trajectory) -> np.ndarray:
  """Writes segments as int32 words: their number, the author and length of each, ids of
  all, and the bits of the log-probs of the policy's."""
  head = [len(trajectory.segments)]
  ids: list[int] = []
  logps: list[float] = []
  for s in trajectory.segments:
    head += [_AUTHORS.index(s.author), len(s.ids)]
    ids += s.ids
    if s.author == Author.POLICY:
      logps += s.logps
  words = np.array(head + ids, np.int32)
  return np.concatenate([words, np.array(logps, np.float32).view(np.int32)])


def from_words(words: np.ndarray) -> Trajectory:
  """Reads what `to_words` wrote."""
  count = int(words[0])
  head = words[1 : 1 + 2 * count].reshape(count, 2).tolist()
  num_tokens = sum(length for _, length in head)
  ids = words[1 + 2 * count :][:num_tokens].tolist()
  logps = words[1 + 2 * count + num_tokens :].view(np.float32).tolist()
  segments = []
  for number, length in head:
    segment = Segment(_AUTHORS[number], "", "", ids[:length])
    ids = ids[length:]
    if segment.author == Author.POLICY:
      segment.logps = logps[:length]
      logps = logps[length:]
    segments.append(segment)
  return Trajectory("", segments)
