"""Attention over packed rows against its definition, and the choice of kernel."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from coa_jax.model import attention


def heads(seed: int, B: int, T: int, N: int, K: int, H: int):
  keys = jax.random.split(jax.random.key(seed), 3)
  q_BTNH = jax.random.normal(keys[0], (B, T, N, H))
  k_BTKH = jax.random.normal(keys[1], (B, T, K, H))
  v_BTKH = jax.random.normal(keys[2], (B, T, K, H))
  return q_BTNH, k_BTKH, v_BTKH


def by_definition(q_BTNH, k_BTKH, v_BTKH, mask_BTS) -> np.ndarray:
  """Each head separately, in float64; query head n reads kv head n // (N // K)."""
  q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BTKH, v_BTKH))
  B, _, N, H = q.shape
  out = np.zeros_like(q)
  for b in range(B):
    for n in range(N):
      kv = n // (N // k.shape[2])
      score_TS = q[b, :, n] @ k[b, :, kv].T / np.sqrt(H)
      score_TS = np.where(mask_BTS[b], score_TS, -np.inf)
      p_TS = np.exp(score_TS - score_TS.max(-1, keepdims=True))
      out[b, :, n] = p_TS / p_TS.sum(-1, keepdims=True) @ v[b, :, kv]
  return out


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 63, 64, 65, 600])
def test_blocks_of_a_packed_row_are_one_attention(T: int):
  q, k, v = heads(1, 2, T, 2, 1, 4)
  rng = np.random.default_rng(0)
  segment_BT = np.sort(rng.integers(1, 4, (2, T)), axis=1)
  segment_BT[1, T - T // 3 :] = 0
  out = attention.attend_packed(q, k, v, jnp.asarray(segment_BT))
  mask = np.tril(segment_BT[:, :, None] == segment_BT[:, None, :])
  np.testing.assert_allclose(out, by_definition(q, k, v, mask), atol=2e-6)


def device(platform: str, capability: str = "9.0"):
  return types.SimpleNamespace(platform=platform, compute_capability=capability)


HALF, FULL = jnp.dtype("bfloat16"), jnp.dtype("float32")


@pytest.mark.parametrize(
  ("where", "dtype", "H", "T", "kernel"),
  [
    (device("cpu"), HALF, 64, 128, "xla"),
    (device("gpu"), HALF, 64, 126, "cudnn"),
    (device("gpu"), FULL, 64, 128, "xla"),
    (device("gpu"), HALF, 64, 127, "xla"),
    (device("gpu"), HALF, 20, 128, "xla"),
    (device("gpu"), HALF, 256, 128, "cudnn"),
    (device("gpu", "8.0"), HALF, 256, 128, "xla"),
    (device("gpu"), HALF, 64, 4096, "cudnn"),
    (device("gpu"), HALF, 64, 4224, "triton"),
    (device("gpu"), HALF, 64, 4226, "xla"),
    (device("gpu"), HALF, 256, 8192, "xla"),
    (device("gpu"), FULL, 64, 8192, "xla"),
    (device("tpu"), FULL, 64, 256, "splash"),
    (device("tpu"), FULL, 64, 100, "xla"),
  ],
)
def test_auto_takes_a_kernel_that_runs(where, dtype, H: int, T: int, kernel: str):
  assert attention.choose(where, dtype, H, T) == kernel


@pytest.mark.parametrize(
  ("where", "changes", "length", "message"),
  [
    (
      "cpu",
      {"attention": "splash"},
      0,
      "='splash' needs a TPU, not a CPU; .*: auto, xla",
    ),
    (
      "cpu",
      {"attention": "cudnn"},
      0,
      "='cudnn' needs a GPU, not a CPU; .*: auto, xla",
    ),
    ("gpu", {"attention": "cudnn"}, 0, "needs model.dtype='bfloat16', not 'float32'"),
    (
      "gpu",
      {"attention": "cudnn", "dtype": "bfloat16", "head_dim": 20},
      0,
      "a multiple of 8 and at most 256, not 20",
    ),
    (
      "gpu",
      {"attention": "cudnn", "dtype": "bfloat16"},
      63,
      "an even number of tokens, not 63",
    ),
    (
      "cpu",
      {"attention": "triton"},
      0,
      "='triton' needs a GPU, not a CPU; .*: auto, xla",
    ),
    (
      "gpu",
      {"attention": "triton", "dtype": "bfloat16", "head_dim": 80},
      0,
      "model.head_dim 16, 32, 64 or 128, not 80",
    ),
    (
      "gpu",
      {"attention": "triton", "dtype": "bfloat16", "head_dim": 64},
      100,
      "a multiple of 128 tokens .* not 100",
    ),
    ("tpu", {"attention": "splash"}, 100, "a multiple of 128 tokens .* not 100"),
  ],
)
def test_a_kernel_that_can_not_run_is_refused(
  monkeypatch, where: str, changes, length: int, message: str
):
  monkeypatch.setattr(attention.Partitioner, "devices", [device(where)])
  cfg = dataclasses.replace(toy.MODEL, **changes)
  with pytest.raises(ValueError, match=f"model.attention{message}|{message}"):
    attention.check(cfg, length=length)
  attention.check(dataclasses.replace(cfg, attention="auto"), length=length)


@pytest.mark.usefixtures("gpu_described")
@pytest.mark.parametrize(
  ("where", "T", "calls"),
  [
    ("cpu", 256, set()),
    ("tpu", 256, {"tpu_custom_call"}),
    ("tpu", 100, set()),
    ("gpu", 256, {"__cudnn$fmhaScaleBiasSoftmax"}),
    ("gpu", 4224, {"__gpu$xla.gpu.triton"}),
    ("gpu", 4226, set()),
  ],
)
def test_auto_is_the_platforms_kernel_in_the_program(
  where: str, T: int, calls: set[str], monkeypatch
):
  """As docs/internals.md documents it; lowered for a platform without its device."""
  monkeypatch.setattr(attention.Partitioner, "devices", [device(where)])
  # The original asks the driver for its version.
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  x = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
  segment = jax.ShapeDtypeStruct((1, T), jnp.int32)
  names = ["__gpu$xla.gpu.triton", "tpu_custom_call", "__cudnn$fmhaScaleBiasSoftmax"]
  export = jax.export.export(
    # A new function each time: jit would reuse a trace for another platform.
    jax.jit(lambda *x: attention.attend_packed(*x)),
    platforms=[{"gpu": "cuda"}.get(where, where)],
    disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(n) for n in names],
  )
  text = export(x, x, x, segment).mlir_module()
  assert set(re.findall(r"custom_call @([^(]+)\(", text)) == calls
