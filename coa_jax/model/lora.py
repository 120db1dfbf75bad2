"""LoRA: low-rank adapters beside frozen matrices (arXiv 2106.09685).

Adapters are separate arrays: `q_a` [inputs, r] and `q_b` [r, outputs] beside `q`. The
model adds x A B if its parameters hold adapters (`join`); `merge` folds them into the
matrices for decoding and export; `hf.folder.save_adapter` writes them as peft does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import ONE_DEVICE, PARAMETERS, Partitioner, inputs_of
from coa_jax.model.transformer import param_shapes
from coa_jax.runtime.fields import bounded, check_fields

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
# Linear-attention layers.
MATRICES += ("delta_qkv", "delta_gate", "delta_write", "delta_rate", "delta_out")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Config section `lora`; without it all parameters are trained.

  With model.dtype or model.param_dtype "bfloat16" the decoder's matrix is rounded after
  its adapter is added: changes below half a last place are partly lost, but the learner
  computes with them. For RL at small learning rates prefer float32.

  Attributes:
    rank: r, for every adapter.
    alpha: adapters count alpha / r times.
    matrices: the matrices with adapters; a layer skips the names that its kind lacks.
  """

  rank: int = bounded(16, least=1)
  alpha: float = 32.0
  matrices: tuple[str, ...] = MATRICES

  def __post_init__(self):
    check_fields(self)
    for name in self.matrices:
      if name not in MATRICES:
        raise ValueError(f"matrices has {name!r}; there are {', '.join(MATRICES)}")
    if not self.matrices:
      raise ValueError(f"matrices is empty; there are {', '.join(MATRICES)}")


def check(cfg: ModelConfig, config: LoraConfig | None) -> None:
  """Refuses adapters that the model can not use.

  Raises:
    ValueError: with `weight_dtype` a decoder would round a matrix with its adapter, and
      training without it; the rank exceeds the largest useful one, and the message
      names both; or no layer has any of the matrices.
  """
  if config is None:
    return
  if cfg.weight_dtype:
    raise ValueError(
      f"section lora does not go with model.weight_dtype={cfg.weight_dtype!r}; set it "
      "to '' (matrices are then as precise as model.dtype)"
    )
  if not _matrices(cfg, config):
    raise ValueError(
      f"lora.matrices: the model's layers have none of {', '.join(config.matrices)}"
    )
  most = 0
  for where, leaf in _matrices(cfg, config):
    _, inputs, outputs = _split_shape(where[-1], leaf.shape)
    most = max(most, min(math.prod(inputs), math.prod(outputs)))
  if config.rank > most:
    raise ValueError(
      f"lora.rank is {config.rank}; an adapter of more than {most}, the rank of the "
      "model's largest matrix, would add nothing"
    )


def init_adapters(
  cfg: ModelConfig,
  config: LoraConfig,
  seed: int,
  partitioner: Partitioner = ONE_DEVICE,
) -> dict[str, Any]:
  """Draws fresh adapters in float32: A random, B zero, so that the model is unchanged.

  Returns:
    A tree like the parameters', with `q_a` and `q_b` in place of `q`, ...
  """

  def init(key: jax.Array) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for i, (path, leaf) in enumerate(_matrices(cfg, config)):
      *parents, name = path
      stacked, inputs, outputs = _split_shape(name, leaf.shape)
      # Keyed by the index in the list, so that every matrix has another A.
      normal = jax.random.normal(
        jax.random.fold_in(key, i), (*stacked, *inputs, config.rank)
      )
      std = math.prod(inputs) ** -0.5
      parent = out
      for where in parents:
        parent = parent.setdefault(where, {})
      parent[f"{name}_a"] = std * normal
      parent[f"{name}_b"] = jnp.zeros((*stacked, config.rank, *outputs))
    return out

  key = jax.random.key(seed)
  shardings = partitioner.out_shardings(jax.eval_shape(init, key))
  return jax.jit(init, out_shardings=shardings)(key)


def _matrices(cfg: ModelConfig, config: LoraConfig) -> list[tuple[list[str], Any]]:
  """Lists the adapted matrices: their keys in the parameter tree, and shapes."""
  out = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(cfg)):
    where = [key.key for key in path]
    if where[-1] in config.matrices:
      out.append((where, leaf))
  return out


def _rank(name: str) -> int:
  """Counts a parameter's axes, without a stacked layer axis."""
  return len(PARAMETERS[name].replace(">", ""))


def _split_shape(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
  """Splits a matrix's shape into stacked layers, inputs and outputs."""
  stacked = len(shape) - _rank(name)
  split = stacked + inputs_of(name)
  return shape[:stacked], shape[stacked:split], shape[split:]


def join(params: dict[str, Any], adapters: dict[str, Any], config: LoraConfig) -> Any:
  """Puts scaled adapters beside their matrices; inside a jit."""
  scale = config.alpha / config.rank
  out = dict(params)
  for key, x in adapters.items():
    if isinstance(x, dict):
      out[key] = join(params[key], x, config)
    else:
      # Only one half is scaled: the product has the scale once.
      out[key] = x * scale if key.endswith("_b") else x
  return out


def split(
  cfg: ModelConfig,
  params: Any,
  config: LoraConfig | None,
  seed: int,
  partitioner: Partitioner = ONE_DEVICE,
) -> tuple[Any, Any]:
  """Splits into trained and frozen parts: (adapters, params), or (params, None)."""
  if config is None:
    return params, None
  return init_adapters(cfg, config, seed, partitioner), params


def assemble(trained: Any, frozen: Any, config: LoraConfig | None) -> Any:
  """Joins `split`'s halves to parameters for training; inside a jit."""
  return join(frozen, trained, config) if config else trained


def merged(trained: Any, frozen: Any, config: LoraConfig | None) -> Any:
  """Joins `split`'s halves to parameters for decoding and export."""
  return merge(frozen, trained, config) if config else trained


@functools.partial(jax.jit, static_argnames="config")
def merge(params: dict[str, Any], adapters: dict[str, Any], config: LoraConfig) -> Any:
  """Folds adapters into their matrices."""
  return _merged(params, join(params, adapters, config), adapters)


def _merged(
  params: dict[str, Any], joined: dict[str, Any], adapters: dict[str, Any]
) -> dict[str, Any]:
  """Returns a subtree's parameters with `joined`'s adapters folded in."""
  out = dict(params)
  for key, x in adapters.items():
    if isinstance(x, dict):
      out[key] = _merged(params[key], joined[key], x)
  # Sorted, so that every process compiles the same program.
  for name in sorted({k[:-2] for k, x in adapters.items() if not isinstance(x, dict)}):
    w = params[name]
    outer = functools.partial(jnp.tensordot, axes=1)
    if w.ndim > _rank(name):  # stacked layers
      outer = jax.vmap(outer)
    # In float32, so that only the sum is rounded.
    change = outer(joined[f"{name}_a"], joined[f"{name}_b"])
    out[name] = (w.astype(jnp.float32) + change).astype(w.dtype)
  return out
