"""What a Hugging Face `config.json` may hold: its fields, and the values of each.

`architecture` makes a model of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from coa_jax.json_io import shown

# What a value may be: in words, and the test.
_Kind = tuple[str, Callable[[Any], bool]]


def _whole(x: Any) -> bool:
  return type(x) is int and abs(x) < 2**63  # True is none, and 2.0 neither


def _number(x: Any) -> bool:
  return type(x) in (int, float) and abs(x) <= sys.float_info.max  # false for NaN


def _or_null(kind: _Kind) -> _Kind:
  words, test = kind
  return f"{words}, or null", lambda x: x is None or test(x)


_BOOL: _Kind = ("true or false", lambda x: type(x) is bool)
_COUNT: _Kind = (
  "a whole number of at least 1, of 64 bits",
  lambda x: _whole(x) and x >= 1,
)
# The deepest that are published have 1,000 (DeepNet, arXiv 2203.00555). Without a bound
# minutes and all memory would go before the weights turn out to have fewer.
_LAYERS: _Kind = (
  "a whole number from 1 to 1,000",
  lambda x: _whole(x) and 1 <= x <= 1_000,
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


def _only(*accepted: Any) -> _Kind:
  """Of fields that change the computation: the values that this model computes."""
  return repr(accepted[0]), lambda x: x in accepted


# Fields that say what the model computes.
_COMPUTED: dict[str, _Kind] = {
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
  "hidden_act": _only("silu"),
  "attention_dropout": _only(0.0, None),
  "use_mrope": _only(False, None),
  "pretraining_tp": _only(1, None),
}
_ROPE: dict[str, _Kind] = {
  "rope_theta": _POSITIVE,
  "factor": _or_null(_FROM_1),
  "original_max_position_embeddings": _or_null(_COUNT),
  "beta_fast": _or_null(_POSITIVE),
  "beta_slow": _or_null(_POSITIVE),
  "attention_factor": _or_null(_POSITIVE),
  "truncate": _BOOL,
}
# Fields that change nothing here: what a folder says of its origin and its tokenizer.
# They go through training unchanged (see weights.save_model).
CARRIED: dict[str, _Kind] = {
  "bos_token_id": _or_null(_ID),
  "eos_token_id": _or_null(_IDS),
  "initializer_range": _NOT_NEGATIVE,
  "max_position_embeddings": _COUNT,
  "pad_token_id": _or_null(_ID),
}
_IGNORED: dict[str, _Kind] = {
  "_name_or_path": _or_null(_TEXT),
  "architectures": _or_null(_NAMES),
  "dtype": _or_null(_TEXT),
  "model_type": _TEXT,
  "torch_dtype": _or_null(_TEXT),
  "transformers_version": _or_null(_TEXT),
  "use_cache": _or_null(_BOOL),
}


def check_fields(config: dict[str, Any], where: str) -> None:
  """Refuses fields that we do not know, and values that they can not have.

  Raises:
    ValueError: naming `where`, the field, its value and what is accepted.
  """
  kinds = _COMPUTED | CARRIED | _IGNORED
  for field, value in config.items():
    if field not in kinds:
      raise ValueError(
        f"{where}: field {field!r} ({shown(value)}) is not supported; remove it if it "
        "does not change what the model computes"
      )
  _check_kinds(config, kinds, where)
  for name in ("rope_scaling", "rope_parameters"):
    _check_kinds(config.get(name) or {}, _ROPE, where, f"{name}.")


def _check_kinds(
  values: dict[str, Any], kinds: dict[str, _Kind], where: str, before: str = ""
) -> None:
  for field, (accepted, test) in kinds.items():
    if field in values and not test(values[field]):
      raise ValueError(
        f"{where}: field '{before}{field}' is {shown(values[field])}; accepted: "
        f"{accepted}"
      )
