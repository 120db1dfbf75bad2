"""The token mixer of linear attention: Qwen3.5's gated delta network.

Queries, keys and values pass a short causal convolution, then the gated delta rule
(`kernels.delta_rule`); a norm gated by another projection follows. A sequence is
remembered as a constant-size state and the convolution's last inputs.

Source: transformers `models/qwen3_5`. Letters: Y key heads, Z value heads, M units per
key, U units per value, E channels per key head (its query, key and value heads), W
convolution taps.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from coa_jax.model.float32_sums import spread
from coa_jax.model.kernels import delta_rule
from coa_jax.model.kernels.delta_rule import Tokens
from coa_jax.model.sharding import Partitioner


def mix(
  layer: nn.Module,
  h_BTD: jax.Array,
  segment_BT: jax.Array | None,
  state: tuple[jax.Array, jax.Array] | None = None,
  valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
  """Mixes tokens in packed rows, or tokens that continue one sequence per row.

  Args:
    layer: the `transformer.Layer` with the parameters.
    h_BTD: inputs.
    segment_BT: for packed rows: each token's segment; segments start from zeros.
    state: to continue: the rows' state_BZMU and the convolution's last inputs_BWYE.
    valid_BT: to continue: True for real tokens, which come first in a row.

  Returns:
    out_BTD, and the state after the valid tokens (None for packed rows).
  """
  c, d = layer.cfg, layer.cfg.delta
  D, Y, Z, M, U = c.width, d.key_heads, d.value_heads, d.key_dim, d.value_dim

  # --- Projections: the rule's inputs, and the output's gate.
  qkv_BTYE = layer.dense(h_BTD, "delta_qkv", (D, Y, d.channels))
  qkv_BTYE = layer.partitioner.shard(qkv_BTYE, "BTY.")
  gate_BTZU = layer.dense(h_BTD, "delta_gate", (D, Z, U))
  write_BTZ = jax.nn.sigmoid(layer.dense(h_BTD, "delta_write", (D, Z)))
  rate_BTZ = layer.dense(h_BTD, "delta_rate", (D, Z)).astype(jnp.float32)
  bias_Z = layer.vector("delta_rate_bias", (Z,), nn.initializers.ones)
  log_Z = layer.vector("delta_decay_log", (Z,), _decay_init)
  taps_init = nn.initializers.normal(d.conv**-0.5)
  taps_YEW = layer.vector("delta_conv", (Y, d.channels, d.conv), taps_init)
  decay_BTZ = -jnp.exp(log_Z.astype(jnp.float32)) * jax.nn.softplus(
    rate_BTZ + bias_Z.astype(jnp.float32)
  )
  write_BTZ = write_BTZ.astype(jnp.float32)

  # --- The convolution, over the row's own earlier inputs.
  if state is None:
    before_BWYE = jnp.zeros((qkv_BTYE.shape[0], d.conv - 1, *qkv_BTYE.shape[2:]))
    before_BWYE = before_BWYE.astype(qkv_BTYE.dtype)
    mixed_BTYE = _convolved(qkv_BTYE, before_BWYE, taps_YEW, segment_BT)
  else:
    state_BZMU, before_BWYE = state
    mixed_BTYE = _convolved(qkv_BTYE, before_BWYE, taps_YEW)
    valid_BT1 = valid_BT[..., None]
    write_BTZ = jnp.where(valid_BT1, write_BTZ, 0)
    decay_BTZ = jnp.where(valid_BT1, decay_BTZ, 0)
    segment_BT = jnp.zeros(qkv_BTYE.shape[:2], jnp.int32)
  q_BTYM, k_BTYM, v_BTYU = jnp.split(mixed_BTYE, [M, 2 * M], axis=-1)
  v_BTZU = v_BTYU.reshape(*v_BTYU.shape[:2], Z, U)
  tokens = Tokens(
    _unit(q_BTYM), _unit(k_BTYM), v_BTZU, write_BTZ, decay_BTZ, segment_BT
  )

  # --- The rule.
  if state is None:
    out_BTZU = _from_zero(tokens, layer.partitioner)
  else:
    out_BTZU, state_BZMU = _from_state(tokens, state_BZMU, layer.partitioner)
    state = state_BZMU, _last_inputs(qkv_BTYE, before_BWYE, valid_BT)

  # --- A gated norm per head; `norm_offset` does not apply to its scale.
  scale_U = layer.vector("delta_norm", (U,), nn.initializers.ones)
  y = out_BTZU * jax.lax.rsqrt(
    jnp.mean(out_BTZU * out_BTZU, axis=-1, keepdims=True) + c.norm_eps
  )
  y = (y.astype(c.dtype) * spread(scale_U, y.shape)).astype(jnp.float32)
  y *= nn.silu(gate_BTZU.astype(jnp.float32))
  out_BTZU = layer.partitioner.shard(y.astype(c.dtype), "BTZ.")
  return layer.dense(out_BTZU, "delta_out", (Z, U, D)), state


def _decay_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Draws log decay rates: rates are uniform in (0.01, 16), as in transformers."""
  return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def _unit(x: jax.Array) -> jax.Array:
  """Scales the last axis to unit length, in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _convolved(
  x_BTYE: jax.Array,
  before_BWYE: jax.Array,
  taps_YEW: jax.Array,
  segment_BT: jax.Array | None = None,
) -> jax.Array:
  """Applies a causal convolution per channel, then SiLU; other segments read as 0.

  Args:
    before_BWYE: the W - 1 inputs before them.
    taps_YEW: weights; the last tap is for the token itself.
    segment_BT: the tokens' segments; None if each row has one segment.
  """
  T, W = x_BTYE.shape[1], taps_YEW.shape[-1]
  all_BSYE = jnp.concatenate([before_BWYE, x_BTYE], axis=1)
  if segment_BT is not None:
    all_BS = jnp.pad(segment_BT, ((0, 0), (W - 1, 0)), constant_values=-1)
  out_BTYE = jnp.zeros(x_BTYE.shape, jnp.float32)
  for w in range(W):
    part = all_BSYE[:, w : w + T].astype(jnp.float32)
    if segment_BT is not None:
      same_BT = all_BS[:, w : w + T] == segment_BT
      part = jnp.where(same_BT[..., None, None], part, 0)
    out_BTYE += part * taps_YEW[..., w].astype(jnp.float32)
  return nn.silu(out_BTYE).astype(x_BTYE.dtype)


def _last_inputs(
  x_BTYE: jax.Array, before_BWYE: jax.Array, valid_BT: jax.Array
) -> jax.Array:
  """Returns the convolution's last W - 1 inputs up to each row's last valid token."""
  all_BSYE = jnp.concatenate([before_BWYE, x_BTYE], axis=1)
  first_B1 = valid_BT.sum(1, keepdims=True)  # valid tokens come first
  place_BW = first_B1 + jnp.arange(before_BWYE.shape[1])
  return jnp.take_along_axis(all_BSYE, place_BW[..., None, None], axis=1)


def _from_zero(tokens: Tokens, partitioner: Partitioner) -> jax.Array:
  """Applies the rule to packed rows: every segment starts with a zero state."""
  (B, _, Z, U), M = tokens.v_BTZU.shape, tokens.k_BTYM.shape[-1]
  state_BZMU = jnp.zeros((B, Z, M, U), jnp.float32)
  return _over_devices(tokens, state_BZMU, partitioner)[0]


def _from_state(
  tokens: Tokens, state_BZMU: jax.Array, partitioner: Partitioner
) -> tuple[jax.Array, jax.Array]:
  """Applies the rule to a call's tokens, one segment per row."""
  if tokens.v_BTZU.shape[1] == 1:
    return delta_rule.one_token(tokens, state_BZMU)
  return _over_devices(tokens, state_BZMU, partitioner)


def _over_devices(
  tokens: Tokens, state_BZMU: jax.Array, partitioner: Partitioner
) -> tuple[jax.Array, jax.Array]:
  """Runs the chunks on each device's own rows and heads; XLA need not find a split."""

  def on_device(tokens: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    return delta_rule.many_tokens(tokens, state, tokens.segment_BT[:, 0])

  if partitioner.is_default:
    return on_device(tokens, state_BZMU)
  spec = partitioner.spec
  of_tokens = Tokens(
    spec("BTY."), spec("BTY."), spec("BTZ."), spec("BTZ"), spec("BTZ"), spec("BT")
  )
  return jax.shard_map(
    on_device,
    mesh=partitioner.mesh,
    in_specs=(of_tokens, spec("BZ..")),
    out_specs=(spec("BTZ."), spec("BZ..")),
    check_vma=False,
  )(tokens, state_BZMU)
