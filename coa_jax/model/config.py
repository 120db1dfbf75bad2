"""What a Qwen is, in numbers: its sizes and options, and `config.json` both ways.

Sources: Qwen2 (arXiv 2407.10671), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv
2505.09388) and the `config.json` files published with their weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from coa_jax.model.hf.fields import check_fields

REMAT = ("none", "full", "attention", "dots")
ATTENTION = ("auto", "xla", "cudnn", "splash")


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN: rotary frequencies stretched to more positions (arXiv 2309.00071).

  Attributes:
    factor: how many times more positions than `positions`.
    positions: the positions that the model was trained on.
    beta_fast: dimensions that turn more often than this are left alone.
    beta_slow: dimensions that turn less often are divided by `factor`.
    attention_factor: scales cosines and sines; 0 for 0.1 ln(factor) + 1.
    truncate: True rounds the bounds of the ramp between the two to whole dimensions.
  """

  factor: float
  positions: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float = 0.0
  truncate: bool = True

  def __post_init__(self):
    if not 1 <= self.factor < math.inf or self.positions < 1:
      raise ValueError(
        f"yarn needs factor and positions of at least 1, got {self.factor} and "
        f"{self.positions}"
      )
    for field in ("beta_fast", "beta_slow"):
      _check_positive(field, getattr(self, field))
    if not 0 <= self.attention_factor < math.inf:
      raise ValueError(
        f"attention_factor is {self.attention_factor}; 0 or more is right"
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Config section `model`; the defaults are the quickstart's.

  Attributes:
    vocab_size: V, rows of the embedding.
    width: D.
    layers: L.
    heads: N query heads.
    kv_heads: K key-value heads; divides N.
    head_dim: H; independent of D / N, even.
    ff: F, the SwiGLU's hidden width.
    rope_theta: base of the rotary frequencies.
    yarn: how they are stretched, if they are.
    windows: for each layer how many tokens a query sees, itself included, 0 for all;
      () where every layer sees all.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: True if the output matrix is the embedding.
    attention_bias: True for biases on q, k, v (Qwen2).
    qk_norm: True for RMSNorm on each query and key head (Qwen3).
    dtype: of activations; norms, softmax and log-probs are float32 whatever it is.
    param_dtype: of the parameters.
    weight_dtype: what parameters are rounded to where they are used; dtype where empty.
      bfloat16 under a dtype of float32 is a model whose sampler holds half-precision
      weights, and whose sampler and learner agree to float32's precision.
    product_dtype: what matrix products of a decoder round both factors to, with float32
      sums; dtype where empty. `decoding.architecture` sets it.
    scan: True if layers are stacked and scanned (training many layers).
    remat: what of a layer the backward pass recomputes: none, full (all of it),
      attention (all but the attention's output), dots (all but matrix products).
    attention: the kernel over packed rows: xla, cudnn (GPU), splash (TPU), or auto,
      which takes splash on TPU, cudnn on GPU in bfloat16, and xla elsewhere and where
      those do not take the model's head_dim or the rows' length.
    logit_chunk: tokens of a row whose logits exist at once in a loss; 0 for those that
      half a gigabyte of a device holds (SFT, where devices split rows alone: at most a
      quarter of its tokens).
  """

  vocab_size: int
  width: int = 128
  layers: int = 4
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 32
  ff: int = 384
  rope_theta: float = 10_000.0
  yarn: Yarn | None = None
  windows: tuple[int, ...] = ()
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  attention_bias: bool = False
  qk_norm: bool = True
  dtype: str = "float32"
  param_dtype: str = "float32"
  weight_dtype: str = ""
  product_dtype: str = ""
  scan: bool = False
  remat: str = "none"
  attention: str = "auto"
  logit_chunk: int = 0

  def __post_init__(self):
    sizes = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ff")
    for field in sizes:
      if getattr(self, field) < 1:
        raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
    for field in ("rope_theta", "norm_eps"):
      _check_positive(field, getattr(self, field))
    if self.heads % self.kv_heads:
      raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
    if self.head_dim % 2:
      raise ValueError(f"head_dim {self.head_dim} is odd; rotary halves need it even")
    if self.windows and len(self.windows) != self.layers:
      raise ValueError(
        f"windows has {len(self.windows)} entries for {self.layers} layers"
      )
    if any(size < 0 for size in self.windows):
      raise ValueError(f"windows has {min(self.windows)}; 0 is for all tokens")
    check_run_options(self)


@dataclasses.dataclass(frozen=True)
class LoadConfig:
  """Config section `model` of a run that starts from a model folder.

  What the folder does not decide; see ModelConfig.

  Attributes:
    dtype: of activations.
    param_dtype: of the parameters, whatever dtype the file has.
    weight_dtype: what parameters are rounded to where they are used; dtype where empty.
    scan: True if layers are stacked and scanned.
    remat: what of a layer the backward pass recomputes.
    attention: the kernel over packed rows.
    logit_chunk: tokens of a row whose logits exist at once in a loss; 0 for those that
      half a gigabyte of a device holds (SFT, where devices split rows alone: at most a
      quarter of its tokens).
  """

  dtype: str = "float32"
  param_dtype: str = "float32"
  weight_dtype: str = ""
  scan: bool = False
  remat: str = "none"
  attention: str = "auto"
  logit_chunk: int = 0

  def __post_init__(self):
    check_run_options(self)


def _check_positive(field: str, value: float) -> None:
  if not 0 < value < math.inf:
    raise ValueError(f"{field} is {value}; it must be a number above 0")


def check_run_options(config: ModelConfig | LoadConfig) -> None:
  """Refuses values of the fields that both kinds of config have.

  Raises:
    ValueError: naming the field, the value and what is accepted.
  """
  floats = ("float32", "bfloat16")
  choices = {
    "dtype": floats,
    "param_dtype": floats,
    "weight_dtype": ("", *floats),
    "remat": REMAT,
    "attention": ATTENTION,
  }
  for field, accepted in choices.items():
    value = getattr(config, field)
    if value not in accepted:
      raise ValueError(
        f"{field} {value!r}; accepted: {', '.join(filter(None, accepted))}"
      )
  if config.logit_chunk < 0:
    raise ValueError(f"logit_chunk {config.logit_chunk} is negative; 0 chooses it")


# config.json: Hugging Face's name -> ModelConfig's.
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
_ROPE_KINDS = ("default", "yarn")


def from_hf_config(config: dict[str, Any], where: str = "config.json") -> ModelConfig:
  """The architecture that a Hugging Face `config.json` describes.

  Raises:
    ValueError: the family is not Qwen2 or Qwen3, a needed field is missing, or a field
      is unknown or asks for something this model does not compute; the message names
      `where`, field and value.
  """
  family = config.get("model_type")
  if family not in ("qwen2", "qwen3"):
    raise ValueError(
      f"{where}: field 'model_type' is {family!r}; accepted: 'qwen2', 'qwen3'"
    )
  check_fields(config, where)
  # Qwen2 always has biases on q, k, v; with this field Qwen3 would have one on o too.
  bias = family == "qwen2"
  if config.get("attention_bias", bias) != bias:
    raise ValueError(
      f"{where}: field 'attention_bias' is {config['attention_bias']!r}; supported for "
      f"{family}: {bias!r}"
    )
  values = {
    ours: config[hf] for hf, ours in _FIELDS.items() if config.get(hf) is not None
  }
  missing = {"vocab_size", "width", "layers", "heads", "ff"} - set(values)
  if missing:
    names = sorted(hf for hf, ours in _FIELDS.items() if ours in missing)
    raise ValueError(f"{where}: lacks field {names[0]!r}")
  # What transformers takes where a field is null, and where it is left out.
  null = "num_key_value_heads" in config
  values.setdefault("kv_heads", values["heads"] if null else 32)
  if not null and values["heads"] % 32:
    raise ValueError(
      f"{where}: lacks field 'num_key_value_heads'; transformers then takes 32, which "
      f"does not divide 'num_attention_heads' {values['heads']}"
    )
  plain = 128 if family == "qwen3" else values["width"] // values["heads"]
  values.setdefault("head_dim", plain)
  values.setdefault("tie_embeddings", False)
  values["rope_theta"], values["yarn"] = _rotary(config, where)
  values["windows"] = _windows(config, values["layers"], where)
  try:
    return ModelConfig(**values, attention_bias=bias, qk_norm=not bias)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e


def _rotary(config: dict[str, Any], where: str) -> tuple[float, Yarn | None]:
  """Rotary base and stretching, in the layout of transformers 5 or of those before."""
  name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
  if config.get("rope_parameters") and config.get("rope_scaling"):
    raise ValueError(
      f"{where}: has 'rope_parameters' and 'rope_scaling', and readers differ in which "
      "counts; leave one of them"
    )
  rope = dict(config.get(name) or {})
  theta = float(rope.pop("rope_theta", config.get("rope_theta") or 10_000.0))
  kind = rope.pop("rope_type", rope.pop("type", "default"))
  rope.pop("type", None)
  if kind not in _ROPE_KINDS:
    raise ValueError(
      f"{where}: field '{name}.rope_type' is {kind!r}; supported: "
      f"{', '.join(map(repr, _ROPE_KINDS))}"
    )
  if kind == "default":
    for field, value in rope.items():
      raise ValueError(f"{where}: field '{name}.{field}' ({value!r}) is not supported")
    return theta, None
  longest = config.get("max_position_embeddings", 32_768)
  positions = rope.pop("original_max_position_embeddings", None) or longest
  values = {
    "factor": float(rope.pop("factor", None) or longest / positions),
    "positions": int(positions),
    "beta_fast": float(rope.pop("beta_fast", None) or 32),
    "beta_slow": float(rope.pop("beta_slow", None) or 1),
    "attention_factor": float(rope.pop("attention_factor", None) or 0),
    "truncate": rope.pop("truncate", True),
  }
  for field, value in rope.items():
    raise ValueError(f"{where}: field '{name}.{field}' ({value!r}) is not supported")
  try:
    return theta, Yarn(**values)
  except ValueError as e:
    raise ValueError(f"{where}: field '{name}': {e}") from e


def _windows(config: dict[str, Any], layers: int, where: str) -> tuple[int, ...]:
  """Tokens that each layer's queries see; () where all see all."""
  # Where the size is left out, transformers takes 4096.
  used = config.get("use_sliding_window", False)
  size = config.get("sliding_window", 4_096) if used else None
  kinds = config.get("layer_types")
  if kinds is None and not size:
    return ()
  if kinds is None:
    full = config.get("max_window_layers", 28)
    names = ("full_attention", "sliding_attention")
    kinds = [names[i >= full] for i in range(layers)]
  if len(kinds) != layers:
    raise ValueError(f"{where}: 'layer_types' has {len(kinds)} entries, not {layers}")
  for kind in kinds:
    if kind not in ("sliding_attention", "full_attention"):
      raise ValueError(
        f"{where}: field 'layer_types' has {kind!r}; supported: 'full_attention', "
        "'sliding_attention'"
      )
  if "sliding_attention" not in kinds:
    return ()
  if not size:
    raise ValueError(
      f"{where}: 'layer_types' has 'sliding_attention', but 'use_sliding_window' and "
      "'sliding_window' give it no size"
    )
  return tuple(size if k == "sliding_attention" else 0 for k in kinds)


def to_hf_config(cfg: ModelConfig) -> dict[str, Any]:
  """The `config.json` of an architecture; `from_hf_config` reads it back.

  Raises:
    ValueError: Hugging Face has no such architecture: neither Qwen2 (biases, no
      QK-norm) nor Qwen3 (QK-norm, no biases), or windows of several sizes.
  """
  if cfg.attention_bias == cfg.qk_norm:
    raise ValueError(
      "model.attention_bias and model.qk_norm must differ: Hugging Face has Qwen2 "
      "(biases) and Qwen3 (QK-norm), nothing between"
    )
  sizes = sorted({w for w in cfg.windows if w})
  if len(sizes) > 1:
    raise ValueError(f"model.windows has several sizes {sizes}; Hugging Face has one")
  name = "Qwen2" if cfg.attention_bias else "Qwen3"
  out = {
    "architectures": [f"{name}ForCausalLM"],
    "model_type": name.lower(),
    **{hf: getattr(cfg, ours) for hf, ours in _FIELDS.items()},
    "rope_theta": cfg.rope_theta,
    "hidden_act": "silu",
    "attention_bias": cfg.attention_bias,
    "use_sliding_window": bool(sizes),
    "max_position_embeddings": 32_768,
    "torch_dtype": cfg.param_dtype,
  }
  if sizes:
    kinds = {True: "sliding_attention", False: "full_attention"}
    out["sliding_window"] = sizes[0]
    out["layer_types"] = [kinds[w > 0] for w in cfg.windows]
    # For readers that know no layer_types; right where sliding layers come last.
    out["max_window_layers"] = sum(w == 0 for w in cfg.windows)
  if cfg.yarn:
    y = cfg.yarn
    out["max_position_embeddings"] = round(y.factor * y.positions)
    out["rope_scaling"] = {
      "rope_type": "yarn",
      "factor": y.factor,
      "original_max_position_embeddings": y.positions,
      "beta_fast": y.beta_fast,
      "beta_slow": y.beta_slow,
      "truncate": y.truncate,
      **({"attention_factor": y.attention_factor} if y.attention_factor else {}),
    }
  return out
