"""Stop-condition and grammar tables over token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Automaton:
  """Tables over states S and token classes C; state 0 is the start.

  Attributes:
    class_V: each token's class.
    next_SC: the state after a token.
    stop_SC: 0, or 1 + the index in `tags` of the closing tag that the token completes.
    tags: the closing tags that stop decoding (`Variant.yield_tags`).
  """

  class_V: np.ndarray
  next_SC: np.ndarray
  stop_SC: np.ndarray
  tags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Constraint:
  """A variant's grammar over tokens; state 0 is the start of the policy's text.

  Attributes:
    class_V: each token's class.
    next_SC: the state after a token, or -1 if the token is not allowed.
    resume_S: the state after an observation, or -1 if none may come; for state 0 the
      state after the summary that begins a later context.
    ends_S: True after the answer.
  """

  class_V: np.ndarray
  next_SC: np.ndarray
  resume_S: np.ndarray
  ends_S: np.ndarray

  def states(self, ids: Sequence[int], state: int = 0) -> list[int]:
    """Returns the state before each token and after the last: len(ids) + 1 numbers.

    States after the first forbidden token are -1.
    """
    out = [state]
    for c in self.class_V[np.asarray(ids, np.int64)].tolist():
      if state >= 0:
        state = int(self.next_SC[state, c])
      out.append(state)
    return out

  def after(self, parts: Iterable[tuple[Sequence[int], bool]], state: int = 0) -> int:
    """Returns the state after these parts of a trajectory.

    Args:
      parts: ids, and True for an observation or a repeated summary, whose ids are not
        read.
      state: the state before these parts.
    """
    for ids, is_observation in parts:
      if not is_observation:
        state = self.states(ids, state)[-1]
      elif state >= 0:
        state = int(self.resume_S[state])
    return state
