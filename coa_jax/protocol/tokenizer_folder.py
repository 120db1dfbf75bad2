"""Refuses a model folder's tokenizer files that would change or multiply text."""

from __future__ import annotations

import os
from typing import Any

from coa_jax.runtime.json_io import read_object, shown

_TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_MAX_TEMPLATE = 1_000_000  # bytes
# These map a character to a bounded number of characters, or remove some.
_NORMALIZERS = frozenset(
  ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents")
)
# These only add special tokens, and `encode` does not ask for special tokens.
_POST_PROCESSORS = frozenset(("ByteLevel", "BertProcessing", "RobertaProcessing"))


def check(file: str | os.PathLike[str]) -> None:
  """Checks a tokenizer.json before a library reads it.

  Raises:
    ValueError: the file is not a JSON object, its normalizer can make text longer, or
      its post-processor adds, repeats or drops tokens.
  """
  state = read_object(file)
  normalizer = state.get("normalizer")
  if not _normalizer_is_bounded(normalizer):
    raise ValueError(
      f"{file}: field 'normalizer' is {shown(normalizer)}; accepted: Unicode forms and "
      "replacements by a text that is no longer"
    )
  processor = state.get("post_processor")
  if not _keeps_tokens(processor):
    raise ValueError(
      f"{file}: field 'post_processor' is {shown(processor)}; accepted is one that "
      "keeps the tokens of a text and adds special tokens around them"
    )
  template = os.path.join(os.path.dirname(file), _TEMPLATE)
  if os.path.exists(template) and os.path.getsize(template) > _MAX_TEMPLATE:
    raise ValueError(f"{template}: longer than {_MAX_TEMPLATE} bytes")


def template_file(path: str | os.PathLike[str]) -> str:
  """Returns the folder's chat template file."""
  template = os.path.join(path, _TEMPLATE)
  return template if os.path.exists(template) else os.path.join(path, _CONFIG)


def _inner(value: dict[str, Any], key: str) -> list[Any]:
  """Returns a sequence's members."""
  members = value.get(key)
  return members if isinstance(members, list) else [members]


def _normalizer_is_bounded(value: Any) -> bool:
  if not isinstance(value, dict):
    return value is None
  kind = value.get("type")
  if kind == "Sequence":
    return all(map(_normalizer_is_bounded, _inner(value, "normalizers")))
  if kind != "Replace":
    return kind in _NORMALIZERS
  # Replacements that lengthen text multiply in a sequence; a regular expression can
  # match "".
  pattern = value.get("pattern")
  old = pattern.get("String") if isinstance(pattern, dict) else None
  new = value.get("content")
  if not isinstance(old, str) or not isinstance(new, str) or not old:
    return False
  return len(new.encode("utf-8", "replace")) <= len(old.encode("utf-8", "replace"))


def _keeps_tokens(value: Any) -> bool:
  if not isinstance(value, dict):
    return value is None
  kind = value.get("type")
  if kind == "Sequence":
    return all(map(_keeps_tokens, _inner(value, "processors")))
  if kind != "TemplateProcessing":
    return kind in _POST_PROCESSORS
  single = value.get("single")
  if not isinstance(single, list) or not all(isinstance(p, dict) for p in single):
    return False
  texts = [piece["Sequence"] for piece in single if "Sequence" in piece]
  return len(texts) == 1 and isinstance(texts[0], dict) and texts[0].get("id") == "A"
