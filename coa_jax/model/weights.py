"""Model folders in Hugging Face's layout: config.json, safetensors, tokenizer.

One table names every array in both layouts and is used in both directions. A model is a
folder everywhere in this project: what SFT writes is what RL, evaluation, transformers
and vLLM read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

import jax
import numpy as np
import safetensors
from safetensors.numpy import save_file

from coa_jax.model.qwen import Qwen, QwenConfig, stack, unstack

# Ours: (Hugging Face's name, number of leading input axes; 0 for vectors). Hugging Face
# stores a matrix as [outputs, inputs], ours are [inputs..., outputs...].
_LAYER = {
  "attn_norm": ("input_layernorm.weight", 0),
  "q": ("self_attn.q_proj.weight", 1),
  "k": ("self_attn.k_proj.weight", 1),
  "v": ("self_attn.v_proj.weight", 1),
  "q_bias": ("self_attn.q_proj.bias", 0),
  "k_bias": ("self_attn.k_proj.bias", 0),
  "v_bias": ("self_attn.v_proj.bias", 0),
  "q_norm": ("self_attn.q_norm.weight", 0),
  "k_norm": ("self_attn.k_norm.weight", 0),
  "o": ("self_attn.o_proj.weight", 2),
  "ff_norm": ("post_attention_layernorm.weight", 0),
  "gate": ("mlp.gate_proj.weight", 1),
  "up": ("mlp.up_proj.weight", 1),
  "down": ("mlp.down_proj.weight", 1),
}
# config.json: Hugging Face's name -> QwenConfig's.
_FIELDS = {
  "vocab_size": "vocab_size",
  "hidden_size": "width",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "num_key_value_heads": "kv_heads",
  "head_dim": "head_dim",
  "intermediate_size": "ff",
  "rms_norm_eps": "norm_eps",
  "tie_word_embeddings": "tie_embeddings",
}
# Fields that change the computation, with the one value this model computes.
_REQUIRED = {
  "hidden_act": ("silu",),
  "rope_scaling": (None,),
  "use_sliding_window": (False, None),
  "attention_dropout": (0.0, 0, None),
}


@dataclasses.dataclass(frozen=True)
class LoadConfig:
  """Config section `model` of a run that starts from a model folder.

  What the folder does not decide; see QwenConfig.

  Attributes:
    dtype: of activations.
    param_dtype: of the parameters, whatever dtype the file has.
    scan: True if layers are stacked and scanned.
    remat: what the backward pass recomputes.
  """

  dtype: str = "float32"
  param_dtype: str = "float32"
  scan: bool = False
  remat: str = "none"


def from_hf_config(config: dict[str, Any], where: str = "config.json") -> QwenConfig:
  """The architecture that a Hugging Face `config.json` describes.

  Raises:
    ValueError: the family is not Qwen2 or Qwen3, or a field asks for something this
      model does not compute; the message names `where`, field and value.
  """
  family = config.get("model_type")
  if family not in ("qwen2", "qwen3"):
    raise ValueError(
      f"{where}: field 'model_type' is {family!r}; accepted: 'qwen2', 'qwen3'"
    )
  for field, accepted in _REQUIRED.items():
    if field in config and config[field] not in accepted:
      raise ValueError(
        f"{where}: field {field!r} is {config[field]!r}; supported: {accepted[0]!r}"
      )
  rope = config.get("rope_parameters") or {}
  if rope.get("rope_type", "default") != "default":
    raise ValueError(
      f"{where}: field 'rope_parameters.rope_type' is {rope['rope_type']!r}; "
      "supported: 'default'"
    )
  if family == "qwen3" and config.get("attention_bias"):
    raise ValueError(f"{where}: field 'attention_bias' is True; supported: False")
  values = {ours: config[hf] for hf, ours in _FIELDS.items() if hf in config}
  missing = {"vocab_size", "width", "layers", "heads", "ff"} - set(values)
  if missing:
    names = sorted(hf for hf, ours in _FIELDS.items() if ours in missing)
    raise ValueError(f"{where}: lacks field {names[0]!r}")
  values.setdefault("kv_heads", values["heads"])
  values.setdefault("head_dim", values["width"] // values["heads"])
  values.setdefault("tie_embeddings", False)
  theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
  return QwenConfig(
    **values,
    rope_theta=float(theta),
    attention_bias=family == "qwen2",
    qk_norm=family == "qwen3",
  )


def to_hf_config(cfg: QwenConfig) -> dict[str, Any]:
  """The `config.json` of an architecture; `from_hf_config` reads it back.

  Raises:
    ValueError: neither Qwen2 (biases, no QK-norm, H = D / N) nor Qwen3 (QK-norm, no
      biases) is this architecture.
  """
  qwen2 = cfg.attention_bias and not cfg.qk_norm
  if not qwen2 and (cfg.attention_bias or not cfg.qk_norm):
    raise ValueError(
      "model.attention_bias and model.qk_norm must differ: Hugging Face has Qwen2 "
      "(biases) and Qwen3 (QK-norm), nothing between"
    )
  if qwen2 and cfg.head_dim * cfg.heads != cfg.width:
    raise ValueError("Qwen2 needs model.head_dim == model.width / model.heads")
  family = "qwen2" if qwen2 else "qwen3"
  return {
    "architectures": ["Qwen2ForCausalLM" if qwen2 else "Qwen3ForCausalLM"],
    "model_type": family,
    **{hf: getattr(cfg, ours) for hf, ours in _FIELDS.items()},
    "rope_theta": cfg.rope_theta,
    "hidden_act": "silu",
    "attention_bias": cfg.attention_bias,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "torch_dtype": cfg.param_dtype,
  }


def _names(params: dict[str, Any], layers: int) -> dict[str, tuple[tuple, int]]:
  """Hugging Face name -> (path in the unstacked tree, leading input axes)."""
  table = {
    "model.embed_tokens.weight": (("embed",), 0),
    "model.norm.weight": (("final_norm",), 0),
  }
  if "head" in params:
    table["lm_head.weight"] = (("head",), 1)
  for i in range(layers):
    for ours, (hf, inputs) in _LAYER.items():
      if ours in params[f"layer_{i}"]:
        table[f"model.layers.{i}.{hf}"] = ((f"layer_{i}", ours), inputs)
  return table


def save_model(path: str | os.PathLike[str], cfg: QwenConfig, params: Any) -> None:
  """Writes config.json and model.safetensors into the folder `path`.

  Args:
    path: made if missing.
    cfg: the architecture.
    params: its parameters, layers stacked or not.

  Raises:
    ValueError: Hugging Face has no such architecture (see `to_hf_config`).
  """
  path = os.fspath(path)
  config = to_hf_config(cfg)
  os.makedirs(path, exist_ok=True)
  params = jax.device_get(unstack(params, cfg.layers))
  tensors = {}
  for name, (keys, inputs) in _names(params, cfg.layers).items():
    x = params
    for key in keys:
      x = x[key]
    if inputs:
      x = x.reshape(math.prod(x.shape[:inputs]), -1).T
    elif name.endswith("bias"):
      x = x.reshape(-1)
    tensors[name] = np.ascontiguousarray(x)
  file = os.path.join(path, "model.safetensors")
  save_file(tensors, file + ".tmp", metadata={"format": "pt"})
  os.replace(file + ".tmp", file)
  with open(os.path.join(path, "config.json"), "w") as f:
    json.dump(config, f, indent=2, sort_keys=True)


def load_model(
  path: str | os.PathLike[str], load: LoadConfig | None = None
) -> tuple[QwenConfig, dict[str, Any]]:
  """Reads a model folder: a single safetensors file, or shards with an index.

  Args:
    path: the folder.
    load: what the folder does not decide; None for the defaults.

  Returns:
    The architecture and its parameters as numpy arrays, stacked if `scan`.

  Raises:
    FileNotFoundError: config.json or a shard is missing.
    ValueError: an array is missing, left over, or of the wrong shape (all are listed),
      or config.json is not supported.
  """
  path = os.fspath(path)
  file = os.path.join(path, "config.json")
  if not os.path.exists(file):
    raise FileNotFoundError(f"{file}: not a model folder (no config.json)")
  with open(file) as f:
    cfg = from_hf_config(json.load(f), file)
  cfg = dataclasses.replace(cfg, **dataclasses.asdict(load or LoadConfig()))
  plain = dataclasses.replace(cfg, scan=False)
  one = jax.ShapeDtypeStruct((1, 1), np.int32)
  shapes = jax.eval_shape(Qwen(plain).init, jax.random.key(0), one, one, one)["params"]
  table = _names(shapes, cfg.layers)
  params: dict[str, Any] = {}
  faults, seen = [], set()
  for name, x in _tensors(path):
    if name not in table:
      if name != "lm_head.weight":  # written by some tools beside tied embeddings
        faults.append(f"unknown {name} {tuple(x.shape)}")
      continue
    seen.add(name)
    keys, inputs = table[name]
    want, parent = shapes, params
    for key in keys:
      want = want[key]
    for key in keys[:-1]:
      parent = parent.setdefault(key, {})
    stored = want.shape
    if inputs:
      stored = (
        math.prod(want.shape[inputs:]),
        math.prod(want.shape[:inputs]),
      )
    elif name.endswith("bias"):
      stored = (math.prod(want.shape),)
    if tuple(x.shape) != tuple(stored):
      faults.append(f"{name} has shape {tuple(x.shape)}, expected {tuple(stored)}")
      continue
    x = x.T if inputs else x
    parent[keys[-1]] = np.ascontiguousarray(x).reshape(want.shape).astype(want.dtype)
  faults += [f"missing {name}" for name in table if name not in seen]
  if faults:
    raise ValueError(f"{path}: the weights do not fit config.json: {'; '.join(faults)}")
  return cfg, stack(params, cfg.layers) if cfg.scan else params


def _tensors(path: str):
  """Yields (name, array) of every safetensors file that the folder names."""
  index = os.path.join(path, "model.safetensors.index.json")
  files = ["model.safetensors"]
  if os.path.exists(index):
    with open(index) as f:
      files = sorted(set(json.load(f)["weight_map"].values()))
  for file in files:
    file = os.path.join(path, file)
    if not os.path.exists(file):
      raise FileNotFoundError(f"{file}: the weights are missing")
    try:
      with safetensors.safe_open(file, framework="flax") as f:
        for name in f.keys():  # noqa: SIM118  (not a dict)
          yield name, np.asarray(f.get_tensor(name))
    except safetensors.SafetensorError as e:
      raise ValueError(f"{file}: damaged safetensors file ({e})") from e
