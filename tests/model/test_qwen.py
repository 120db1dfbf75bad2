"""Laws of the transformer: causal, packed = unpacked, cached = uncached, ..."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from models import logits

from coa_jax.learner import batch as batching
from coa_jax.learner import log_probs
from coa_jax.model import transformer
from coa_jax.model.cache import KVCache
from coa_jax.model.config import DeltaNet, Llama3Rope, ModelConfig, Yarn
from coa_jax.model.kernels.paged import RowPages
from coa_jax.model.transformer import Transformer

CFG = toy.MODEL
T = 12
TOKENS = np.random.default_rng(0).integers(0, CFG.vocab_size, (3, T)).astype(np.int32)
POSITION = np.broadcast_to(np.arange(T, dtype=np.int32), TOKENS.shape)
# Both families at once: biases, QK-norm and an untied output matrix.
FULL = {"attention_bias": True, "tie_embeddings": False}


def params_of(cfg: ModelConfig, seed: int = 0):
  """Parameters without zeros or ones, so that all of them matter."""
  fresh = transformer.init_params(cfg, seed)
  leaves, tree = jax.tree.flatten(fresh)
  rng = np.random.default_rng(seed)
  noisy = [x + 0.1 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
  return jax.tree.unflatten(tree, noisy)


@functools.partial(jax.jit, static_argnums=0)
def cached_logits(cfg: ModelConfig, params, cache, tokens_BT, position_BT, valid_BT):
  model = Transformer(cfg)
  table_BC = jnp.arange(len(tokens_BT))[:, None]  # one page per row
  hidden, cache = model.apply(
    {"params": params},
    tokens_BT,
    position_BT,
    cache=cache,
    valid_BT=valid_BT,
    rows=RowPages(table_BC),
  )
  return model.apply({"params": params}, hidden, method="logits"), cache


@functools.cache
def influence(scan: bool):
  """Jitted |d logits at t / d embedding at s| for all t, s, given segments."""
  cfg = dataclasses.replace(CFG, vocab_size=8, tie_embeddings=False, scan=scan)
  params = params_of(cfg)
  # Token s is at place s only, so row s of the embedding is the input at s.
  tokens_1T = jnp.arange(8)[None]

  @jax.jit
  def jacobian(segment_1T, position_1T):
    def out(embed):
      p = {**params, "embed": embed}
      return logits(cfg, p, tokens_1T, position_1T, segment_1T)[0]

    jac_TVSD = jax.jacrev(out)(params["embed"])
    return jnp.abs(jac_TVSD).sum((1, 3))

  return jacobian


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_a_token_depends_on_itself_and_on_what_stands_before_it(scan: bool):
  reach_TS = influence(scan)(jnp.ones((1, 8), int), jnp.arange(8)[None])
  expected_TS = np.tril(np.ones((8, 8), bool))
  np.testing.assert_array_equal(np.asarray(reach_TS) != 0, expected_TS)


def test_a_token_depends_on_nothing_outside_its_segment():
  segment_1T = jnp.array([[1, 1, 1, 2, 2, 3, 0, 0]])
  position_1T = jnp.array([[0, 1, 2, 0, 1, 0, 0, 0]])
  reach_TS = np.asarray(influence(False)(segment_1T, position_1T)) != 0
  same_TS = np.equal.outer(*[np.asarray(segment_1T)[0]] * 2)
  real = slice(0, 6)  # only padding may read padding
  np.testing.assert_array_equal(reach_TS[real, real], np.tril(same_TS)[real, real])
  assert not reach_TS[real, 6:].any() and not reach_TS[6:, real].any()


@pytest.mark.slow
def test_packed_is_unpacked():
  cfg = dataclasses.replace(CFG, **FULL)
  params = params_of(cfg)
  lengths = (5, 3, 2)
  packed = np.zeros((1, T), np.int32)
  segment, position = np.zeros((1, T), np.int32), np.zeros((1, T), np.int32)
  at = 0
  for number, n in enumerate(lengths, 1):
    packed[0, at : at + n] = TOKENS[number - 1, :n]
    segment[0, at : at + n] = number
    position[0, at : at + n] = np.arange(n)
    at += n
  together = logits(cfg, params, packed, position, segment)
  alone = logits(cfg, params, TOKENS, POSITION, np.ones_like(TOKENS))
  at = 0
  for row, n in enumerate(lengths):
    np.testing.assert_allclose(together[0, at : at + n], alone[row, :n], atol=1e-5)
    at += n


def test_cached_is_uncached_and_pieces_are_the_whole():
  cfg = dataclasses.replace(CFG, **FULL)
  params = params_of(cfg)
  whole = logits(cfg, params, TOKENS, POSITION, np.ones_like(TOKENS))
  everything = np.ones(TOKENS.shape, bool)
  cache = KVCache.empty(cfg, 3, T + 4)
  at_once, full = cached_logits(cfg, params, cache, TOKENS, POSITION, everything)
  np.testing.assert_allclose(at_once, whole, atol=1e-5)
  # Token by token.
  out = []
  for t in range(T):
    one = slice(t, t + 1)
    args = (TOKENS[:, one], POSITION[:, one], everything[:, one])
    step, cache = cached_logits(cfg, params, cache, *args)
    out.append(step)
  np.testing.assert_allclose(jnp.concatenate(out, 1), whole, atol=1e-5)
  for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(full), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  # In pieces padded on the right, with a different length per row.
  cache = KVCache.empty(cfg, 3, T + 4)
  done = np.zeros(3, int)
  for counts in ([5, 2, 1], [0, 5, 4], [5, 5, 5], [2, 0, 2]):
    step = np.arange(5)
    position = done[:, None] + step
    valid = step < np.array(counts)[:, None]
    tokens = np.take_along_axis(TOKENS, np.minimum(position, T - 1), axis=1)
    tokens = np.where(valid, tokens, 7)  # the padding's token does not matter
    piece, cache = cached_logits(cfg, params, cache, tokens, position, valid)
    for row, n in enumerate(counts):
      expected = whole[row, done[row] : done[row] + n]
      np.testing.assert_allclose(piece[row, :n], expected, atol=1e-5)
    done += counts
  assert done.tolist() == [T, T, T]
  for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(full), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def nll(cfg: ModelConfig, params):
  logp = jax.nn.log_softmax(
    logits(cfg, params, TOKENS, POSITION, np.ones_like(TOKENS))[:, :-1]
  )
  return -jnp.take_along_axis(logp, TOKENS[:, 1:, None], -1).mean()


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grad(cfg: ModelConfig, params):
  return jax.value_and_grad(lambda p: nll(cfg, p))(params)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scan", "remat"),
  [
    (False, "full"),
    (True, "full"),
    *(
      pytest.param(True, remat, marks=pytest.mark.soak)
      for remat in ("none", "attention", "dots", "offload")
    ),
  ],
)
def test_scanned_is_unrolled_and_recomputed_is_kept(scan: bool, remat: str):
  plain = dataclasses.replace(CFG, **FULL)
  params = params_of(plain)
  loss, grad = loss_and_grad(plain, params)
  cfg = dataclasses.replace(plain, scan=scan, remat=remat)
  mine = transformer.stack(params, cfg.layers) if scan else params
  other_loss, other_grad = loss_and_grad(cfg, mine)
  np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
  other_grad = transformer.unstack(other_grad, cfg.layers)
  assert jax.tree.structure(other_grad) == jax.tree.structure(grad)
  for path, x in jax.tree_util.tree_leaves_with_path(grad):
    y = other_grad
    for key in path:
      y = y[key.key]
    scale = np.abs(x).max()
    assert scale > 0, path
    np.testing.assert_allclose(y, x, atol=2e-6 * scale, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat, products",
  [
    ("full", "q k v qk av o gate up"),
    ("attention", "q k v o gate up"),
    ("dots", "qk av"),  # `dots` keeps no product with a batch axis
  ],
)
def test_the_backward_pass_recomputes_what_remat_says(remat: str, products: str):
  """A layer's last product is not recomputed: its gradient needs only its inputs."""
  params = params_of(CFG)

  def count(remat: str) -> int:
    cfg = dataclasses.replace(CFG, remat=remat)
    grad = jax.make_jaxpr(jax.grad(lambda p: nll(cfg, p)))(params)
    return str(grad).count("dot_general[")

  again = count(remat) - count("none")
  assert again == CFG.layers * len(products.split())


OTHERS = {
  "vocab_size": 392,
  "width": 40,
  "layers": 3,
  "heads": 2,
  "kv_heads": 1,
  "head_dim": 10,
  "ff": 65,
  "rope_theta": 10_001.0,
  "norm_eps": 1e-5,
  "tie_embeddings": False,
  "attention_bias": True,
  "qk_norm": False,
  "dtype": "bfloat16",
  "param_dtype": "bfloat16",
  "weight_dtype": "bfloat16",
  "scan": True,
  "remat": "full",
  "yarn": Yarn(factor=2.0, positions=8),
  "llama3": Llama3Rope(8.0, 8, 0.5, 1.0),
  "attention": "splash",
  "logit_chunk": 4,
  "attention_gate": True,
  "norm_offset": True,
  "rotary_dim": 4,
  "layer_kinds": ("attention", "delta"),
  "delta": DeltaNet(key_heads=2, value_heads=2),
}
# Two fields that are valid only together.
HYBRID = {"layer_kinds": ("delta", "attention"), "delta": DeltaNet(1, 2)}


@functools.cache
def program(**changes) -> str:
  """The traced program of the learner's log-probs and their gradient."""
  cfg = dataclasses.replace(CFG, **changes)
  # Every attention kernel accepts this length.
  batch = jax.tree.map(jnp.asarray, batching.empty(1, 128))

  def loss(params):
    return jnp.sum(log_probs.token_logps(cfg, params, batch)[0])

  traced = jax.make_jaxpr(jax.value_and_grad(loss))(transformer.param_shapes(cfg))
  constants = [np.asarray(c).tolist() for c in traced.consts]
  return f"{traced} {constants}"


FIELDS = {f.name for f in dataclasses.fields(ModelConfig)}


# product_dtype changes decoding only: tests/rollout/test_half_precision.py.
@pytest.mark.slow
@pytest.mark.parametrize("field", sorted(FIELDS - {"product_dtype"}))
def test_every_field_changes_the_program(field: str):
  rest = HYBRID if field in HYBRID else {}
  assert program(**rest | {field: OTHERS[field]}) != program(**rest)


def test_a_value_that_a_field_already_has_changes_nothing():
  """Otherwise the test above would prove nothing."""
  program.cache_clear()
  before = program()
  program.cache_clear()
  assert program(ff=CFG.ff) == before


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"kv_heads": 3}, "kv_heads 3 does not divide heads 4"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    ({"yarn": OTHERS["yarn"], "llama3": OTHERS["llama3"]}, "yarn and llama3 both"),
  ],
)
def test_impossible_architectures_are_refused(changes, message: str):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CFG, **changes)


@pytest.mark.parametrize(
  ("kind", "changes"),
  [
    ("yarn", {"factor": float("nan")}),
    ("yarn", {"beta_fast": 0.0}),
    ("yarn", {"attention_factor": -1.0}),
    ("llama3", {"factor": 0.5}),
    ("llama3", {"low_freq_factor": 1.0}),
  ],
)
def test_impossible_stretchings_are_refused(kind: str, changes):
  with pytest.raises(ValueError, match=next(iter(changes))):
    dataclasses.replace(OTHERS[kind], **changes)


def test_scanned_layers_do_not_decode():
  cfg = dataclasses.replace(CFG, scan=True)
  cache = KVCache.empty(cfg, 3, T)
  with pytest.raises(ValueError, match="decoding_views"):
    cached_logits(cfg, params_of(cfg), cache, TOKENS, POSITION, TOKENS >= 0)


def test_logits_are_float32_whatever_the_dtype():
  cfg = dataclasses.replace(CFG, dtype="bfloat16")
  params = toy.params()
  out = logits(cfg, params, TOKENS, POSITION, np.ones_like(TOKENS))
  assert out.dtype == jnp.float32
  exact = logits(CFG, params, TOKENS, POSITION, np.ones_like(TOKENS))
  assert 0 < np.abs(out - exact).max() < 0.1
  low = jax.eval_shape(
    lambda: transformer.init_params(dataclasses.replace(CFG, param_dtype="bfloat16"), 0)
  )
  assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.dtype("bfloat16")}


def test_parameters_are_a_function_of_the_seed():
  first, again, other = (transformer.init_params(CFG, seed) for seed in (3, 3, 4))
  assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
  assert not np.array_equal(first["embed"], other["embed"])
