"""Our grammar in vLLM's sampler: a logits processor, loaded by the server.

  vllm serve ... --logits-processors=coa_jax.rollout.vllm.plugin:Grammar

It runs in vLLM's environment, where PYTHONPATH names this repository, and imports
nothing else of it. A request names a file of tables and the state that it begins in;
tokens that these do not allow get no probability, as in `sampler.window`. vLLM's own
guided decoding would mask by rules of its own, and the learner computes log-probs under
ours.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

# Fields of `vllm_xargs`.
FILE = "coa_grammar"
STATE = "coa_state"


class GrammarTables:
  """class_V and next_SC of a `Constraint`, and the masks that states have needed."""

  def __init__(self, path: str, device: torch.device):
    """Reads the file; it is no pickle."""
    with np.load(path, allow_pickle=False) as file:
      self.class_V = file["class_V"]
      self.next_SC = file["next_SC"]
    self._device = device
    self._refused: dict[int, torch.Tensor | None] = {}

  def after(self, state: int, token: int) -> int:
    """The state after a token; -1 once one was not allowed."""
    if state < 0:
      return -1
    return int(self.next_SC[state, self.class_V[token]])

  def refused(self, state: int) -> torch.Tensor | None:
    """refused_V, bool; None where the grammar says nothing: what follows is dropped."""
    if state not in self._refused:
      self._refused[state] = None
      refused_C = self.next_SC[state] < 0
      # Nothing allowed is a turn's end: vLLM samples on to its own, and must have
      # something to draw from.
      if state >= 0 and not refused_C.all():
        refused_V = torch.from_numpy(refused_C[self.class_V])
        self._refused[state] = refused_V.to(self._device)
    return self._refused[state]


@dataclasses.dataclass
class _Request:
  """Where a request is: the state after its first `read` tokens."""

  tables: GrammarTables
  state: int
  ids: list[int]  # vLLM's own, which grows
  read: int = 0

  def refused(self) -> torch.Tensor | None:
    # vLLM appends what it has sampled; each token moves the state once.
    for token in self.ids[self.read :]:
      self.state = self.tables.after(self.state, token)
    self.read = len(self.ids)
    return self.tables.refused(self.state)


class Grammar(LogitsProcessor):
  """Masks the rows of requests that name a grammar."""

  def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
    """As vLLM calls it."""
    self._requests: dict[int, _Request] = {}
    self._tables = functools.lru_cache(maxsize=4)(
      lambda path: GrammarTables(path, device)
    )

  def is_argmax_invariant(self) -> bool:
    """It may take the most likely token away."""
    return False

  def update_state(self, batch_update: Any) -> None:
    """Requests come, go and change places."""
    process_dict_updates(self._requests, batch_update, self._begin)

  def _begin(self, params: Any, prompt: list[int] | None, ids: list[int]) -> Any:
    arguments = params.extra_args or {}
    if FILE not in arguments:  # another client's request: it has no grammar
      return None
    return _Request(self._tables(arguments[FILE]), int(arguments[STATE]), ids)

  def apply(self, logits: torch.Tensor) -> torch.Tensor:
    """Takes the refused tokens away, in place."""
    for row, request in self._requests.items():
      refused_V = request.refused()
      if refused_V is not None:
        # Rows of logits may be padded past the vocabulary.
        logits[row, : len(refused_V)].masked_fill_(refused_V, float("-inf"))
    return logits
