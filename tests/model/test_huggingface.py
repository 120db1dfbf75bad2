"""Parity with Hugging Face's Qwen2, Qwen3 and Llama, in both directions.

Both sides read the same folder with a drawn config.json (drawn.py).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import drawn
import jax
import numpy as np
import pytest
import toy
from safetensors.numpy import load_file

from coa_jax.learner import log_probs
from coa_jax.model import transformer
from coa_jax.model.config import Llama3Rope, LoadConfig
from coa_jax.model.hf.io import load_model, save_model
from coa_jax.model.variants import variant

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from comparing import TOLERANCE, greedy, ours, rms, rows, theirs  # noqa: E402
from models import difference  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

# Relative to the largest entry of each gradient.
GRADIENT_TOLERANCE = 1e-5
# Sequence lengths; together they fill a row of PACKED tokens except 2.
LENGTHS, PACKED = (100, 61, 37), 200


def folder(path: pathlib.Path, config: dict[str, Any], seed: int = 0) -> Any:
  """Writes a model folder with this config; returns Hugging Face's model."""
  written = json.dumps(config)
  (path / "config.json").write_text(written)
  model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
  rng = np.random.default_rng(seed)
  with torch.no_grad():
    for name, p in model.named_parameters():
      # Every matrix's inputs have about unit size, so that positions matter.
      std = p.shape[-1] ** -0.5 if p.ndim == 2 and "embed" not in name else 0.3
      mean = 1.0 if "norm" in name else 0.0
      p.copy_(torch.tensor(rng.normal(mean, std, p.shape)))
  model.save_pretrained(path)
  (path / "config.json").write_text(written)  # save_pretrained wrote its own
  return model.eval()


def sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[np.ndarray]:
  """Random token ids."""
  rng = np.random.default_rng(seed)
  return [rng.integers(0, drawn.VOCABULARY, n).astype(np.int32) for n in lengths]


def test_the_draw_has_everything():
  found = set()
  for config in drawn.CONFIGS.values():
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, width = config["num_attention_heads"], config["hidden_size"]
    found |= {
      config["model_type"],
      f"{heads} heads of {config['num_key_value_heads']}",
      f"tied {config['tie_word_embeddings']}",
      f"eps {config['rms_norm_eps']}",
      f"theta {config.get('rope_theta') or rope['rope_theta']}",
      *(f"{k} {rope[k]}" for k in ("factor", "truncate") if k in rope),
      *rope,
      *(k for k in ("layer_types", "max_window_layers") if k in config),
    }
    if "low_freq_factor" in rope:
      found |= {
        f"llama3 in {'rope_parameters' if 'rope_parameters' in config else 'scaling'}",
        f"llama3 tied {config['tie_word_embeddings']}",
        f"llama3 {'head_dim' in config}",
      }
    if config.get("head_dim", 0) * heads not in (0, width):
      found.add("heads of another size")
    if "head_dim" not in config:
      found.add("heads of the plain size")
  assert found >= {"qwen2", "qwen3", "layer_types", "max_window_layers"}
  assert found >= {f"{n} heads of {k}" for n, k in [(3, 1), (5, 1), (6, 3), (7, 7)]}
  assert found >= {"tied True", "tied False", "eps 1e-06", "eps 1e-05", "eps 0.001"}
  assert found >= {f"theta {x}" for x in (1e4, 5e4, 1e6)}
  assert found >= {f"factor {x}" for x in (1.0, 2.0, 4.0, 8.5)}
  assert found >= {"truncate True", "truncate False", "attention_factor", "beta_fast"}
  assert found >= {"type", "rope_type", "rope_theta"}
  assert found >= {"llama", "llama3 in rope_parameters", "llama3 in scaling"}
  assert found >= {f"llama3 {x}" for x in ("tied True", "tied False", True, False)}
  assert found >= {"heads of another size", "heads of the plain size"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn.CONFIGS)
def test_logits_are_the_same_padded_or_packed(tmp_path, seed: int):
  model = folder(tmp_path, drawn.CONFIGS[seed])
  cfg, params = load_model(tmp_path)
  ids = sequences()
  expected = theirs(model, ids)
  batch = rows([ids, *([x] for x in ids)], PACKED)
  worst = max(map(difference, ours(cfg, params, batch), expected * 2))
  print(f"largest difference, relative to the largest logit: {worst:.2e}")
  assert worst <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", drawn.CONFIGS)
def test_there_and_back_is_identical_to_the_bit(tmp_path, seed: int, dtype: str):
  first, second = tmp_path / "first", tmp_path / "second"
  first.mkdir()
  model = folder(first, drawn.CONFIGS[seed])
  model.to(getattr(torch, dtype)).save_pretrained(first)
  (first / "config.json").write_text(json.dumps(drawn.CONFIGS[seed]))
  load = LoadConfig(param_dtype=dtype, scan=seed % 2 == 1)
  save_model(second, *load_model(first, load), like=first)
  before, after = (load_file(p / "model.safetensors") for p in (first, second))
  assert set(before) == set(after)
  for name, x in before.items():
    assert x.dtype == after[name].dtype and x.shape == after[name].shape
    assert x.tobytes() == after[name].tobytes(), name
  # transformers reads the same configuration from both.
  a, b = (AutoConfig.from_pretrained(p).to_dict() for p in (first, second))
  for field in (
    "_name_or_path",
    "attention_bias",
    "dtype",
    "head_dim",
    "max_window_layers",
  ):
    a.pop(field, None)
    b.pop(field, None)
  for config in (a, b):
    rope = config["rope_parameters"]
    rope.pop("type", None)  # the old name of rope_type
    if rope["rope_type"] == "yarn":  # defaults
      rope |= {"truncate": True, "beta_fast": 32, "beta_slow": 1, **rope}
  assert a == b


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "scan"), [(2, False), (5, False), (16, True)])
def test_gradients_are_the_same(tmp_path, seed: int, scan: bool):
  model = folder(tmp_path, drawn.CONFIGS[seed])
  load = LoadConfig(scan=scan, logit_chunk=50 if scan else 0)
  cfg, params = load_model(tmp_path, load)
  ids = sequences()
  batch = rows([ids], PACKED)

  def mean_loss(params) -> jax.Array:
    logp_BT, *_ = log_probs.token_logps(cfg, params, batch)
    return log_probs.nll(logp_BT, batch.loss_mask_BT) / batch.loss_mask_BT.sum()

  loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
  # Theirs in float64: in float32 their error is as large as ours, 6e-6 for a key bias,
  # since its gradient is the small remainder of cancelling terms.
  expected, exact = their_gradient(model.double(), ids)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  # A gradient has the parameters' shapes, so save_model can write it.
  save_model(tmp_path / "gradient", cfg, gradient)
  found = load_file(tmp_path / "gradient" / "model.safetensors")
  assert set(found) == set(exact)
  each = {k: difference(found[k], x) for k, x in exact.items()}
  name = max(each, key=each.get)
  print(f"largest difference, relative to the largest entry: {each[name]:.2e} ({name})")
  assert each[name] <= GRADIENT_TOLERANCE


def their_gradient(model, ids: list[np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
  """The sequences' mean loss and its gradient, computed by torch."""
  batch = rows([[x] for x in ids], max(map(len, ids)))
  tokens, segment = torch.tensor(batch.tokens_BT), torch.tensor(batch.segment_BT)
  logp = model(tokens, attention_mask=segment).logits[:, :-1].log_softmax(-1)
  logp = logp.gather(-1, tokens[:, 1:, None].long())[..., 0]
  weight = torch.tensor(batch.loss_mask_BT)[:, 1:]
  loss = -(logp * weight).sum() / weight.sum()
  loss.backward()
  return loss.item(), {k: p.grad.numpy() for k, p in model.named_parameters()}


def test_logits_of_a_long_sequence_are_the_same(tmp_path):
  model = folder(tmp_path, drawn.CONFIGS[drawn.with_yarn()])
  cfg, params = load_model(tmp_path)
  assert cfg.yarn.factor * cfg.yarn.positions < 1000 / 7
  ids = sequences((1000,))
  (found,), (expected,) = ours(cfg, params, rows([ids], 1024)), theirs(model, ids)
  worst = difference(found, expected)
  print(f"largest difference, relative to the largest logit: {worst:.2e}")
  assert worst <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 5, 7, 18])
def test_bfloat16_is_as_near_to_float32_as_theirs(tmp_path, seed: int):
  model = folder(tmp_path, drawn.CONFIGS[seed])
  model.bfloat16().save_pretrained(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps(drawn.CONFIGS[seed]))
  cfg, params = load_model(
    tmp_path, LoadConfig(dtype="bfloat16", param_dtype="bfloat16")
  )
  ids = sequences()
  mine = np.concatenate(ours(cfg, params, rows([ids], PACKED)))
  other = np.concatenate(theirs(model, ids))
  exact = np.concatenate(theirs(model.float(), ids))  # the same rounded weights
  error, accepted = rms(mine - exact), rms(other - exact)
  size = rms(exact)
  print(f"of the logits' size: {error / size:.2e}, theirs {accepted / size:.2e}")
  # Two bfloat16 computations agree no better than each agrees with float32, so our
  # error may be about as large as theirs; one of 26,000 entries may be further off.
  assert 0 < error <= 1.2 * accepted
  assert np.abs(mine - exact).max() <= 2 * np.abs(other - exact).max()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [drawn.with_yarn(), 5, 14])
def test_greedy_decoding_is_the_same(tmp_path, seed: int):
  model = folder(tmp_path, drawn.CONFIGS[seed])
  cfg, params = load_model(tmp_path)
  prompts, new = sequences((21, 9)), 256
  found = greedy(cfg, params, prompts, new)
  for ids, mine in zip(prompts, found, strict=True):
    given = torch.tensor(ids[None])
    out = model.generate(
      given,
      attention_mask=torch.ones_like(given),
      do_sample=False,
      max_new_tokens=new,
      pad_token_id=0,
    )
    assert mine == out[0, len(ids) :].tolist()
    assert len(mine) == new


_LLAMA = {"qk_norm": False, "llama3": Llama3Rope(8.0, 32, 1.0, 4.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("changes", "name"),
  [
    ({"tie_embeddings": False}, "Qwen3ForCausalLM"),
    ({"tie_embeddings": False, **_LLAMA}, "LlamaForCausalLM"),
    ({"tie_embeddings": True, **_LLAMA}, "LlamaForCausalLM"),
    ({"tie_embeddings": True, "qk_norm": False}, "LlamaForCausalLM"),
  ],
)
def test_a_folder_of_ours_is_whole_to_transformers(tmp_path, changes, name: str):
  cfg = dataclasses.replace(toy.MODEL, **changes)
  params, tokenizer = transformer.init_params(cfg, 0), toy.tokenizer()
  save_model(tmp_path, cfg, params, tokenizer)
  model = AutoModelForCausalLM.from_pretrained(tmp_path)
  assert type(model).__name__ == name and model.dtype == torch.float32
  ids = sequences()
  expected = ours(cfg, params, rows([ids], PACKED))
  assert max(map(difference, theirs(model, ids), expected)) <= TOLERANCE
  found = transformers.AutoTokenizer.from_pretrained(tmp_path)
  text = "<think>caf\u00e9 12</think>"
  assert found.encode(text) == tokenizer.encode(text)
  assert tokenizer.hf.eos_token_id in model.generation_config.eos_token_id
  # Several files replace the single file, and the reverse.
  other = jax.tree.map(lambda x: x + 1, params)
  for shard_bytes, saved in ((20_000, other), (10**9, params)):
    save_model(tmp_path, cfg, saved, tokenizer, shard_bytes=shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    np.testing.assert_array_equal(loaded["model.norm.weight"], saved["final_norm"])
    head = saved["embed"].T if cfg.tie_embeddings else saved["head"]
    np.testing.assert_array_equal(loaded["lm_head.weight"].T, head)


@pytest.mark.soak
def test_logits_are_the_same_at_a_published_size(tmp_path):
  cfg = variant("qwen2.5-0.5b")
  rng = np.random.default_rng(0)

  def vary(x: jax.Array) -> jax.Array:
    """Adds noise to norms and biases: ones and zeros would hide errors."""
    small = x.ndim == 1 or (x.ndim == 2 and x.shape[-1] == cfg.head_dim)
    return x + 0.3 * rng.normal(size=x.shape).astype(np.float32) if small else x

  params = jax.tree.map(vary, transformer.init_params(cfg, 0))
  save_model(tmp_path, cfg, params)
  ids = [np.random.default_rng(1).integers(0, cfg.vocab_size, 24).astype(np.int32)]
  (found,) = ours(cfg, params, rows([ids], 24))
  del params
  model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
  assert sum(p.numel() for p in model.parameters()) == 494_032_768
  worst = difference(found, theirs(model, ids)[0])
  print(f"largest difference, relative to the largest logit: {worst:.2e}")
  assert worst <= TOLERANCE
