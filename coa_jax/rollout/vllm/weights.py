"""Whether a vLLM server serves the weights that were exported for it.

By what it holds (SHA-256 of every tensor) and by what it computes (log-probs of a row).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from coa_jax.model import distribution
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import Partitioner
from coa_jax.model.transformer import Transformer
from coa_jax.rollout.vllm.client import VllmError

PROBE = 128  # tokens that `score` takes, at most
# What vLLM calls the matrices that it holds as one, and the places of their parts.
_FUSED = {
  "q_proj": ("qkv_proj", 0),
  "k_proj": ("qkv_proj", 1),
  "v_proj": ("qkv_proj", 2),
  "gate_proj": ("gate_up_proj", 0),
  "up_proj": ("gate_up_proj", 1),
}
_PADDED = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS = 64  # vLLM pads the vocabulary with zeros to a multiple of this
_NOTHING = hashlib.sha256(b"").hexdigest()


def digests_of(folder: str, dtype: str) -> dict[str, str]:
  """What `VllmServer.digests` says of a model folder that is served in `dtype`."""
  parts: dict[str, list[tuple[int, str, Any]]] = {}
  with contextlib.ExitStack() as files:
    # --- Which tensors make up each of vLLM's, in which order.
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))):
      file = files.enter_context(safetensors.safe_open(path, framework="numpy"))
      for name in file.keys():  # noqa: SIM118 (it is no mapping)
        module, _, kind = name.rpartition(".")
        above, _, last = module.rpartition(".")
        fused, place = _FUSED.get(last, (last, 0))
        whole = ".".join(filter(None, (above, fused, kind)))
        parts.setdefault(whole, []).append((place, name, file))
    # --- Their bytes one after the other, a tensor in memory at a time.
    out = {}
    for whole, members in parts.items():
      sha256 = hashlib.sha256()
      for _, name, file in sorted(members, key=lambda m: m[0]):
        x = np.ascontiguousarray(file.get_tensor(name).astype(jnp.dtype(dtype)))
        sha256.update(x.view(np.uint8).data)
        if name in _PADDED:
          sha256.update(bytes(-len(x) % _ROWS * math.prod(x.shape[1:]) * x.itemsize))
      out[whole] = sha256.hexdigest()
  return out


def compare_digests(
  url: str, found: Mapping[str, str], folder: str, dtype: str, tied: bool
) -> None:
  """Refuses a server that holds other weights.

  Args:
    url: where it is, for the message.
    found: what `VllmServer.digests` says.
    folder: of the model that it was to load.
    dtype: in which it holds tensors.
    tied: whether the embedding is the output matrix, too.

  Raises:
    VllmError: tensors differ, or that can not be known.
  """
  expected = digests_of(folder, dtype)
  # Matrices that were packed show no bytes; `score` has to prove those.
  hidden = {name for name, sha256 in found.items() if sha256 == _NOTHING}
  if hidden and tied:
    raise VllmError(
      f"{url} packs its matrices out of sight, as vLLM does on a CPU. "
      "vLLM 0.32 then keeps the old output matrix of tied embeddings at a reload: "
      "serve from a GPU, or a model with tie_embeddings=False"
    )
  # --- Tensors that differ, are missing, or that the folder has not.
  wrong = found.keys() - expected.keys()
  for name, sha256 in expected.items():
    if name not in hidden and found.get(name) != sha256:
      wrong.add(name)
  if wrong or len(hidden) == len(found):
    raise VllmError(
      f"{url} does not serve the weights in {folder} ({len(wrong)} of "
      f"{len(expected)} tensors differ: {', '.join(sorted(wrong)[:3])}...). It must "
      "see that folder under the same name and have been started from a model of the "
      "same architecture, without quantization"
    )


def score(
  model: ModelConfig, partitioner: Partitioner | None, view: Any, ids: Sequence[int]
) -> np.ndarray:
  """Log-probs (nats, temperature 1) of at most `PROBE` ids but the first.

  Args:
    model: the architecture.
    partitioner: of the view.
    view: the weights as decoding wants them.
    ids: the row.
  """
  # Of one length for every row: one program is compiled.
  tokens_BT = np.zeros((1, PROBE), np.int32)
  tokens_BT[:, : len(ids)] = ids
  segment_BT = np.zeros_like(tokens_BT)
  segment_BT[:, : len(ids)] = 1
  logp_BT = _token_logps(model, partitioner, view, tokens_BT, segment_BT)
  return np.asarray(logp_BT)[0, : len(ids) - 1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _token_logps(
  cfg: ModelConfig,
  partitioner: Partitioner | None,
  params: Any,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
) -> jax.Array:
  """Log p of the token after each place, at temperature 1."""
  model = Transformer(cfg, partitioner, decode=True)
  position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  hidden_BTD, _ = model.apply({"params": params}, tokens_BT, position_BT, segment_BT)
  logits_BTV = model.apply({"params": params}, hidden_BTD, method="logits")
  logp_BTV = distribution.log_probs(logits_BTV, 1.0)
  # What the roll brings to the end is no next token; `score` leaves it out.
  next_BT1 = jnp.roll(tokens_BT, -1, axis=1)[..., None]
  return jnp.take_along_axis(logp_BTV, next_BT1, axis=-1)[..., 0]
