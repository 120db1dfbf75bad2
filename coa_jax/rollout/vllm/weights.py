"""Computes our own log-probs of a row, to compare with a vLLM server's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model import distribution
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner
from coa_jax.model.transformer import Transformer

PROBE = 128  # maximum tokens in `score`


def score(
  model: ModelConfig, partitioner: Partitioner, view: Any, ids: Sequence[int]
) -> np.ndarray:
  """Returns log-probs (nats, temperature 1) of all but the first of up to PROBE ids."""
  # All rows have one length: one program is compiled.
  tokens_BT = np.zeros((1, PROBE), np.int32)
  tokens_BT[:, : len(ids)] = ids
  segment_BT = np.zeros_like(tokens_BT)
  segment_BT[:, : len(ids)] = 1
  logp_BT = _token_logps(model, partitioner, view, tokens_BT, segment_BT)
  return np.asarray(logp_BT)[0, : len(ids) - 1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _token_logps(
  cfg: ModelConfig,
  partitioner: Partitioner,
  params: Any,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
) -> jax.Array:
  """Returns log p (nats, temperature 1) of the token after each position."""
  model = Transformer(cfg, partitioner, decode=True)
  position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  hidden_BTD, _ = model.apply({"params": params}, tokens_BT, position_BT, segment_BT)
  logits_BTV = model.apply({"params": params}, hidden_BTD, method="logits")
  logp_BTV = distribution.log_probs(logits_BTV, 1.0)
  # The roll's last entry is not a next token; `score` leaves it out.
  next_BT1 = jnp.roll(tokens_BT, -1, axis=1)[..., None]
  return jnp.take_along_axis(logp_BTV, next_BT1, axis=-1)[..., 0]
