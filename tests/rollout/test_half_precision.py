"""The cost of half precision: sampler log-probs compared with the learner's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from playing import contents, engine, play

from coa_jax.model import decode_params, sharding, transformer

CFG = toy.MODEL  # docs/rl.md reports its differences


@pytest.fixture(scope="module")
def novice() -> dict:
  """Like the `novice` fixture in `conftest.py`, with the layers of CFG."""
  return toy.actor(60).params


@pytest.fixture
def amx(monkeypatch) -> None:
  """Pretends that the CPU has AMX, and that the model is wide enough for it."""
  monkeypatch.setattr(decode_params, "has_amx", lambda: True)
  monkeypatch.setattr(decode_params, "WIDE", CFG.width)


def logp_diffs(cfg, params) -> np.ndarray:
  """|sampler log-prob - learner log-prob|, token by token."""
  # Enough trajectories to compare the means of two samples.
  played = play(params, range(48), on=engine(cfg))
  played = [played[n] for n in sorted(played)]
  theirs = np.concatenate(toy.logps_of(cfg, params, played, 1.0))
  return np.abs(np.concatenate([toy.sampled_logps(t) for t in played]) - theirs)


@pytest.mark.slow
def test_half_precision_weights_under_float32_activations_keep_the_agreement(novice):
  """With bfloat16 weights in the sampler, the learner rounds its master weights too."""
  cfg = dataclasses.replace(CFG, weight_dtype="bfloat16")
  assert logp_diffs(cfg, novice).max() <= 2e-5
  # Weights are rounded, and the gradient is that of the master weights.
  lists = list(play(novice, range(2)).values())
  rounded, exact = (toy.logps_of(c, novice, lists, 1.0) for c in (cfg, CFG))
  assert np.abs(rounded[0] - exact[0]).max() > 1e-4
  grads = [
    jax.grad(lambda w, c=c: jnp.sum(transformer.used(c, w) * 3.0))(novice["embed"])
    for c in (cfg, CFG)
  ]
  np.testing.assert_array_equal(*grads)


HALF = dataclasses.replace(CFG, dtype="bfloat16")


@pytest.fixture(scope="module")
def diffs_of_half(novice) -> dict[str, np.ndarray]:
  """`logp_diffs` of HALF by decoding dtype: a CPU decodes in float32."""
  out = {"float32": logp_diffs(HALF, novice)}
  with pytest.MonkeyPatch.context() as patch:
    # Devices other than CPUs decode in the model's dtype.
    patch.setattr(decode_params, "architecture", lambda cfg, partitioner: cfg)
    assert engine(HALF).model.dtype == "bfloat16"
    out["bfloat16"] = logp_diffs(HALF, novice)
  return out


@pytest.mark.slow
@pytest.mark.parametrize("decoded", ["float32", "bfloat16"])
def test_half_precision_activations_cost_agreement(diffs_of_half, decoded):
  """With `-s` it prints the half-precision figures for docs/rl.md."""
  logp_diff = diffs_of_half[decoded]
  print(
    f"decoded in {decoded}: difference of {logp_diff.size:,} tokens in nats: "
    f"mean {logp_diff.mean():.4f}, largest {logp_diff.max():.3f}"
  )
  assert 1e-3 < logp_diff.max() < 0.3 and logp_diff.mean() < 0.02


@pytest.mark.slow
def test_a_cpu_decodes_in_float32_with_the_same_weights_and_agrees_no_worse(
  novice, diffs_of_half
):
  decoder = engine(HALF).model
  assert (decoder.dtype, decoder.weight_dtype) == ("float32", "bfloat16")
  (view,), (before,) = (
    decode_params.decoding_views(c, novice) for c in (decoder, HALF)
  )
  jax.tree.map(np.testing.assert_array_equal, view, before)
  for x, y in zip(jax.tree.leaves(view), jax.tree.leaves(novice), strict=True):
    np.testing.assert_array_equal(x, y.astype("bfloat16").astype("float32"))
  # The ratio was 0.97 when measured.
  assert diffs_of_half["float32"].mean() <= 1.02 * diffs_of_half["bfloat16"].mean()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inputs", [1, 2])
def test_a_half_precision_product_has_exact_factors_and_float32_sums(rows, inputs):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(rows, 1, *(2, 24)[-inputs:])).astype(np.float32)
  w = jnp.asarray(rng.normal(size=(5, 3, *x.shape[2:])), jnp.bfloat16)
  product = jax.jit(transformer.linear_bf16, static_argnums=2)(x, w, inputs)
  assert product.dtype == jnp.float32
  factors = np.asarray(jnp.asarray(x, jnp.bfloat16), float), np.asarray(w, float)
  expected = np.tensordot(*factors, 2 * [range(-inputs, 0)])
  np.testing.assert_allclose(product, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_with_amx_holds_matrices_in_half_precision(amx, tied):
  cfg = dataclasses.replace(CFG, dtype="bfloat16", tie_embeddings=tied)
  params = transformer.init_params(cfg, 0)
  decoder = decode_params.architecture(cfg)
  assert (decoder.dtype, decoder.product_dtype) == ("float32", "bfloat16")
  (view,) = decode_params.decoding_views(decoder, params)
  for name in (*params["layer_0"], "embed", "final_norm", *(() if tied else ("head",))):
    ours, masters = (v.get(name, v["layer_0"].get(name)) for v in (view, params))
    n = sharding.inputs_of(name)
    assert ours.dtype == ("bfloat16" if n or name == "embed" else "float32")
    turned = np.moveaxis(np.asarray(masters.astype("bfloat16")), range(n), range(-n, 0))
    np.testing.assert_array_equal(ours, turned.astype(ours.dtype))
  # Float32 activations on half-precision weights keep float32 products.
  mixed = dataclasses.replace(CFG, weight_dtype="bfloat16")
  assert decode_params.architecture(mixed).product_dtype == ""


@pytest.mark.slow
def test_half_precision_products_are_the_same_whoever_else_is_decoded(amx, novice):
  on = engine(HALF)
  expected = play(novice, range(12), on=on)
  slow = toy.TableToolbox(latency=toy.shuffled_latency(1))
  played = play(novice, reversed(range(12)), slow, on=on)
  assert contents(played) == contents(expected)


@pytest.mark.slow
def test_half_precision_products_agree_no_worse_with_the_learner(
  diffs_of_half, amx, novice
):
  assert logp_diffs(HALF, novice).mean() <= 1.02 * diffs_of_half["bfloat16"].mean()
