"""Attention over packed training rows; softmax in float32.

Four kernels: plain XLA products, cuDNN's flash attention, a Triton kernel, and the
TPU's splash attention. Devices may split a row (context parallelism). Decoding attends
over a cache instead; see `cache.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model.config import ModelConfig
from coa_jax.model.kernels import blockwise, splash, triton
from coa_jax.model.kernels.blockwise import OUT
from coa_jax.model.moving import straight
from coa_jax.model.sharding import ONE_DEVICE, Partitioner

# Maximum row length, in tokens, for which `auto` takes cuDNN. cuDNN reads a queries x
# keys mask and writes two more such arrays in bfloat16: 84 MB per row at this length.
_CUDNN_UP_TO = 4096


def attend_packed(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_BT: jax.Array,
  kernel: str = "auto",
  partitioner: Partitioner = ONE_DEVICE,
) -> jax.Array:
  """Computes causal attention inside the segments of packed rows, in q's dtype.

  Args:
    segment_BT: int segment number per token; 0 is padding, which reads padding. A
      segment's tokens are contiguous.
    kernel: a kernel name; see `RunOptions.attention`.
    partitioner: the arrays' mesh. If the mesh splits rows, tokens are in
      `moving.zigzag` order, and each device's queries read all earlier keys and values,
      gathered once (Llama 3, arXiv 2407.21783, section 3.3.2).
  """
  # --- The kernel.
  row_devices = partitioner.ways("T")
  _, T, N, H = q_BTNH.shape
  if kernel == "auto":
    kernel = choose(partitioner.devices[0], q_BTNH.dtype, H, _queries(partitioner, T))
  attend_last = _KERNELS[kernel]
  if partitioner.is_default:
    return attend_last(q_BTNH, k_BTKH, v_BTKH, segment_BT)

  # --- On a mesh each device runs the kernel on its own rows and heads.
  kv_spec = partitioner.spec("BTK.")
  if partitioner.axes("N") != partitioner.axes("K"):
    # Every query head gets its own kv head: groups may cross devices.
    groups = N // k_BTKH.shape[2]
    k_BTKH = jnp.repeat(k_BTKH, groups, axis=2)
    v_BTKH = jnp.repeat(v_BTKH, groups, axis=2)
    kv_spec = partitioner.spec("BTN.")
  if row_devices == 1:
    on_device = attend_last
  else:
    on_device = functools.partial(
      _attend_part, attend_last, partitioner.axes("T"), row_devices
    )
  return jax.shard_map(
    on_device,
    mesh=partitioner.mesh,
    in_specs=(partitioner.spec("BTN."), kv_spec, kv_spec, partitioner.spec("BT")),
    out_specs=partitioner.spec("BTN."),
    check_vma=False,
  )(q_BTNH, k_BTKH, v_BTKH, segment_BT)


def _attend_part(
  attend_last: Callable[..., jax.Array],
  context: tuple[str, ...],
  row_devices: int,
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  segment_BT: jax.Array,
) -> jax.Array:
  """Attends with one device's two row pieces, each to all keys up to the piece's end.

  Args:
    attend_last: the kernel; its T queries are at the last T of S places.
    context: mesh axes splitting a row.
    q_BTNH: this device's queries, in `moving.zigzag` order.
  """

  # --- Gather the whole row's keys and values in token order; queries do not move.
  def whole_row(x: jax.Array) -> jax.Array:
    x = jax.lax.all_gather(x, context, axis=1, tiled=True)
    return straight(x, row_devices)

  k_BSKH = whole_row(k_BTKH)
  v_BSKH = whole_row(v_BTKH)
  segment_BS = whole_row(segment_BT)
  C = q_BTNH.shape[1] // 2

  # --- One program for all devices, each with its own branch and sizes.
  def branch(device: int) -> Callable[..., jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array) -> jax.Array:
      front = (device + 1) * C
      back = (2 * row_devices - device) * C
      return jnp.concatenate(
        [
          attend_last(q[:, :C], k[:, :front], v[:, :front], s[:, :front]),
          attend_last(q[:, C:], k[:, :back], v[:, :back], s[:, :back]),
        ],
        axis=1,
      )

    return attend

  branches = [branch(i) for i in range(row_devices)]
  device = jax.lax.axis_index(context)
  return jax.lax.switch(device, branches, q_BTNH, k_BSKH, v_BSKH, segment_BS)


def choose(device: jax.Device, dtype: jnp.dtype, head_dim: int, length: int) -> str:
  """Chooses the kernel for `auto`.

  Args:
    length: queries per kernel call; see `_queries`.
  """
  on_gpu = "cudnn" if length <= _CUDNN_UP_TO else "triton"
  for kernel in ("splash", on_gpu):
    if not _fault(kernel, device, dtype, head_dim, length):
      return kernel
  return "xla"


def check(
  cfg: ModelConfig, partitioner: Partitioner = ONE_DEVICE, length: int = 0
) -> None:
  """Refuses an attention kernel that cannot run on the current devices.

  Args:
    length: tokens per row; 0 if not known yet.

  Raises:
    ValueError: the kernel cannot run; the message names `model.attention`, the missing
      requirement and the possible kernels.
  """
  if cfg.attention in ("auto", "xla"):
    return
  device = partitioner.devices[0]
  queries = _queries(partitioner, length)
  fault = _fault(cfg.attention, device, jnp.dtype(cfg.dtype), cfg.head_dim, queries)
  if fault:
    best = choose(device, jnp.dtype(cfg.dtype), cfg.head_dim, queries)
    possible = ", ".join(sorted({"auto", "xla", best}))
    raise ValueError(
      f"model.attention={cfg.attention!r} needs {fault}; possible here: {possible}"
    )


def _queries(partitioner: Partitioner, T: int) -> int:
  """Counts the queries in one kernel call on a device, for rows with T tokens."""
  row_devices = partitioner.ways("T")
  # Devices splitting a row have two pieces each, with one call per piece.
  return T // (2 * row_devices) if row_devices > 1 else T


def _fault(
  kernel: str, device: jax.Device, dtype: jnp.dtype, head_dim: int, length: int
) -> str:
  """Returns the kernel's missing requirement; "" if the kernel can run."""
  if kernel == "splash":
    if device.platform != "tpu":
      return f"a TPU, not a {device.platform.upper()}"
    if length % 128:
      return (
        f"a multiple of 128 tokens in a row or a device's piece of one, not {length}"
      )
    return ""
  if device.platform != "gpu":
    return f"a GPU, not a {device.platform.upper()}"
  if dtype != jnp.bfloat16:
    return f"model.dtype='bfloat16', not {str(dtype)!r}"
  if kernel == "triton":
    if head_dim not in (16, 32, 64, 128):
      return f"model.head_dim 16, 32, 64 or 128, not {head_dim}"
    if length % 128:
      return f"rows of a multiple of 128 tokens on every device, not {length}"
    return ""
  # JAX makes the same check, but only during compilation.
  major = int(str(getattr(device, "compute_capability", "0")).split(".")[0])
  most = 256 if major >= 9 else 128
  if head_dim % 8 or head_dim > most:
    return f"model.head_dim a multiple of 8 and at most {most}, not {head_dim}"
  if length % 2:
    return f"rows of an even number of tokens, not {length}"
  return ""


def _visible(segment_BS: jax.Array, T: int) -> jax.Array:
  """Returns mask_BTS for queries at the last T of S places: True if t reads s."""
  S = segment_BS.shape[1]
  segment_BT = segment_BS[:, S - T :]
  place_T = jnp.arange(S - T, S)
  place_S = jnp.arange(S)
  mask_TS = place_S <= place_T[:, None]
  return mask_TS & (segment_BT[:, :, None] == segment_BS[:, None, :])


def _cudnn(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segment_BS: jax.Array,
) -> jax.Array:
  """Attends with cuDNN's flash attention; segments become a mask, B x T x S bytes."""
  mask_BTS = _visible(segment_BS, q_BTNH.shape[1])
  out_BTNH = jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], implementation="cudnn"
  )
  return checkpoint_name(out_BTNH, OUT)


_KERNELS = {
  "xla": blockwise.attend_segments,
  "cudnn": _cudnn,
  "triton": triton.attend_segments,
  "splash": splash.attend_segments,
}
