"""Hybrids with linear attention: parity with Hugging Face's Qwen3.5, and our own laws.

budget: a family's parity, its rule, its laws and its refusals, over the same models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file

from coa_jax.learner import log_probs
from coa_jax.model import lora, transformer
from coa_jax.model.cache import KVCache
from coa_jax.model.config import DeltaNet, LoadConfig, ModelConfig
from coa_jax.model.hf.config import from_hf_config, to_hf_config
from coa_jax.model.hf.folder import save_adapter
from coa_jax.model.hf.io import load_config, load_model, save_model
from coa_jax.model.kernels import delta_rule
from coa_jax.model.kernels.delta_rule import Tokens
from coa_jax.model.lora import LoraConfig
from coa_jax.rollout import sampler

torch = pytest.importorskip("torch")

import hybrids  # noqa: E402
import transformers  # noqa: E402
from comparing import TOLERANCE, greedy, ours, rms, rows, theirs  # noqa: E402
from models import difference  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as reference  # noqa: E402

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SEEDS = range(12)
LENGTHS, PACKED = (150, 61, 37), 256
# Relative to the largest entry of each gradient.
GRADIENT_TOLERANCE = 2e-5


def sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, hybrids.VOCABULARY, n).astype(np.int32) for n in lengths]


def each(model, ids: list[np.ndarray]) -> list[np.ndarray]:
  """Hugging Face's logits for each sequence alone, without padding."""
  return [theirs(model, [x])[0] for x in ids]


@contextlib.contextmanager
def in_float64(model) -> Iterator[None]:
  """Runs the model in float64, including its internal casts to float32."""
  model.double()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch, "float32", torch.float64)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield


def exact(model, ids: list[np.ndarray]) -> list[np.ndarray]:
  """Hugging Face's logits in float64."""
  out = []
  with in_float64(model), torch.no_grad():
    for x in ids:
      out.append(model(torch.tensor(x)[None].long()).logits[0].numpy())
  assert out[0].dtype == np.float64
  return out


# ---- Parity with Hugging Face.


def test_the_draw_has_everything():
  found = set()
  for seed in SEEDS:
    config = hybrids.draw(seed)
    cfg = from_hf_config(config)
    found |= {
      f"tied {cfg.tie_embeddings}",
      f"rotated {cfg.rotary_dim / cfg.head_dim}",
      f"groups {cfg.delta.value_heads // cfg.delta.key_heads}",
      f"conv {cfg.delta.conv}",
      cfg.layer_kinds,
      "mrope_section" in config["rope_parameters"],
    }
  assert found >= {"tied True", "tied False", "conv 2", "conv 4", True, False}
  assert found >= {f"rotated {x}" for x in (0.25, 0.5, 1.0)}
  assert found >= {f"groups {x}" for x in (1, 2, 3)}
  kinds = [kinds for kinds in found if isinstance(kinds, tuple)]
  assert {len(k) for k in kinds} == {2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize(
  "seed", [n if n < 5 else pytest.param(n, marks=pytest.mark.soak) for n in SEEDS]
)
def test_logits_are_equal_packed_or_not(tmp_path, seed: int):
  model = hybrids.folder(tmp_path, hybrids.draw(seed), seed)
  cfg, params = load_model(tmp_path)
  ids = sequences(seed=seed)
  expected = exact(model, ids)
  batch = rows([ids, *([x] for x in ids)], PACKED)
  worst = max(map(difference, ours(cfg, params, batch), expected * 2))
  assert worst <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "scan"), [(0, False), (2, True)])
def test_gradients_are_equal(tmp_path, seed: int, scan: bool):
  model = hybrids.folder(tmp_path, hybrids.draw(seed), seed)
  cfg, params = load_model(tmp_path, LoadConfig(scan=scan))
  ids = sequences((70, 33))
  batch = rows([ids], 128)

  def mean_loss(params) -> jax.Array:
    logp_BT, *_ = log_probs.token_logps(cfg, params, batch)
    return log_probs.nll(logp_BT, batch.loss_mask_BT) / batch.loss_mask_BT.sum()

  loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
  total = 0.0
  with in_float64(model):
    for x in ids:
      tokens = torch.tensor(x)[None].long()
      logp = model(tokens).logits[:, :-1].log_softmax(-1)
      total -= logp.gather(-1, tokens[:, 1:, None]).sum()
    expected = total / sum(len(x) - 1 for x in ids)
    expected.backward()
  np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
  save_model(tmp_path / "gradient", cfg, gradient)  # shaped like the parameters
  found = load_file(tmp_path / "gradient" / "model.safetensors")
  worst = {}
  for name, p in model.named_parameters():
    worst[name] = difference(found[name], p.grad.numpy())
  name = max(worst, key=worst.get)
  assert worst[name] <= GRADIENT_TOLERANCE, name


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_greedy_decoding_is_equal(tmp_path, seed: int):
  model = hybrids.folder(tmp_path, hybrids.draw(seed), seed)
  cfg, params = load_model(tmp_path)
  prompts = sequences((70, 9, 2))
  found = greedy(cfg, params, prompts, 128)
  for ids, mine in zip(prompts, found, strict=True):
    tokens = torch.tensor(ids)[None].long()
    out = model.generate(
      tokens,
      attention_mask=torch.ones_like(tokens),
      do_sample=False,
      max_new_tokens=128,
      pad_token_id=0,
      eos_token_id=None,
    )
    assert mine == out[0, len(ids) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_bfloat16_is_as_near_to_float32_as_theirs(tmp_path, seed: int):
  config = hybrids.draw(seed)
  model = hybrids.folder(tmp_path, config, seed)
  model.bfloat16().save_pretrained(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(config))
  half = LoadConfig(dtype="bfloat16", param_dtype="bfloat16")
  cfg, params = load_model(tmp_path, half)
  ids = sequences()
  mine = np.concatenate(ours(cfg, params, rows([ids], PACKED)))
  other = np.concatenate(each(model, ids))
  exact = np.concatenate(each(model.float(), ids))
  error, accepted = rms(mine - exact), rms(other - exact)
  assert 0 < error <= 1.2 * accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_beside_a_vision_tower_is_read_and_written_alone(
  tmp_path, dtype: str, caplog
):
  """Our export equals transformers' export of the decoder, array for array."""
  text = hybrids.draw(1)
  vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
  vision["out_hidden_size"] = text["hidden_size"]
  config = transformers.Qwen3_5Config(
    text_config=text,
    vision_config=vision,
    tie_word_embeddings=text["tie_word_embeddings"],
  )
  model = transformers.Qwen3_5ForConditionalGeneration(config)
  hybrids.fill(model)
  model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "whole")
  stored = load_file_of(tmp_path / "whole", dtype)
  extra = {"mtp.norm.weight": stored["model.language_model.norm.weight"] + 1}
  torch_save(tmp_path / "whole", stored | extra)
  with caplog.at_level(logging.INFO):
    cfg, params = load_model(tmp_path / "whole", LoadConfig(param_dtype=dtype))
  assert "vision tower" in caplog.text
  save_model(tmp_path / "ours", cfg, params, like=tmp_path / "whole")
  read = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "whole")
  # A loaded model saves its loaded weight names, so copy to a fresh model.
  alone = transformers.Qwen3_5ForCausalLM(config.text_config)
  alone.load_state_dict(read.state_dict())
  alone.to(getattr(torch, dtype)).save_pretrained(tmp_path / "alone")
  expected = load_file_of(tmp_path / "alone", dtype)
  found = load_file_of(tmp_path / "ours", dtype)
  assert set(found) == set(expected)
  assert all(torch.equal(found[k], x) for k, x in expected.items())
  written = json.loads((tmp_path / "ours" / "config.json").read_text())
  assert written["architectures"] == ["Qwen3_5ForCausalLM"]
  assert written["max_position_embeddings"] == 32_768
  assert load_config(tmp_path / "ours", LoadConfig(param_dtype=dtype)) == cfg
  ids = sequences()
  logits = []
  for name in ("ours", "alone"):
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name).float()
    logits.append(each(model, ids))
  assert max(map(difference, *logits)) == 0


def load_file_of(path, dtype: str) -> dict[str, torch.Tensor]:
  import safetensors.torch

  return safetensors.torch.load_file(path / "model.safetensors")


def torch_save(path, tensors: dict[str, torch.Tensor]) -> None:
  import safetensors.torch

  metadata = {"format": "pt"}
  safetensors.torch.save_file(tensors, path / "model.safetensors", metadata)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"layer_types": ["full_attention"]}, "'layer_types' has 1 entries, not 4"),
    ({"layer_types": ["sliding_attention"] * 4}, "'layer_types' has 'sliding_att"),
    ({"layer_types": ["linear_attention"] * 4}, 'layer_kinds has no "attention"'),
    ({"linear_num_value_heads": 5}, "key_heads 2 does not divide value_heads 5"),
    ({"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim' is 0; accepted: a whole"),
    ({"attn_output_gate": False}, "'attn_output_gate' is False; accepted: True"),
    ({"partial_rotary_factor": 2.0}, "'partial_rotary_factor' is 2.0; accepted"),
    ({"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype' is 'bfloat16'"),
    ({"num_experts": 8}, "'num_experts' is 8"),
    ({"model_type": "qwen3_5"}, "'text_config' is None"),
  ],
)
def test_unsupported_folders_are_refused_by_field(changes, message: str):
  config = hybrids.draw(0) | {
    "num_hidden_layers": 4,
    "layer_types": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
  }
  from_hf_config(config)
  with pytest.raises(ValueError, match=message):
    from_hf_config(config | changes)


def test_ties_that_disagree_are_refused():
  config = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "text_config": hybrids.draw(0) | {"tie_word_embeddings": False},
  }
  with pytest.raises(ValueError, match="'tie_word_embeddings' is True, and False in"):
    from_hf_config(config)


# ---- The delta rule.


def tokens_of(B: int, T: int, seed: int = 0, Y=2, G=2, M=16, U=8) -> Tokens:
  rng = np.random.default_rng(seed)

  def unit(*shape: int) -> np.ndarray:
    x = rng.normal(size=shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

  return Tokens(
    unit(B, T, Y, M),
    unit(B, T, Y, M),
    rng.normal(size=(B, T, Y * G, U)).astype(np.float32),
    rng.uniform(size=(B, T, Y * G)).astype(np.float32),
    -rng.exponential(0.1, size=(B, T, Y * G)).astype(np.float32),
    np.zeros((B, T), np.int32),
  )


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_chunks_steps_and_theirs_agree(T: int):
  tokens = tokens_of(2, T)
  state = np.random.default_rng(1).normal(size=(2, 4, 16, 8)).astype(np.float32)
  segment_B = np.zeros(2, np.int32)
  out, after = jax.jit(delta_rule.many_tokens)(tokens, state, segment_B)
  arguments = [torch.tensor(x) for x in tokens[:3]]
  expected, expected_after = reference.torch_recurrent_gated_delta_rule(
    *arguments,
    g=torch.tensor(tokens.decay_BTZ),
    beta=torch.tensor(tokens.write_BTZ),
    initial_state=torch.tensor(state),
    output_final_state=True,
  )
  np.testing.assert_allclose(out, expected, atol=2e-6)
  np.testing.assert_allclose(after, expected_after, atol=2e-6)
  step = jax.jit(delta_rule.one_token)
  for t in range(T):
    one = jax.tree.map(lambda x, t=t: x[:, t : t + 1], tokens)
    found, state = step(one, state)
    np.testing.assert_allclose(found[:, 0], expected[:, t], atol=2e-6)


def test_equal_keys_written_at_full_strength_stay_exact():
  """The worst case for a chunk's linear system: each token replaces the last value."""
  tokens = tokens_of(1, 128)
  tokens = tokens._replace(
    k_BTYM=np.broadcast_to(tokens.k_BTYM[:, :1], tokens.k_BTYM.shape),
    q_BTYM=np.broadcast_to(tokens.k_BTYM[:, :1], tokens.k_BTYM.shape),
    write_BTZ=np.ones_like(tokens.write_BTZ),
    decay_BTZ=np.zeros_like(tokens.decay_BTZ),
  )
  state = np.zeros((1, 4, 16, 8), np.float32)
  out, _ = delta_rule.many_tokens(tokens, state, np.zeros(1, np.int32))
  np.testing.assert_allclose(out, tokens.v_BTZU * 16**-0.5, atol=1e-5)


def test_other_segments_change_no_bit_of_a_token():
  first, second = tokens_of(1, 200, seed=1), tokens_of(1, 200, seed=2)
  segment_BT = np.repeat([1, 2, 3], [50, 37, 113])[None]
  middle = (segment_BT == 2)[0]

  def mixed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(np.expand_dims(middle, (0, *range(2, a.ndim))), a, b)

  state = np.zeros((1, 4, 16, 8), np.float32)
  run = jax.jit(delta_rule.many_tokens)
  outs = []
  for others in (first, second):
    tokens = jax.tree.map(mixed, first, others)._replace(segment_BT=segment_BT)
    outs.append(np.asarray(run(tokens, state, segment_BT[:, 0])[0])[0, middle])
  np.testing.assert_array_equal(*outs)


# ---- The model's own laws.

CFG = ModelConfig(
  vocab_size=97,
  width=32,
  layers=4,
  heads=4,
  kv_heads=2,
  head_dim=8,
  ff=48,
  layer_kinds=("delta", "attention"),
  delta=DeltaNet(2, 4, 16, 8),
  attention_gate=True,
  norm_offset=True,
  rotary_dim=4,
)


@functools.cache
def params_of(cfg: ModelConfig = CFG):
  """Parameters that all matter, with slow decays (see hybrids.fill)."""
  rng = np.random.default_rng(0)

  def drawn(path, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    if path[-1].key == "delta_decay_log":
      out = np.log(rng.uniform(0.01, 1.0, shape.shape))
    else:
      size = 0.3 if shape.ndim == 1 else shape.shape[0] ** -0.5
      out = rng.normal(path[-1].key == "delta_norm", size, shape.shape)
    return out.astype(shape.dtype)

  return jax.tree_util.tree_map_with_path(drawn, transformer.param_shapes(cfg))


def logits_of(cfg, params, ids: np.ndarray, segment_BT: np.ndarray) -> np.ndarray:
  position_BT = np.zeros_like(ids)
  for row, segments in zip(position_BT, segment_BT, strict=True):
    for number in set(segments.tolist()):
      row[segments == number] = np.arange((segments == number).sum())
  model = transformer.Transformer(cfg)

  @jax.jit
  def run(params):
    hidden, _ = model.apply({"params": params}, ids, position_BT, segment_BT)
    return model.apply({"params": params}, hidden, method="logits")

  return np.asarray(run(params))


@pytest.mark.slow
def test_a_token_depends_on_its_segment_up_to_itself():
  """The logits of all other tokens are bit-identical."""
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 97, (1, 90)).astype(np.int32)
  segment_BT = np.repeat([1, 2, 3], [30, 40, 20])[None]
  before = logits_of(CFG, params_of(), ids, segment_BT)
  changed = ids.copy()
  changed[0, 45] += 1
  after = logits_of(CFG, params_of(), changed, segment_BT)
  differ = (before != after).any(-1)[0]
  assert differ[45:70].all() and not differ[:45].any() and not differ[70:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat", ["full", pytest.param("attention", marks=pytest.mark.soak)]
)
def test_scanned_is_unrolled(remat: str):
  ids = np.random.default_rng(0).integers(0, 97, (2, 40)).astype(np.int32)
  batch = rows([[ids[0]], [ids[1][:30]]], 40)

  def loss(cfg, params):
    logp_BT, *_ = log_probs.token_logps(cfg, params, batch)
    return log_probs.nll(logp_BT, batch.loss_mask_BT)

  params = params_of()
  grad = jax.jit(jax.grad(lambda p: loss(CFG, p)))(params)
  scanned = dataclasses.replace(CFG, scan=True, remat=remat)
  stacked = transformer.stack(params, CFG.layers, len(CFG.layer_kinds))
  again = transformer.unstack(stacked, CFG.layers)
  assert jax.tree.all(jax.tree.map(np.array_equal, again, params))
  expected = jax.tree.map(jnp.shape, transformer.param_shapes(scanned))
  assert jax.tree.map(jnp.shape, stacked) == expected
  other = jax.jit(jax.grad(lambda p: loss(scanned, p)))(stacked)
  for x, y in zip(
    jax.tree.leaves(grad),
    jax.tree.leaves(transformer.unstack(other, CFG.layers)),
    strict=True,
  ):
    assert np.abs(x).max() > 0
    np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(x).max())


@pytest.mark.slow
def test_prefill_in_pieces_is_at_once_and_keeps_other_slots():
  """States and last inputs are equal too; rows may use any slots."""
  ids = np.random.default_rng(0).integers(0, 97, (2, 150)).astype(np.int32)
  table_RC = np.array([[2], [0]], np.int32)
  slots = np.array([2, 0], np.int32)
  empty = KVCache.empty(CFG, 4, 200, slots=4)
  noise = jax.tree.map(lambda x: jnp.full_like(x, 0.5), empty)

  def prefill(cache, token_RT, start, count):
    return sampler.prefill(
      CFG,
      params_of(),
      jax.tree.map(jnp.array, cache),
      table_RC,
      token_RT,
      np.array(start),
      np.array(count),
      slot_R=slots,
    )

  whole = prefill(noise, ids, [0, 0], [150, 80])
  parts = prefill(noise, ids[:, :64], [0, 0], [64, 3])
  rest = np.stack([ids[0, 64:], np.pad(ids[1, 3:80], (0, 9))])
  parts = prefill(parts, rest, [64, 3], [86, 77])
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)
  for state in (s for layer in whole.states for s in layer):
    assert (np.asarray(state)[[1, 3]] == 0.5).all()
    assert not (np.asarray(state)[[0, 2]] == 0.5).any()


@pytest.mark.parametrize("matrices", [("q", "o"), ("delta_qkv", "delta_out")])
def test_adapters_of_one_kind_of_layer_are_written(tmp_path, matrices):
  """Stacked layers have no subtree for the other kind."""
  config = LoraConfig(rank=3, matrices=matrices)
  shapes = []
  for scan in (False, True):
    cfg, folder = dataclasses.replace(CFG, scan=scan), tmp_path / str(scan)
    save_adapter(folder, cfg, lora.init_adapters(cfg, config, 0), config, "base")
    written = load_file(folder / "adapter_model.safetensors")
    shapes.append({name: x.shape for name, x in written.items()})
  assert shapes[0] and shapes[0] == shapes[1]


@pytest.mark.slow
def test_adapters_of_every_projection_are_pefts(tmp_path):
  peft = pytest.importorskip("peft")
  config = LoraConfig(rank=3, alpha=5.0)
  params = params_of()
  rng = np.random.default_rng(1)
  adapters = jax.tree.map(
    lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32),
    lora.init_adapters(CFG, config, 0),
  )
  assert set(adapters["layer_0"]) == {
    f"{name}_{half}"
    for name in (*lora.MATRICES[-5:], "gate", "up", "down")
    for half in "ab"
  }
  save_model(tmp_path / "base", CFG, params)
  save_adapter(tmp_path / "adapter", CFG, adapters, config, str(tmp_path / "base"))
  model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
  model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
  ids = rng.integers(0, 97, (1, 60)).astype(np.int32)
  with torch.no_grad():
    expected = model(torch.tensor(ids).long()).logits.numpy()
  one = np.ones_like(ids)
  joined = logits_of(CFG, lora.join(params, adapters, config), ids, one)
  merged = logits_of(CFG, lora.merge(params, adapters, config), ids, one)
  assert difference(joined, expected) <= TOLERANCE
  assert difference(merged, expected) <= TOLERANCE
  # Stacked layers give the same adapters and the same folder.
  stacked = dataclasses.replace(CFG, scan=True)
  for tree in (params, adapters):
    again = transformer.stack(tree, CFG.layers, 2)
    assert jax.tree.all(
      jax.tree.map(np.array_equal, transformer.unstack(again, CFG.layers), tree)
    )
  save_adapter(
    tmp_path / "stacked",
    stacked,
    {"layers": transformer.stack(adapters, CFG.layers, 2)["layers"]},
    config,
    str(tmp_path / "base"),
  )
  a, b = (
    load_file(tmp_path / x / "adapter_model.safetensors")
    for x in ("adapter", "stacked")
  )
  assert a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"layer_kinds": ("delta", "other")}, "layer_kinds has 'other'; there are attent"),
    ({"layer_kinds": ("delta",)}, 'layer_kinds has no "attention"'),
    ({"layers": 3}, "layer_kinds has 2 entries, which does not divide layers 3"),
    ({"delta": None}, "go together; set both or neither"),
    ({"rotary_dim": 3}, "rotary_dim is 3; it must be even, and at most head_dim 8"),
    ({"rotary_dim": 10}, "rotary_dim is 10; it must be even, and at most"),
  ],
)
def test_impossible_hybrids_are_refused(changes, message: str):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CFG, **changes)


def test_a_model_unknown_to_hugging_face_is_not_exported():
  half = dataclasses.replace(CFG, norm_offset=False)
  with pytest.raises(ValueError, match="has both or neither"):
    to_hf_config(half)
  dense = dataclasses.replace(toy.MODEL, rotary_dim=4)
  with pytest.raises(ValueError, match="transformers has neither"):
    to_hf_config(dense)
