"""Our grammar in vLLM's sampler: a logits processor, loaded by the server.

  vllm serve ... --logits-processors=coa_jax.rollout.vllm.plugin:Grammar

This module runs in vLLM's environment, where PYTHONPATH names this repository, and
imports none of its other modules. A request names a table file and an initial state;
disallowed tokens get no probability, as in `sampler.window`. vLLM's own guided decoding
would mask by other rules, but the learner computes log-probs under ours.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

# Fields in `vllm_xargs`.
FILE = "coa_grammar"
STATE = "coa_state"


class GrammarTables:
  """A `Constraint`'s class_V and next_SC, and a cache of masks by state."""

  def __init__(self, path: str, device: torch.device):
    """Reads the file; pickles are refused."""
    with np.load(path, allow_pickle=False) as file:
      self.class_V = file["class_V"]
      self.next_SC = file["next_SC"]
    self._device = device
    self._refused: dict[int, torch.Tensor | None] = {}

  def after(self, state: int, token: int) -> int:
    """Returns the state after a token; -1 after a disallowed one."""
    if state < 0:
      return -1
    return int(self.next_SC[state, self.class_V[token]])

  def refused(self, state: int) -> torch.Tensor | None:
    """Returns refused_V, bool; None after a turn's end: later tokens are dropped."""
    if state not in self._refused:
      self._refused[state] = None
      refused_C = self.next_SC[state] < 0
      # A state without allowed tokens is a turn's end: vLLM samples on to its own end,
      # and needs some token to draw.
      if state >= 0 and not refused_C.all():
        refused_V = torch.from_numpy(refused_C[self.class_V])
        self._refused[state] = refused_V.to(self._device)
    return self._refused[state]


@dataclasses.dataclass
class _Request:
  """A request's progress: the state after its first `read` tokens."""

  tables: GrammarTables
  state: int
  ids: list[int]  # vLLM's own growing list
  read: int = 0

  def refused(self) -> torch.Tensor | None:
    # vLLM appends sampled tokens; each advances the state once.
    for token in self.ids[self.read :]:
      self.state = self.tables.after(self.state, token)
    self.read = len(self.ids)
    return self.tables.refused(self.state)


class Grammar(LogitsProcessor):
  """Masks the logits rows of requests with a grammar."""

  def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
    """Takes vLLM's arguments."""
    self._requests: dict[int, _Request] = {}
    self._tables = functools.lru_cache(maxsize=4)(
      lambda path: GrammarTables(path, device)
    )

  def is_argmax_invariant(self) -> bool:
    """Returns False: the mask may exclude the most likely token."""
    return False

  def update_state(self, batch_update: Any) -> None:
    """Adds, removes and moves requests."""
    process_dict_updates(self._requests, batch_update, self._begin)

  def _begin(self, params: Any, prompt: list[int] | None, ids: list[int]) -> Any:
    arguments = params.extra_args or {}
    if FILE not in arguments:  # another client's request, without grammar
      return None
    return _Request(self._tables(arguments[FILE]), int(arguments[STATE]), ids)

  def apply(self, logits: torch.Tensor) -> torch.Tensor:
    """Masks the refused tokens, in place."""
    for row, request in self._requests.items():
      refused_V = request.refused()
      if refused_V is not None:
        # Logits rows may be padded past the vocabulary.
        logits[row, : len(refused_V)].masked_fill_(refused_V, float("-inf"))
    return logits
