"""Lookups and broadcasts whose gradients are summed in float32.

In half precision the sum over a batch of a frequent token's gradients, or a bias's,
stops growing after some 256 addends.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def lookup(embed_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  """Looks up rows [B, T, D] in an embedding."""
  if embed_VD.dtype == jnp.float32:
    return jnp.take(embed_VD, token_BT, axis=0)
  return _lookup(embed_VD, token_BT, embed_VD.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _lookup(embed_VD: jax.Array, token_BT: jax.Array, V: int) -> jax.Array:
  del V  # the gradient's size
  return jnp.take(embed_VD, token_BT, axis=0)


def _lookup_forward(embed_VD, token_BT, V):
  return _lookup(embed_VD, token_BT, V), token_BT


def _lookup_backward(V, token_BT, gradient_BTD):
  zeros_VD = jnp.zeros((V, gradient_BTD.shape[-1]), jnp.float32)
  sum_VD = zeros_VD.at[token_BT].add(gradient_BTD.astype(jnp.float32))
  return sum_VD.astype(gradient_BTD.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def spread(w: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Broadcasts a bias or scale to a shape with further axes in front."""
  return w if w.dtype == jnp.float32 else _spread(w, shape, w.ndim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _spread(w: jax.Array, shape: tuple[int, ...], ndim: int) -> jax.Array:
  del ndim  # the gradient's
  return jnp.broadcast_to(w, shape)


def _spread_forward(w, shape, ndim):
  return _spread(w, shape, ndim), None


def _spread_backward(shape, ndim, _, gradient):
  axes = tuple(range(len(shape) - ndim))
  return (gradient.sum(axes, dtype=jnp.float32).astype(gradient.dtype),)


_spread.defvjp(_spread_forward, _spread_backward)
