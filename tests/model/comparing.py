"""Logits of our models and of Hugging Face's over the same tokens, to compare them."""

from __future__ import annotations

import numpy as np
import torch

from coa_jax.learner import batch as batching
from coa_jax.model import decode_params
from coa_jax.model.cache import KVCache
from coa_jax.model.config import ModelConfig
from coa_jax.rollout import sampler
from tests.model.models import logits

# Relative to the largest logit; both sides compute in float32.
TOLERANCE = 2e-5


def rows(packed: list[list[np.ndarray]], length: int) -> batching.Batch:
  """A batch of rows that pack several sequences each, padded on the right."""
  out = batching.empty(len(packed), length)
  for r, members in enumerate(packed):
    at = 0
    for number, ids in enumerate(members, 1):
      end = at + len(ids)
      out.tokens_BT[r, at:end], out.segment_BT[r, at:end] = ids, number
      out.position_BT[r, at:end] = np.arange(len(ids))
      out.loss_mask_BT[r, at + 1 : end] = 1.0  # nothing predicts the first token
      at = end
  return out


def ours(cfg: ModelConfig, params, batch: batching.Batch) -> list[np.ndarray]:
  """Our logits for each sequence of a batch, in order."""
  out = logits(cfg, params, batch.tokens_BT, batch.position_BT, batch.segment_BT)
  out_BTV, found = np.asarray(out), []
  for row, segment_T in zip(out_BTV, batch.segment_BT, strict=True):
    found += [row[segment_T == n] for n in range(1, segment_T.max() + 1)]
  return found


def theirs(model, ids: list[np.ndarray]) -> list[np.ndarray]:
  """Hugging Face's logits for sequences in one batch, right-padded and masked."""
  batch = rows([[x] for x in ids], max(map(len, ids)))
  mask = torch.tensor(batch.segment_BT)
  with torch.no_grad():
    out = model(torch.tensor(batch.tokens_BT), attention_mask=mask).logits
  out_BTV = out.float().numpy()
  return [row[: len(x)] for row, x in zip(out_BTV, ids, strict=True)]


def rms(x: np.ndarray) -> float:
  """The root mean square."""
  return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def greedy(
  cfg: ModelConfig, params, prompts: list[np.ndarray], new: int
) -> list[list[int]]:
  """The sampler's tokens at temperature 0, with one slot per prompt."""
  B, longest = len(prompts), max(map(len, prompts))
  batch = rows([[ids] for ids in prompts], longest)
  last_B = np.array([len(ids) - 1 for ids in prompts], np.int32)
  (params,) = decode_params.decoding_views(cfg, params)
  table_BC = np.arange(B, dtype=np.int32)[:, None]  # one page per prompt
  cache = sampler.prefill(
    cfg,
    params,
    KVCache.empty(cfg, B, longest + new, slots=B),
    table_BC,
    batch.tokens_BT,
    np.zeros(B, np.int32),
    last_B,
  )
  state = sampler.SamplerState(
    length_B=last_B,
    pending_B=np.array([ids[-1] for ids in prompts], np.int32),
    limit_B=np.full(B, longest + new, np.int32),
    seed_B=np.zeros(B, np.uint32),
    sequence_B=np.arange(B).astype(np.uint32),
    temperature_B=np.zeros(B, np.float32),
    automaton_B=np.zeros(B, np.int32),
    active_B=np.ones(B, bool),
    grammar_B=np.zeros(B, np.int32),
  )
  nothing = np.zeros((1, 1), np.int32)  # one grammar state, and no stop token
  tables = sampler.Tables(np.zeros(cfg.vocab_size, np.int32), nothing, nothing)
  free_BW = np.full((B, new), -1, np.int32)
  out = sampler.window(cfg, params, cache, table_BC, state, tables, free_BW)[2]
  return np.asarray(out.token_BW).tolist()
