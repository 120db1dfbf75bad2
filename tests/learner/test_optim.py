"""How optimizers treat each kind of leaf, and their rates at each step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.model import transformer

# Leaf -> leading axes of the model's shape that are the matrix's input; the rest are
# its output.
MATRICES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}
CFG = dataclasses.replace(toy.ONE_LAYER, attention_bias=True, tie_embeddings=False)
# Without first moments, Adam moves by its rate, against the gradient's sign.
FLAT = {"schedule": "constant", "clip_norm": 0.0, "b1": 0.0}


def leaves(tree):
  """Yields (name, array) for every leaf."""
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    yield path[-1].key, np.asarray(x)


def first_update(config: OptimConfig, params, grads):
  optimizer = make_optimizer(config, 10)

  @jax.jit
  def update(g, p):
    return optimizer.update(g, optimizer.init(p), p)[0]

  return update(grads, params)


def random_like(params, seed: int = 0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_muon_makes_matrices_orthogonal_and_adam_takes_the_rest(scan: bool):
  cfg = dataclasses.replace(CFG, scan=scan, layers=2 if scan else 1)
  params = transformer.init_params(cfg, 0)
  config = OptimConfig(name="muon", lr=1.0, adam_lr=0.01, **FLAT)
  grads = random_like(params)
  updates = first_update(config, params, grads)
  seen = set()
  for (name, update), (_, grad) in zip(leaves(updates), leaves(grads), strict=True):
    seen.add(name)
    if name not in MATRICES:
      np.testing.assert_allclose(update, -0.01 * np.sign(grad), rtol=1e-3, err_msg=name)
      continue
    stacked = update if scan else update[None]
    for layer, g in zip(stacked, grad if scan else grad[None], strict=True):
      inputs = int(np.prod(layer.shape[: MATRICES[name]]))
      singular = np.linalg.svd(layer.reshape(inputs, -1), compute_uv=False)
      singular = singular / singular.max()
      # Five Newton-Schulz steps bring singular values near 1; before, they spread.
      assert singular.min() > 0.4, (name, singular)
      raw = np.linalg.svd(g.reshape(inputs, -1), compute_uv=False)
      assert raw.min() / raw.max() < 0.4
      assert (layer * g).sum() < 0
  assert seen == {
    *MATRICES,
    *("embed", "head", "final_norm", "attn_norm", "ff_norm", "q_norm", "k_norm"),
    *("q_bias", "k_bias", "v_bias"),
  }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_shrinks_matrices_only(name: str):
  params = random_like(transformer.init_params(CFG, 0), 1)
  config = OptimConfig(name=name, lr=0.5, adam_lr=0.5, weight_decay=0.1, **FLAT)
  updates = first_update(config, params, jax.tree.map(jnp.zeros_like, params))
  for (leaf, update), (_, x) in zip(leaves(updates), leaves(params), strict=True):
    expected = -0.5 * 0.1 * x if leaf in MATRICES else 0 * x
    np.testing.assert_allclose(update, expected, atol=1e-6, err_msg=leaf)


def test_adamw_is_adamw():
  config = OptimConfig(lr=0.1, weight_decay=0.01, b1=0.8, b2=0.9, schedule="constant")
  optimizer = make_optimizer(dataclasses.replace(config, clip_norm=0.0), 3)
  rng = np.random.default_rng(0)
  x, m, v = rng.normal(size=5), 0.0, 0.0
  params = {"gate": jnp.asarray(x, jnp.float32)}
  state = optimizer.init(params)
  for t in (1, 2, 3):
    g = rng.normal(size=5)
    updates, state = optimizer.update({"gate": jnp.asarray(g)}, state, params)
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
    adam = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    expected = -0.1 * (adam + 0.01 * x)
    np.testing.assert_allclose(updates["gate"], expected, rtol=1e-4)
    x = x + expected
    params = jax.tree.map(jnp.add, params, updates)


def rates(config: OptimConfig, steps: int) -> list[float]:
  """The rate at each update: on a constant gradient, Adam's step equals the rate."""
  optimizer = make_optimizer(config, steps)
  params = {"embed": jnp.zeros(1)}
  state, out = optimizer.init(params), []
  for _ in range(steps + 1):
    update, state = jax.jit(optimizer.update)({"embed": jnp.ones(1)}, state, params)
    out.append(-float(update["embed"][0]))
  return out


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rates_from_warm_up_to_the_end(name: str, schedule: str, warmup: int):
  peak, final, steps = 0.25, 0.2, 12
  rate = {"lr": 9.0, "adam_lr": peak} if name == "muon" else {"lr": peak}
  config = OptimConfig(
    name=name,
    schedule=schedule,
    warmup=warmup,
    final=final,
    **{"clip_norm": 0.0, "b1": 0.0, **rate},
  )
  found = rates(config, steps)
  up = [peak * i / 4 for i in range(warmup)]
  rest = steps - warmup
  share = np.arange(rest + 1) / rest
  after = {
    "cosine": peak * (final + (1 - final) * (1 + np.cos(np.pi * share)) / 2),
    "linear": peak * (1 + (final - 1) * share),
    "constant": np.full(rest + 1, peak),
  }[schedule]
  np.testing.assert_allclose(found, [*up, *after], rtol=1e-4, atol=1e-6)


def test_large_gradients_are_scaled_to_the_norm_and_small_ones_left_alone():
  params = {"embed": jnp.zeros(2)}
  small, large = {"embed": jnp.array([0.3, 0.4])}, {"embed": jnp.array([30.0, 40.0])}

  def after(clip_norm: float, *grads) -> np.ndarray:
    optimizer = make_optimizer(OptimConfig(clip_norm=clip_norm), 5)
    state = optimizer.init(params)
    for g in grads:
      update, state = optimizer.update(g, state, params)
    return np.asarray(update["embed"])

  unit = {"embed": jnp.array([0.6, 0.8])}
  np.testing.assert_allclose(
    after(1.0, small, large), after(0.0, small, unit), rtol=1e-6
  )
  np.testing.assert_array_equal(after(1.0, small, small), after(0.0, small, small))
  assert not np.allclose(after(0.0, small, large), after(0.0, small, unit))
