"""Replays recorded tokens through an engine, for their log-probs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools

from coa_jax.protocol.trajectory import Author, Trajectory, grammar_parts
from coa_jax.rollout.types import Episode

_DECODED = (Author.POLICY, Author.ENVIRONMENT)  # the others are prefilled


@dataclasses.dataclass
class _Turn:
  """A turn's ids: prefilled, then a summary's opening tag, then sampled ones."""

  prefilled: list[int] = dataclasses.field(default_factory=list)
  tag: list[int] = dataclasses.field(default_factory=list)
  sampled: list[int] = dataclasses.field(default_factory=list)


class Replay(Episode):
  """Replays a context's own tokens for their log-probs; see `Episode`."""

  def __init__(self, trajectory: Trajectory, sequence: int, temperature: float):
    """Takes a one-context trajectory, its number among all, and the temperature."""
    self.task_id = trajectory.task_id
    self.seed = 0  # every token is forced
    self.sequence = sequence
    self.temperature = temperature
    self.logps: list[float] = []
    self.opening = grammar_parts(
      itertools.takewhile(lambda s: s.author not in _DECODED, trajectory.segments)
    )
    self._turns = [_Turn()]
    for s in trajectory.segments:
      turn = self._turns[-1]
      if s.author == Author.POLICY:
        turn.sampled += s.ids
      elif s.author == Author.ENVIRONMENT:
        turn.tag += s.ids
      elif turn.sampled:
        self._turns.append(_Turn(list(s.ids)))
      else:
        turn.prefilled += s.ids

  def start(self) -> list[int]:
    """Returns the prompt's ids."""
    return self._turns[0].prefilled

  def forced(self) -> list[int]:
    """Returns the ids originally decoded in this turn."""
    return self._turns[0].tag + self._turns[0].sampled

  def sampled(
    self, ids: list[int], logps: list[float], tag: str | None
  ) -> concurrent.futures.Future[list[int]] | None:
    """Keeps the log-probs.

    Raises:
      ValueError: decoding stops at another token than the trajectory did.
    """
    turn = self._turns.pop(0)
    if ids != turn.tag + turn.sampled:
      raise self._elsewhere()
    self.logps += logps[len(turn.tag) :]
    # Over if no sampled token follows, whatever is prefilled.
    if not self._turns or not self._turns[0].sampled:
      return None
    future: concurrent.futures.Future[list[int]] = concurrent.futures.Future()
    future.set_result(self._turns[0].prefilled)
    return future

  def observed(self, result: list[int]) -> list[int]:
    """Returns the originally prefilled ids."""
    return result

  def out_of_room(self) -> None:
    """Refuses a `max_len` shorter than when the trajectory was sampled."""
    raise self._elsewhere()

  def lost(self) -> None:
    """Is never called: only our own sampler replays, and it loses no episode."""
    raise self._elsewhere()

  def _elsewhere(self) -> ValueError:
    return ValueError(
      f"trajectory of task {self.task_id!r}: decoding under this variant and max_len "
      "stops elsewhere than it did; replay it as it was sampled"
    )
