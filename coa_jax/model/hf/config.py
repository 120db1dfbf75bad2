"""Converts Hugging Face's `config.json` to a ModelConfig, and back.

The tables at the top list the model families and all known fields: fields that are
read, fields that would change the computation (with their neutral values), and fields
without effect. An unknown field is ignored with a warning, because every version of
transformers adds some.

budget: half tables, half their reader.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from coa_jax.model.config import (
  MOST_LAYERS,
  DeltaNet,
  Llama3Rope,
  ModelConfig,
  Yarn,
)
from coa_jax.runtime.json_io import shown

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Family:
  """A transformers model type that our transformer supports.

  The defaults are transformers', for fields missing in config.json.

  Attributes:
    name: prefix of the class NameForCausalLM.
    attention_bias: True for biases on q, k, v.
    qk_norm: True for RMSNorm on each query and key head.
    head_dim: the default; 0 for width / heads.
    kv_heads: the default; 0 for the number of heads.
    positions: the default for `max_position_embeddings`.
    divided: True if the width must be a multiple of the number of heads.
    hybrid: True if layers may use linear attention; attention is then gated, norms have
      an offset of 1, and only a part of each head is rotated.
  """

  name: str
  attention_bias: bool
  qk_norm: bool
  head_dim: int
  kv_heads: int
  positions: int
  divided: bool = False
  hybrid: bool = False


# model_type -> its properties.
FAMILIES = {
  "qwen2": Family("Qwen2", True, False, 0, 32, 32_768),
  "qwen3": Family("Qwen3", False, True, 128, 32, 32_768),
  "llama": Family("Llama", False, False, 0, 0, 2_048, divided=True),
  "qwen3_5_text": Family("Qwen3_5", False, True, 256, 4, 32_768, hybrid=True),
}
# Model type with a vision tower -> its decoder's, whose fields are in `text_config`.
_WITH_VISION = {"qwen3_5": "qwen3_5_text"}

# Accepted values: a description, and a test.
_Kind = tuple[str, Callable[[Any], bool]]


def _whole(x: Any) -> bool:
  return type(x) is int and abs(x) < 2**63  # neither True nor 2.0


def _number(x: Any) -> bool:
  return type(x) in (int, float) and abs(x) <= sys.float_info.max  # false for NaN


def _or_null(kind: _Kind) -> _Kind:
  words, test = kind
  return f"{words}, or null", lambda x: x is None or test(x)


def _only(*accepted: Any) -> _Kind:
  return repr(accepted[0]), lambda x: x in accepted


_BOOL: _Kind = ("true or false", lambda x: type(x) is bool)
_COUNT: _Kind = (
  "a whole number of at least 1, of 64 bits",
  lambda x: _whole(x) and x >= 1,
)
_LAYERS: _Kind = (
  f"a whole number from 1 to {MOST_LAYERS:,}",
  lambda x: _whole(x) and 1 <= x <= MOST_LAYERS,
)
_FROM_0: _Kind = ("a whole number of at least 0", lambda x: _whole(x) and x >= 0)
_POSITIVE: _Kind = ("a number above 0", lambda x: _number(x) and x > 0)
_FROM_1: _Kind = ("a number of at least 1", lambda x: _number(x) and x >= 1)
_NOT_NEGATIVE: _Kind = ("a number of at least 0", lambda x: _number(x) and x >= 0)
_NAMES: _Kind = (
  "a list of names",
  lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
)
_TEXT: _Kind = ("text", lambda x: isinstance(x, str))
_OBJECT: _Kind = ("an object", lambda x: isinstance(x, dict))
_ID: _Kind = ("a token's id", _whole)
_IDS: _Kind = (
  "a token's id or a list of such",
  lambda x: _whole(x) or (isinstance(x, list) and all(map(_whole, x))),
)
_ANYTHING: _Kind = ("anything", lambda x: True)
_OFF: _Kind = ("null, false or 0", lambda x: not x)
_SCALE_1: _Kind = _only(1.0, None)

_SHARE: _Kind = ("a number above 0, at most 1", lambda x: _number(x) and 0 < x <= 1)

# `layer_types`' name for a layer with full causal attention.
_FULL = "full_attention"
# A hybrid's name in `layer_types` -> our layer kind.
_KINDS = {_FULL: "attention", "linear_attention": "delta"}

# config.json field -> ModelConfig field with the same value.
_SAME = {
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
# Fields read, and their accepted values.
_READ: dict[str, _Kind] = {
  "vocab_size": _COUNT,
  "hidden_size": _COUNT,
  "num_hidden_layers": _LAYERS,
  "num_attention_heads": _COUNT,
  "num_key_value_heads": _or_null(_COUNT),
  "head_dim": _or_null(_COUNT),
  "intermediate_size": _COUNT,
  "rms_norm_eps": _POSITIVE,
  "tie_word_embeddings": _BOOL,
  "attention_bias": _BOOL,
  "rope_theta": _POSITIVE,
  "rope_scaling": _or_null(_OBJECT),
  "rope_parameters": _or_null(_OBJECT),
  "use_sliding_window": _BOOL,
  "sliding_window": _or_null(_COUNT),
  "max_window_layers": _FROM_0,
  "layer_types": _or_null(_NAMES),
}
# Fields of `rope_scaling` and `rope_parameters`; others there are refused.
_ROPE: dict[str, _Kind] = {
  "rope_theta": _POSITIVE,
  "partial_rotary_factor": _SCALE_1,
  "factor": _or_null(_FROM_1),
  "original_max_position_embeddings": _or_null(_COUNT),
  "beta_fast": _or_null(_POSITIVE),
  "beta_slow": _or_null(_POSITIVE),
  "attention_factor": _or_null(_POSITIVE),
  "truncate": _BOOL,
  "low_freq_factor": _POSITIVE,
  "high_freq_factor": _POSITIVE,
}
# A hybrid's additional fields, also in its `rope_parameters`. Text has one position per
# token, so its multimodal rotation (mrope) equals the plain rotation.
_HYBRID: dict[str, _Kind] = {
  "linear_num_key_heads": _COUNT,
  "linear_num_value_heads": _COUNT,
  "linear_key_head_dim": _COUNT,
  "linear_value_head_dim": _COUNT,
  "linear_conv_kernel_dim": _COUNT,
  "full_attention_interval": _COUNT,
  "partial_rotary_factor": _or_null(_SHARE),
  "attn_output_gate": _only(True, None),
  "output_gate_type": _only("swish", "silu", None),
  "mamba_ssm_dtype": _only("float32", None),
  "mlp_only_layers": _OFF,
  "mtp_num_hidden_layers": _ANYTHING,
  "mtp_use_dedicated_embeddings": _ANYTHING,
}
_HYBRID_ROPE: dict[str, _Kind] = {
  "partial_rotary_factor": _or_null(_SHARE),
  "mrope_section": _ANYTHING,
  "mrope_interleaved": _ANYTHING,
}
# DeltaNet field -> config.json field, and transformers' default.
_DELTA = {
  "key_heads": ("linear_num_key_heads", 16),
  "value_heads": ("linear_num_value_heads", 32),
  "key_dim": ("linear_key_head_dim", 128),
  "value_dim": ("linear_value_head_dim", 128),
  "conv": ("linear_conv_kernel_dim", 4),
}
# rope_type (also the ModelConfig field) -> its class, and config.json field -> class
# field.
_SCALINGS: dict[str, tuple[type, dict[str, str]]] = {
  "yarn": (
    Yarn,
    {
      "factor": "factor",
      "original_max_position_embeddings": "positions",
      "beta_fast": "beta_fast",
      "beta_slow": "beta_slow",
      "truncate": "truncate",
      "attention_factor": "attention_factor",
    },
  ),
  "llama3": (
    Llama3Rope,
    {
      "factor": "factor",
      "original_max_position_embeddings": "positions",
      "low_freq_factor": "low_freq_factor",
      "high_freq_factor": "high_freq_factor",
    },
  ),
}
# Decoder fields that would change the computation, with their neutral values; other
# values are refused.
_UNSUPPORTED: dict[str, _Kind] = {
  "hidden_act": _only("silu"),
  "hidden_activation": _only("silu", None),
  "is_causal": _only(True, None),
  "attention_dropout": _only(0.0, None),
  "pretraining_tp": _only(1, None),
  "use_mrope": _only(False, None),
  # Factors.
  "partial_rotary_factor": _SCALE_1,
  "embedding_multiplier": _SCALE_1,
  "residual_multiplier": _SCALE_1,
  "residual_weight": _SCALE_1,
  "logits_scaling": _SCALE_1,
  "logit_scale": _SCALE_1,
  "attention_multiplier": _OFF,
  "query_pre_attn_scalar": _OFF,
  "attn_logit_softcapping": _OFF,
  "final_logit_softcapping": _OFF,
  "attn_temperature_tuning": _OFF,
  # Dropout.
  "embd_pdrop": _OFF,
  "embedding_dropout": _OFF,
  "hidden_dropout": _OFF,
  "resid_pdrop": _OFF,
  "residual_dropout": _OFF,
  # Other layers, or parameters absent from our model.
  "mlp_bias": _OFF,
  "use_bias": _OFF,
  "qkv_bias": _OFF,
  "use_qkv_bias": _OFF,
  "attention_out_bias": _OFF,
  "use_qk_norm": _OFF,
  "qk_layernorm": _OFF,
  "clip_qkv": _OFF,
  "use_parallel_residual": _OFF,
  "per_layer_config": _OFF,
  "num_kv_shared_layers": _OFF,
  "num_experts": _OFF,
  "num_local_experts": _OFF,
  "n_routed_experts": _OFF,
  "n_shared_experts": _OFF,
  "kv_lora_rank": _OFF,
  "q_lora_rank": _OFF,
  "quantization_config": _OFF,
  # Other positions, or another mask.
  "original_max_position_embeddings": _OFF,
  "rope_interleave": _OFF,
  "rope_interleaved": _OFF,
  "no_rope_layers": _OFF,
  "no_rope_layer_interval": _OFF,
  "attention_chunk_size": _OFF,
  "dual_chunk_attention_config": _OFF,
  "sliding_window_pattern": _OFF,
  "use_bidirectional_attention": _OFF,
  "is_encoder_decoder": _OFF,
  "add_cross_attention": _OFF,
}
# Fields without effect here, about a folder's origin and tokenizer. Training keeps them
# (see `io.save_model`).
CARRIED: dict[str, _Kind] = {
  "bos_token_id": _or_null(_ID),
  "eos_token_id": _or_null(_IDS),
  "initializer_range": _NOT_NEGATIVE,
  "max_position_embeddings": _COUNT,
  "pad_token_id": _or_null(_ID),
}
# Other fields without effect. A field in none of the tables gives a warning.
_IGNORED: dict[str, _Kind] = {
  "_name_or_path": _or_null(_TEXT),
  "architectures": _or_null(_NAMES),
  "chunk_size_feed_forward": _ANYTHING,
  "dtype": _or_null(_TEXT),
  "id2label": _ANYTHING,
  "label2id": _ANYTHING,
  "model_type": _TEXT,
  "output_attentions": _ANYTHING,
  "output_hidden_states": _ANYTHING,
  "problem_type": _ANYTHING,
  "return_dict": _ANYTHING,
  "torch_dtype": _or_null(_TEXT),
  "transformers_version": _or_null(_TEXT),
  "use_cache": _or_null(_BOOL),
}


def from_hf_config(config: dict[str, Any], where: str = "config.json") -> ModelConfig:
  """Reads the architecture from a Hugging Face `config.json`.

  Unknown fields are ignored, with one warning that names them.

  Raises:
    ValueError: the family is not in FAMILIES, a required field is missing, or a field's
      value is invalid or unsupported; the message names `where`, field and value.
  """
  # --- The family, and each field's value by itself.
  config = decoder_fields(config, where)
  model_type = config.get("model_type")
  if not isinstance(model_type, str) or model_type not in FAMILIES:
    raise ValueError(
      f"{where}: field 'model_type' is {shown(model_type)}; accepted: "
      f"{', '.join(map(repr, [*FAMILIES, *_WITH_VISION]))}"
    )
  family = FAMILIES[model_type]
  _check_fields(config, family, where)
  # Qwen2 always has q, k and v biases; elsewhere this field would add an o bias too.
  bias = family.attention_bias
  if config.get("attention_bias", bias) != bias:
    raise ValueError(
      f"{where}: field 'attention_bias' is {config['attention_bias']!r}; supported for "
      f"{model_type}: {bias!r}"
    )

  # --- Fields with the same value under another name.
  values = {}
  missing = []
  for hf, ours in _SAME.items():
    if config.get(hf) is not None:
      values[ours] = config[hf]
    elif ours in ("vocab_size", "width", "layers", "heads", "ff"):
      missing.append(hf)
  if missing:
    raise ValueError(f"{where}: lacks field {min(missing)!r}")

  # --- transformers' defaults for null and missing fields.
  is_null = "num_key_value_heads" in config or not family.kv_heads
  if is_null:
    values.setdefault("kv_heads", values["heads"])
  values.setdefault("kv_heads", family.kv_heads)
  if not is_null and values["heads"] % values["kv_heads"]:
    raise ValueError(
      f"{where}: lacks field 'num_key_value_heads'; transformers then takes "
      f"{values['kv_heads']}, which does not divide 'num_attention_heads' "
      f"{values['heads']}"
    )
  values.setdefault("head_dim", family.head_dim or values["width"] // values["heads"])
  values.setdefault("tie_embeddings", False)

  # --- Rotary scaling, with its own layout; a hybrid's own fields.
  values |= _rope(config, family, where)
  if family.hybrid:
    values |= _hybrid(config, values, where)
  else:
    _check_layer_types(config, values["layers"], where)
  try:
    cfg = ModelConfig(**values, attention_bias=bias, qk_norm=family.qk_norm)
    _check_family(cfg, family)
  except ValueError as e:
    raise ValueError(f"{where}: {e}") from e
  return cfg


def decoder_fields(
  config: dict[str, Any], where: str = "config.json"
) -> dict[str, Any]:
  """Returns the decoder's fields: `text_config`'s if the model has a vision tower.

  Raises:
    ValueError: `text_config` is no object, or contradicts the outer fields.
  """
  inner_type = _WITH_VISION.get(str(config.get("model_type")))
  if inner_type is None:
    return config
  inner = config.get("text_config")
  if not isinstance(inner, dict):
    raise ValueError(
      f"{where}: field 'text_config' is {shown(inner)}; accepted: an object"
    )
  inner = {"model_type": inner_type, **inner}
  for field in ("tie_word_embeddings", "quantization_config"):
    outer = config.get(field)
    if outer is not None and inner.setdefault(field, outer) != outer:
      raise ValueError(
        f"{where}: field {field!r} is {shown(outer)}, and {shown(inner[field])} in "
        "'text_config'; readers differ in which counts: make them equal"
      )
  return inner


def _hybrid(
  config: dict[str, Any], values: dict[str, Any], where: str
) -> dict[str, Any]:
  """Reads a hybrid's additional fields."""
  # --- Layer kinds: listed, or full attention at regular intervals.
  layers = values["layers"]
  names = config.get("layer_types")
  if names is None:
    interval = config.get("full_attention_interval", 4)
    names = ["linear_attention"] * layers
    names[interval - 1 :: interval] = [_FULL] * (layers // interval)
  if len(names) != layers:
    raise ValueError(f"{where}: 'layer_types' has {len(names)} entries, not {layers}")
  for name in names:
    if name not in _KINDS:
      raise ValueError(
        f"{where}: field 'layer_types' has {shown(name)}; supported: "
        f"{', '.join(map(repr, _KINDS))}"
      )
  kinds = tuple(_KINDS[name] for name in names)
  period = next(n for n in range(1, layers + 1) if kinds[:n] * (layers // n) == kinds)

  # --- A head's rotated part, and linear attention's sizes.
  rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
  share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
  out: dict[str, Any] = {
    "attention_gate": True,
    "norm_offset": True,
    "layer_kinds": kinds[:period],
    "rotary_dim": int(values["head_dim"] * (share or 0.25)),
  }
  if "delta" in kinds:
    sizes = {ours: config.get(hf, default) for ours, (hf, default) in _DELTA.items()}
    try:
      out["delta"] = DeltaNet(**sizes)
    except ValueError as e:
      raise ValueError(f"{where}: {e}") from e
  return out


def to_hf_config(cfg: ModelConfig) -> dict[str, Any]:
  """Returns an architecture's `config.json`; `from_hf_config` reads it back.

  Raises:
    ValueError: Hugging Face has no such architecture: no family has these biases and
      norms, or transformers refuses the sizes.
  """
  model_type, family = _family_of(cfg)
  _check_family(cfg, family)

  # --- The sizes, and fields required by every reader.
  out = {
    "architectures": [f"{family.name}ForCausalLM"],
    "model_type": model_type,
    **{hf: getattr(cfg, ours) for hf, ours in _SAME.items()},
    "rope_theta": cfg.rope_theta,
    "hidden_act": "silu",
    "attention_bias": cfg.attention_bias,
    "max_position_embeddings": 32_768,
    "torch_dtype": cfg.param_dtype,
  }

  # --- A hybrid's own fields; its rotary fields are in one object.
  if family.hybrid:
    names = {kind: name for name, kind in _KINDS.items()}
    out["layer_types"] = [names[kind] for kind in cfg.kinds]
    if cfg.delta:
      for ours, (hf, _) in _DELTA.items():
        out[hf] = getattr(cfg.delta, ours)
      out["mamba_ssm_dtype"] = "float32"  # else vLLM's states have the model's dtype
    out["rope_parameters"] = {
      "rope_type": "default",
      "rope_theta": out.pop("rope_theta"),
      "partial_rotary_factor": (cfg.rotary_dim or cfg.head_dim) / cfg.head_dim,
    }

  # --- Rotary scaling, which increases the number of positions.
  for kind, (_, names) in _SCALINGS.items():
    scaling = getattr(cfg, kind)
    if not scaling:
      continue
    stated = {"rope_type": kind}
    for hf, ours in names.items():
      value = getattr(scaling, ours)
      # 0 means unset: readers then compute the value.
      if value or value is False:
        stated[hf] = value
    out["max_position_embeddings"] = round(scaling.factor * scaling.positions)
    if family.hybrid:
      out["rope_parameters"] |= stated
    else:
      out["rope_scaling"] = stated
  return out


def _family_of(cfg: ModelConfig) -> tuple[str, Family]:
  """Returns an architecture's model type and its row in FAMILIES."""
  if cfg.attention_gate != cfg.norm_offset:
    raise ValueError(
      f"model.attention_gate is {cfg.attention_gate} and model.norm_offset "
      f"{cfg.norm_offset}; Hugging Face has both or neither"
    )
  for model_type, family in FAMILIES.items():
    theirs = (family.attention_bias, family.qk_norm, family.hybrid)
    if theirs == (cfg.attention_bias, cfg.qk_norm, cfg.attention_gate):
      return model_type, family
  known = [f"{f.name}: {f.attention_bias} and {f.qk_norm}" for f in FAMILIES.values()]
  raise ValueError(
    f"model.attention_bias is {cfg.attention_bias} and model.qk_norm {cfg.qk_norm}; "
    f"Hugging Face has {'; '.join(known)}"
  )


def _check_family(cfg: ModelConfig, family: Family) -> None:
  """Refuses sizes that transformers refuses for this family."""
  who = f"{family.name} (attention_bias={cfg.attention_bias}, qk_norm={cfg.qk_norm})"
  if not family.hybrid and (cfg.delta or cfg.rotary_dim):
    raise ValueError(
      f"model.delta and model.rotary_dim: of {who} transformers has neither"
    )
  if family.divided and cfg.width % cfg.heads:
    raise ValueError(
      f"heads {cfg.heads} do not divide width {cfg.width}, but of {who} transformers "
      "takes no others"
    )


def _check_fields(config: dict[str, Any], family: Family, where: str) -> None:
  """Refuses invalid values, and warns of unknown fields.

  Raises:
    ValueError: a value is invalid; the message names `where`, the field, the value and
      the accepted values.
  """
  kinds = _READ | _UNSUPPORTED | CARRIED | _IGNORED
  rope = _ROPE
  if family.hybrid:
    kinds |= _HYBRID
    rope = rope | _HYBRID_ROPE
  _check_kinds(config, kinds, where)
  for name in ("rope_scaling", "rope_parameters"):
    _check_kinds(config.get(name) or {}, rope, where, f"{name}.")
  unknown = sorted(config.keys() - kinds.keys())
  if unknown:
    _warn(where, ", ".join(map(shown, unknown)))


def _check_kinds(
  values: dict[str, Any], kinds: dict[str, _Kind], where: str, before: str = ""
) -> None:
  for field, (accepted, test) in kinds.items():
    if field in values and not test(values[field]):
      raise ValueError(
        f"{where}: field '{before}{field}' is {shown(values[field])}; accepted: "
        f"{accepted}"
      )


@functools.lru_cache(maxsize=64)
def _warn(where: str, fields: str) -> None:
  """Warns once per file, however often a run reads it."""
  _log.warning(
    "%s: ignored fields that are not known to change what the model computes: %s",
    where,
    fields,
  )


def _rope(config: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
  """Reads rotary base and scaling, in transformers 5's layout or the earlier one."""
  # --- The object; a field is removed when it is read.
  name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
  if config.get("rope_parameters") and config.get("rope_scaling"):
    raise ValueError(
      f"{where}: has 'rope_parameters' and 'rope_scaling', and readers differ in which "
      "counts; leave one of them"
    )
  rope = dict(config.get(name) or {})

  # --- The base, which transformers 5 has inside, and the scaling's kind.
  theta = float(rope.pop("rope_theta", config.get("rope_theta") or 10_000.0))
  kind = rope.pop("rope_type", rope.pop("type", "default"))
  rope.pop("type", None)
  for field in _HYBRID_ROPE if family.hybrid else ("partial_rotary_factor",):
    rope.pop(field, None)
  if kind not in ("default", *_SCALINGS):
    accepted = ", ".join(map(repr, ("default", *_SCALINGS)))
    raise ValueError(
      f"{where}: field '{name}.rope_type' is {shown(kind)}; supported: {accepted}"
    )

  # --- The scaling's own fields.
  out: dict[str, Any] = {"rope_theta": theta}
  if kind in _SCALINGS:
    longest = config.get("max_position_embeddings", family.positions)
    try:
      out[kind] = _read_scaling(kind, rope, longest)
    except ValueError as e:
      raise ValueError(f"{where}: field '{name}': {e}") from e
  # The rest would change the rotation, and is not supported.
  if rope:
    field, value = next(iter(rope.items()))
    raise ValueError(
      f"{where}: field '{name}.{field}' ({shown(value)}) is not supported"
    )
  return out


def _read_scaling(kind: str, rope: dict[str, Any], longest: int) -> Yarn | Llama3Rope:
  """Moves the fields of this kind of scaling from `rope` into its dataclass."""
  cls, names = _SCALINGS[kind]
  values = {}
  for hf, ours in names.items():
    value = rope.pop(hf, None)
    if value is None:
      continue
    # Files may write 4 for 4.0; only positions are a whole number.
    if _whole(value) and ours != "positions":
      value = float(value)
    values[ours] = value
  # transformers' defaults for missing fields.
  values.setdefault("positions", longest)
  if kind == "yarn":
    values.setdefault("factor", longest / values["positions"])
  for hf, ours in names.items():
    needed = getattr(cls, ours, None) is None  # a default is a class attribute
    if needed and ours not in values:
      raise ValueError(f"lacks {hf!r}, which {kind!r} needs")
  return cls(**values)


def _check_layer_types(config: dict[str, Any], layers: int, where: str) -> None:
  """Refuses layers without full attention, such as sliding-window layers."""
  # --- Newer files list every layer's kind.
  kinds = config.get("layer_types")
  if kinds is not None:
    if len(kinds) != layers:
      raise ValueError(f"{where}: 'layer_types' has {len(kinds)} entries, not {layers}")
    for kind in kinds:
      if kind != _FULL:
        raise ValueError(
          f"{where}: field 'layer_types' has {shown(kind)}; supported: {_FULL!r}"
        )
    return

  # --- Older files state the first sliding layer; transformers' defaults: 4096, 28.
  size = config.get("sliding_window", 4_096)
  first = config.get("max_window_layers", 28)
  if config.get("use_sliding_window") and size and first < layers:
    raise ValueError(
      f"{where}: field 'use_sliding_window' is True, which gives sliding-window "
      f"attention to {layers - first} of {layers} layers; supported: False"
    )
