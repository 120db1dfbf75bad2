"""A `vllm serve` that scores trajectories: a teacher for on-policy distillation."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.rollout.vllm.client import VllmConfig, VllmServer

_AT_ONCE = 16  # requests


class ServerTeacher:
  """Scores the policy's tokens by a server's prompt log-probs."""

  def __init__(self, url: str, max_len: int, vocab_size: int):
    """Connects to the server.

    Args:
      max_len: maximum tokens per trajectory, hint included.
      vocab_size: the policy's.

    Raises:
      VllmError: there is no such server, or its rows are shorter.
    """
    nowhere = os.devnull  # no weights are sent
    self._server = VllmServer(
      VllmConfig(nowhere, url), max_len + 1, vocab_size, samples=False
    )

  def __call__(self, trajectories: Sequence[Trajectory], _: Any) -> list[np.ndarray]:
    """Returns log-probs of each trajectory's policy tokens; every process asks for all.

    Raises:
      VllmError: the server is gone, or refuses a request.
    """
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
      return list(pool.map(self._score, trajectories))

  def _score(self, trajectory: Trajectory) -> np.ndarray:
    ids: list[int] = []
    is_policy: list[bool] = []
    for segment in trajectory.segments:
      ids += segment.ids
      is_policy += [segment.author == Author.POLICY] * len(segment.ids)
    # The first id has no score; it is the prompt's.
    return np.array(self._server.score(ids))[np.array(is_policy[1:])]
