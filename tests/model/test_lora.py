"""Adapters: joined = merged, scanned = unrolled, and only they are trained."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_collections
import models
import numpy as np
import pytest
import toy
from models import difference
from safetensors.numpy import load_file

from coa_jax import sft
from coa_jax.learner import batch as batching
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, init_state
from coa_jax.model import lora, transformer
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.folder import save_adapter
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.lora import LoraConfig
from coa_jax.protocol.trajectory import write_jsonl

# The heads do not divide the width, so that no two shapes are equal.
CFG = dataclasses.replace(
  toy.MODEL, heads=6, kv_heads=3, head_dim=10, attention_bias=True, qk_norm=False
)
SCANNED = dataclasses.replace(CFG, scan=True)
# The rank differs from the number of layers.
ALL = LoraConfig(rank=3, alpha=5.0)
SOME = LoraConfig(rank=3, alpha=5.0, matrices=("q", "o", "down"))
CONFIGS = pytest.mark.parametrize("config", [ALL, SOME], ids=["all", "some"])
TOKENS = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, 24)).astype(np.int32)
POSITION = np.broadcast_to(np.arange(24, dtype=np.int32), TOKENS.shape)


@functools.cache
def params(cfg: ModelConfig = CFG):
  """Parameters without zeros or ones."""
  if cfg.scan:
    return transformer.stack(params(dataclasses.replace(cfg, scan=False)), cfg.layers)
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32),
    transformer.init_params(cfg, 0),
  )


def trained(config: LoraConfig = ALL, cfg: ModelConfig = CFG):
  """Adapters as after training: both halves are random."""
  if cfg.scan:
    unrolled = trained(config, dataclasses.replace(cfg, scan=False))
    return transformer.stack(unrolled, cfg.layers)
  rng = np.random.default_rng(2)
  return jax.tree.map(
    lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32),
    lora.init_adapters(cfg, config, 0),
  )


def logits(cfg: ModelConfig, p) -> jax.Array:
  return models.logits(cfg, p, TOKENS, POSITION, np.ones_like(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [CFG, SCANNED], ids=["unrolled", "scanned"])
def test_fresh_adapters_change_nothing(cfg: ModelConfig):
  adapters = lora.init_adapters(cfg, ALL, 0)
  base = logits(cfg, params(cfg))
  np.testing.assert_array_equal(
    logits(cfg, lora.join(params(cfg), adapters, ALL)), base
  )
  merged = lora.merge(params(cfg), adapters, ALL)
  assert jax.tree.all(jax.tree.map(np.array_equal, merged, params(cfg)))


def test_fresh_adapters_are_float32_and_keyed_by_the_seed():
  low = dataclasses.replace(CFG, param_dtype="bfloat16", dtype="bfloat16")
  first, again, other = (lora.init_adapters(low, SOME, seed) for seed in (0, 0, 1))
  assert {x.dtype for x in jax.tree.leaves(first)} == {jnp.dtype("float32")}
  assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
  assert set(first) == {"layer_0", "layer_1"}
  shapes = {k: x.shape for k, x in first["layer_0"].items()}
  D, N, H, F, r = CFG.width, CFG.heads, CFG.head_dim, CFG.ff, SOME.rank
  assert shapes == {
    "q_a": (D, r),
    "q_b": (r, N, H),
    "o_a": (N, H, r),
    "o_b": (r, D),
    "down_a": (F, r),
    "down_b": (r, D),
  }
  for name, x in first["layer_0"].items():
    if name.endswith("_a"):
      assert not np.array_equal(x, other["layer_0"][name])
      assert not np.array_equal(x, first["layer_1"][name])
      inputs = x.size // r
      assert 0.7 < float(jnp.std(x)) * inputs**0.5 < 1.4
    else:
      assert not x.any()


@pytest.mark.slow
@CONFIGS
def test_joined_is_merged_and_scanned_is_unrolled(config: LoraConfig):
  merged = lora.merge(params(), trained(config), config)
  expected = logits(CFG, merged)
  assert difference(logits(CFG, params()), expected) > 0.1  # adapters matter
  joined = lora.join(params(), trained(config), config)
  found = [difference(logits(CFG, joined), expected)]
  stacked, frozen = trained(config, SCANNED), params(SCANNED)
  joined = lora.join(frozen, stacked, config)
  found.append(difference(logits(SCANNED, joined), expected))
  scanned = lora.merge(frozen, stacked, config)
  found.append(difference(logits(SCANNED, scanned), expected))
  print("relative to the largest logit:", *(f"{x:.1e}" for x in found))
  assert max(found) <= 1e-5
  again = transformer.unstack(scanned, CFG.layers)
  assert jax.tree.structure(again) == jax.tree.structure(merged)
  for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(merged), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-6)


def test_merging_keeps_the_dtype_and_rounds_once():
  low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params())
  merged = lora.merge(low, trained(), ALL)
  wide = jax.tree.map(lambda x: np.asarray(x, np.float32), low)
  exact = lora.merge(wide, trained(), ALL)
  for x, y in zip(jax.tree.leaves(merged), jax.tree.leaves(exact), strict=True):
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(x, jnp.asarray(y, jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [CFG, SCANNED], ids=["unrolled", "scanned"])
def test_training_reaches_adapters_and_nothing_else(cfg: ModelConfig):
  (batch,) = batching.batches(toy.trajectories(), 4, toy.MAX_LEN)
  loss_of = toy.sft_loss(cfg)

  def loss(adapters, frozen, batch):
    return loss_of(lora.assemble(adapters, frozen, SOME), None, batch)

  adapters, frozen = lora.split(cfg, params(cfg), SOME, 0)
  assert frozen is params(cfg)
  before = jax.tree.map(np.array, (adapters, frozen))
  optimizer = make_optimizer(OptimConfig(lr=1e-2, warmup=1, weight_decay=0.1), 4)
  learner, state = Learner(loss, optimizer), init_state(adapters, optimizer)
  values = []
  for _ in range(3):
    state, logged = learner.step(
      state, [batch], float(batch.loss_mask_BT.sum()), frozen
    )
    values.append(float(logged["loss"]))
  assert values[-1] < values[0]
  assert jax.tree.structure(state.params) == jax.tree.structure(before[0])
  changed = jax.tree.map(lambda x, y: not np.array_equal(x, y), state.params, before[0])
  assert jax.tree.all(changed)
  assert jax.tree.all(jax.tree.map(np.array_equal, frozen, before[1]))


def test_without_adapters_everything_is_trained():
  everything, frozen = lora.split(CFG, params(), None, 0)
  assert everything is params() and frozen is None
  assert lora.assemble(everything, frozen, None) is everything
  assert lora.merged(everything, frozen, None) is everything


@pytest.mark.parametrize("cfg", [CFG, SCANNED], ids=["unrolled", "scanned"])
def test_an_adapter_folder_has_the_names_and_shapes_of_peft(tmp_path, cfg: ModelConfig):
  save_adapter(tmp_path, cfg, trained(SOME, cfg), SOME, "base")
  D, NH, F, r = CFG.width, CFG.heads * CFG.head_dim, CFG.ff, SOME.rank
  sizes = {
    "self_attn.q_proj": (D, NH),
    "self_attn.o_proj": (NH, D),
    "mlp.down_proj": (F, D),
  }
  expected = {}
  for i in range(CFG.layers):
    for name, (inputs, outputs) in sizes.items():
      full = f"base_model.model.model.layers.{i}.{name}"
      expected[f"{full}.lora_A.weight"] = (r, inputs)
      expected[f"{full}.lora_B.weight"] = (outputs, r)
  found = load_file(tmp_path / "adapter_model.safetensors")
  assert {k: x.shape for k, x in found.items()} == expected
  config = json.loads((tmp_path / "adapter_config.json").read_text())
  assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"]
  assert (config["r"], config["lora_alpha"]) == (3, 5.0)
  assert config["base_model_name_or_path"] == "base"
  # The file's B @ A is the merged product, in the file's layout.
  file = "model.layers.1.self_attn.o_proj"
  a, b = (found[f"base_model.model.{file}.lora_{x}.weight"] for x in "AB")
  folders = [tmp_path / x for x in ("base", "merged")]
  save_model(folders[0], cfg, params(cfg))
  save_model(folders[1], cfg, lora.merge(params(cfg), trained(SOME, cfg), SOME))
  old, new = (load_file(f / "model.safetensors")[f"{file}.weight"] for f in folders)
  np.testing.assert_allclose(new, old + SOME.alpha / SOME.rank * b @ a, atol=1e-6)


@CONFIGS
def test_peft_computes_the_same_from_the_adapter_folder(tmp_path, config: LoraConfig):
  torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
  import transformers

  base, folder = tmp_path / "base", tmp_path / "adapter"
  save_model(base, CFG, params())
  save_adapter(folder, CFG, trained(config), config, str(base))
  model = transformers.AutoModelForCausalLM.from_pretrained(base)
  model = peft.PeftModel.from_pretrained(model, folder).eval()
  with torch.no_grad():
    found = model(torch.tensor(TOKENS)).logits.numpy()
  expected = logits(CFG, lora.join(params(), trained(config), config))
  worst = difference(found, np.asarray(expected))
  print(f"largest difference, relative to the largest logit: {worst:.1e}")
  assert worst <= 1e-5


def test_adapters_do_not_go_with_rounded_weights():
  cfg = dataclasses.replace(CFG, weight_dtype="bfloat16")
  with pytest.raises(ValueError, match=r"lora does not go with model\.weight_dtype"):
    lora.check(cfg, SOME)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"matrices": ("q", "embed")}, "matrices has 'embed'; there are q, k, v, o, gate"),
    ({"matrices": ()}, "matrices is empty; there are q, k"),
  ],
)
def test_impossible_adapters_are_refused(changes, message: str):
  with pytest.raises(ValueError, match=message):
    LoraConfig(**changes)


@pytest.fixture
def journey(tmp_path) -> ml_collections.ConfigDict:
  """The config of a short SFT run on a model folder."""
  toy.save_policy(str(tmp_path / "base"), toy.params())
  write_jsonl(tmp_path / "data.jsonl", toy.trajectories() * 2)
  return ml_collections.ConfigDict(
    {
      "init": str(tmp_path / "base"),
      "model": {"scan": True},
      "lora": {"rank": 3, "alpha": 6.0, "matrices": ["q", "up"]},
      "optim": {"lr": 1e-2, "warmup": 1},
      "data": {
        "trajectories": str(tmp_path / "data.jsonl"),
        "steps": 3,
        "rows": 4,
        "length": toy.MAX_LEN,
        "validation": 0,
      },
      "checkpoint": {"every": 100, "keep": 1},
    }
  )


@pytest.mark.slow
def test_a_run_of_sft_with_adapters_changes_only_what_they_adapt(journey, tmp_path):
  results = sft.run(journey, str(tmp_path / "w"))
  cfg, base = load_model(tmp_path / "base", LoadConfig())
  count = transformer.count_params(
    lora.init_adapters(cfg, LoraConfig(3, 6.0, ("q", "up")), 0)
  )
  assert results["parameters_trained"] == count
  assert results["parameters"] == transformer.count_params(base)
  folders = [tmp_path / "base", tmp_path / "w" / "model"]
  before, after = (load_file(f / "model.safetensors") for f in folders)
  assert set(before) == set(after)
  changed = {k for k, x in before.items() if not np.array_equal(x, after[k])}
  adapted = ("q_proj.weight", "up_proj.weight")
  assert changed == {k for k in before if k.endswith(adapted)}
  # The adapter's folder holds the difference.
  found = load_file(tmp_path / "w" / "adapter" / "adapter_model.safetensors")
  for name in changed:
    full = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = (found[f"{full}.lora_{x}.weight"] for x in "AB")
    np.testing.assert_allclose(after[name], before[name] + 2.0 * b @ a, atol=1e-6)
  description = tmp_path / "w" / "adapter" / "adapter_config.json"
  assert json.loads(description.read_text())["base_model_name_or_path"] == journey.init
