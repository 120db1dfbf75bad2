"""The GPU's attention kernel for long rows: interpreted, and lowered for CUDA."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.model import attention
from coa_jax.model.kernels import triton


def packed(T: int, S: int, dtype=jnp.float32):
  """Queries of the last T of S places, keys, values, segments; two rows."""
  keys = jax.random.split(jax.random.key(T), 3)
  q = jax.random.normal(keys[0], (2, T, 4, 32), dtype)
  k, v = (jax.random.normal(key, (2, S, 2, 32), dtype) for key in keys[1:])
  segment = np.sort(np.random.default_rng(S).integers(0, 4, (2, S)), axis=1)[:, ::-1]
  return q, k, v, jnp.asarray(segment.copy())


@pytest.mark.parametrize(("T", "S"), [(256, 256), (128, 256)])
def test_values_and_gradients_are_those_of_the_other_kernels(T: int, S: int):
  q, k, v, segment = packed(T, S)
  weight = jnp.cos(jnp.arange(q.size)).reshape(q.shape)

  def both(attend):
    def total(q, k, v, segment):
      out = attend(q, k, v, segment)
      return jnp.sum(out * weight), out

    value = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, out), gradients = value(q, k, v, segment)
    return out, *gradients

  ours = both(lambda *x: triton.attend_segments(*x, "out", interpret=True))
  theirs = both(lambda *x: attention._xla(*x))
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def lowered(policy, T: int = 256) -> str:
  """Two scanned layers and their gradients, for CUDA, as text."""
  q, k, v, segment = packed(T, T, jnp.bfloat16)

  def total(q, k, v, segment):
    def layer(q, _):
      return q + attention._triton(q, k, v, segment), None

    out, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), q, length=2)
    return out.astype(jnp.float32).sum()

  gradients = jax.jit(jax.grad(total, (0, 1, 2)))
  checks = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
  export = jax.export.export(gradients, platforms=["cuda"], disabled_checks=checks)
  return export(q, k, v, segment).mlir_module()


def kernels(text: str) -> list[str]:
  """The names of the kernels that a program calls, forward or backward, sorted."""
  return sorted(re.findall(r'name = "(mha_forward|mha_backward)"', text))


@pytest.mark.usefixtures("gpu_described")
def test_no_array_of_queries_by_keys():
  text = lowered(None)
  assert kernels(text) == ["mha_backward", "mha_forward", "mha_forward"]
  assert not re.search(r"tensor<(\d+x)*256x256x", text)


@pytest.mark.usefixtures("gpu_described")
def test_what_a_checkpoint_keeps_spares_the_second_forward_kernel():
  keep = jax.checkpoint_policies.save_only_these_names(attention.OUT)
  assert kernels(lowered(keep)) == ["mha_backward", "mha_forward"]
