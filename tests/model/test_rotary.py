"""Rotary frequencies against exact values, computed with 50 digits."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest

from coa_jax.model.config import Llama3Rope, ModelConfig, Yarn
from coa_jax.model.hf.config import to_hf_config
from coa_jax.model.rotary import frequencies

torch = pytest.importorskip("torch")

from transformers import AutoConfig  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

# Head sizes of published models; for 80 and 96, 1 / H is not a power of two.
HEAD_DIMS = (16, 64, 80, 96, 128, 256)
THETAS = (1e3, 1e4, 12_345.6, 1e6, 5e6)
SCALINGS = (
  {},
  {"yarn": Yarn(4.0, 32_768)},
  {"yarn": Yarn(8.5, 4096)},
  {"yarn": Yarn(3.0, 40_960, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3)},
  {"yarn": Yarn(2.0, 8192, truncate=False)},
  {"llama3": Llama3Rope(8.0, 8192, 1.0, 4.0)},
  {"llama3": Llama3Rope(32.0, 4096, 0.7, 3.3)},
)


def exact(cfg: ModelConfig) -> list[mpmath.mpf]:
  """The frequencies as the papers define them."""
  half = cfg.head_dim // 2
  theta = mpmath.mpf(cfg.rope_theta)
  plain = [theta ** (-mpmath.mpf(i) / half) for i in range(half)]
  if cfg.llama3:
    return [f * llama3_slowing(f, cfg.llama3) for f in plain]
  if cfg.yarn is None:
    return plain
  y = cfg.yarn
  bounds = [
    half * mpmath.log(y.positions / (turns * 2 * mpmath.pi)) / mpmath.log(theta)
    for turns in (y.beta_fast, y.beta_slow)
  ]
  if y.truncate:
    bounds = [mpmath.floor(bounds[0]), mpmath.ceil(bounds[1])]
  low = max(bounds[0], 0)
  high = min(bounds[1], cfg.head_dim - 1)
  ramps = [min(max((i - low) / (high - low), 0), 1) for i in range(half)]
  return [f * (1 - r) + f / y.factor * r for f, r in zip(plain, ramps, strict=True)]


def llama3_slowing(frequency: mpmath.mpf, rope: Llama3Rope) -> mpmath.mpf:
  """The factor by wavelength, in the three cases of Llama 3.1's reference code."""
  wavelength = 2 * mpmath.pi / frequency
  if wavelength < mpmath.mpf(rope.positions) / rope.high_freq_factor:
    return mpmath.mpf(1)
  if wavelength > mpmath.mpf(rope.positions) / rope.low_freq_factor:
    return 1 / mpmath.mpf(rope.factor)
  low, high = mpmath.mpf(rope.low_freq_factor), mpmath.mpf(rope.high_freq_factor)
  smooth = (rope.positions / wavelength - low) / (high - low)
  return (1 - smooth) / rope.factor + smooth


def errors(found: np.ndarray, truth: list[mpmath.mpf]) -> np.ndarray:
  """Relative errors."""
  pairs = zip(found.tolist(), truth, strict=True)
  return np.array([float(abs(f - t) / t) for f, t in pairs])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_each_frequency_is_as_near_to_the_exact_one_as_hugging_faces(scaling):
  for head_dim, theta in itertools.product(HEAD_DIMS, THETAS):
    cfg = ModelConfig(vocab_size=131, head_dim=head_dim, rope_theta=theta, **scaling)
    found, scale = frequencies(cfg)
    config = AutoConfig.for_model(**to_hf_config(cfg))
    theirs = modeling_qwen3.Qwen3RotaryEmbedding(config)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)
    with mpmath.workdps(50):
      truth = exact(cfg)
      ours = errors(found, truth)
      assert found.dtype == np.float32
      assert (ours <= errors(theirs.inv_freq.numpy(), truth)).all(), (head_dim, theta)
      assert ours.max() <= 2**-24  # half of the last of float32's 24 bits
