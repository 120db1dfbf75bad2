"""A run's two ends: its initial model folder and its output folders."""

from __future__ import annotations

import json
import os
from typing import Any

import jax
import numpy as np

from coa_jax.model.config import ModelConfig
from coa_jax.model.hf.io import gather, save_model
from coa_jax.model.hf.names import Entry, hf_name, sections_of
from coa_jax.model.hf.stored import save_tensors
from coa_jax.model.lora import LoraConfig, merged
from coa_jax.model.sharding import name_of
from coa_jax.model.transformer import unstack
from coa_jax.protocol.origin import Origin
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.runtime.bucket.inputs import named


def load_tokenizer(path: str | os.PathLike[str], cfg: ModelConfig) -> Tokenizer:
  """Reads a model folder's tokenizer, and checks that it fits the architecture.

  Raises:
    FileNotFoundError, ValueError: as `Tokenizer.load`; or the tokenizer has more ids
      than the model, or there is no chat template.
  """
  tokenizer = Tokenizer.load(path)
  if tokenizer.vocab_size > cfg.vocab_size:
    raise ValueError(
      f"{os.path.join(path, 'config.json')}: field 'vocab_size' is {cfg.vocab_size}; "
      f"the tokenizer.json there has {tokenizer.vocab_size} ids"
    )
  _ = tokenizer.chat_frame  # a folder without a chat template is refused here
  return tokenizer


def save_run(
  workdir: str,
  cfg: ModelConfig,
  trained: Any,
  frozen: Any,
  config: LoraConfig | None,
  tokenizer: Tokenizer,
  like: str,
  origin: Origin | None = None,
) -> Any:
  """Writes `workdir/model` and, after training adapters, `workdir/adapter`.

  All processes call this function; the first one writes.

  Args:
    trained: `lora.split`'s first half, after training.
    frozen: the other half.
    like: the initial model folder; "" for none.
    origin: how the model was trained, for `coa.json` in both folders; None if unknown.

  Returns:
    The parameters in `workdir/model`, with adapters merged.
  """
  params = merged(trained, frozen, config)
  save_model(os.path.join(workdir, "model"), cfg, params, tokenizer, like)
  if config:
    save_adapter(os.path.join(workdir, "adapter"), cfg, trained, config, like)
  if origin and jax.process_index() == 0:
    for name in ("model", "adapter") if config else ("model",):
      origin.write(os.path.join(workdir, name))
  return params


def save_adapter(
  path: str | os.PathLike[str],
  cfg: ModelConfig,
  adapters: dict[str, Any],
  config: LoraConfig,
  base: str,
) -> None:
  """Writes adapter_config.json and adapter_model.safetensors in peft's format.

  All processes call this function; the first one writes.

  Args:
    adapters: a tree as from `init_adapters`.
    base: the base model's name or folder.
  """
  # Gathering is a collective, so every process takes part.
  tensors = {}
  whole = jax.tree.map(gather, adapters)
  if jax.process_index() > 0:
    return
  # --- Arrays under peft's names, as [outputs, inputs] like Hugging Face's.
  for layer, arrays in unstack(whole, cfg.layers, len(cfg.layer_kinds)).items():
    number = layer.removeprefix("layer_")
    for key, x in arrays.items():
      name = key[:-2]
      half = key[-1].upper()
      target = hf_name(name).removesuffix(".weight")
      full = f"base_model.model.model.layers.{number}.{target}.lora_{half}.weight"
      if half == "A":  # [inputs, r]
        tensors[full] = np.ascontiguousarray(x.reshape(-1, config.rank).T)
        continue
      outputs = tuple(range(1, x.ndim))
      sections = sections_of(cfg, name)
      entry = Entry((), None, (outputs, (0,)), x.shape, sections)
      tensors[full] = entry.write(x)
  os.makedirs(path, exist_ok=True)
  save_tensors(os.path.join(path, "adapter_model.safetensors"), tensors)
  # --- The adapters' config for peft.
  matrices = {name_of(p)[:-2] for p, _ in jax.tree_util.tree_leaves_with_path(adapters)}
  modules = sorted(hf_name(n).split(".")[-2] for n in matrices)
  description = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": named(base),
    "r": config.rank,
    "lora_alpha": config.alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": modules,
  }
  with open(os.path.join(path, "adapter_config.json"), "w", encoding="utf-8") as f:
    json.dump(description, f, indent=2, sort_keys=True)
