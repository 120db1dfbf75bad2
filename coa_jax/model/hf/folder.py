"""Opens a model folder: what journeys need of it before its weights are read."""

from __future__ import annotations

import os

from coa_jax.model import sizes
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.io import load_config
from coa_jax.protocol.tokens import Tokenizer


def open_folder(
  path: str | os.PathLike[str], load: LoadConfig | None = None
) -> tuple[ModelConfig, Tokenizer]:
  """The architecture and the tokenizer of a model folder, which fit each other.

  Raises:
    FileNotFoundError, ValueError: as `load_config` and `Tokenizer.load`; or the model
      is larger than all devices together, or the tokenizer than its vocabulary.
  """
  file = os.path.join(path, "config.json")
  cfg = load_config(path, load)
  sizes.check_model(cfg, file)
  tokenizer = Tokenizer.load(path)
  if tokenizer.vocab_size > cfg.vocab_size:
    raise ValueError(
      f"{file}: field 'vocab_size' is {cfg.vocab_size}; the tokenizer.json there has "
      f"{tokenizer.vocab_size} ids"
    )
  return cfg, tokenizer
