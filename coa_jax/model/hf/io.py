"""Model folders in Hugging Face's layout: config.json, safetensors, tokenizer.

Everywhere in this project a model is a folder: RL, evaluation, transformers and vLLM
read SFT's output. `hf.config` reads its config.json, `hf.names` maps its array names.
Arrays are read slice by slice, each device's part straight from the file, so a process
never holds more than its own parts and one array.

budget: a folder's reader and writer are together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import safetensors
from jax.experimental import multihost_utils

from coa_jax.model import attention
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.hf.config import (
  CARRIED,
  decoder_fields,
  from_hf_config,
  to_hf_config,
)
from coa_jax.model.hf.names import Entry, name_table
from coa_jax.model.hf.stored import StoredArray, save_tensors
from coa_jax.model.moving import gatherer
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.model.transformer import param_shapes
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.runtime.disk import atomic_write
from coa_jax.runtime.json_io import read_object
from coa_jax.runtime.names import check_names

_log = logging.getLogger(__name__)

_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_DTYPES = ("F32", "BF16", "F16")
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_MOST_FAULTS = 8  # listed in one message
# Arrays outside the decoder.
_NOT_DECODER = re.compile(r"(model\.visual|mtp)\.")
# Git's placeholder for a file stored elsewhere (LFS).
_LFS = b"version https://git-lfs"


def save_model(
  path: str | os.PathLike[str],
  cfg: ModelConfig,
  params: Any,
  tokenizer: Tokenizer | None = None,
  like: str | os.PathLike[str] = "",
  shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a model folder for transformers and vLLM: weights, config, tokenizer.

  All processes call this function; the first one writes.

  Args:
    params: the parameters, layers stacked or not, on any devices.
    tokenizer: saved beside the weights; the config gets its end and padding ids, with
      `end_id` first, so that other engines stop after the answer.
    like: the initial model folder; its generation config and its config fields outside
      the architecture (`hf.config.CARRIED`) are kept.
    shard_bytes: maximum bytes per file; several files get an index.

  Raises:
    ValueError: Hugging Face has no such architecture, or the parameters do not match
      `cfg` (all differences are listed); nothing is written.
  """
  # --- Check everything first: on a mismatch nothing is written.
  path = os.fspath(path)
  config = to_hf_config(cfg) | _carried(tokenizer, like)
  _compare(cfg, params)
  table = name_table(params, cfg)
  files = _split(table, np.dtype(cfg.param_dtype).itemsize, shard_bytes)

  # --- The arrays, file by file; every process takes part in gathering.
  first = jax.process_index() == 0
  if first:
    os.makedirs(path, exist_ok=True)
  for file, names in files.items():
    tensors = {}
    for name in names:
      array = gather(_pick(params, table[name]))
      if first:
        tensors[name] = table[name].write(array)
    if first:
      save_tensors(os.path.join(path, file), tensors)
  # --- The index, tokenizer and config, after all arrays.
  if first:
    if len(files) > 1:
      where = {name: file for file, names in files.items() for name in names}
      size = sum(math.prod(e.stored) for e in table.values())
      size *= np.dtype(cfg.param_dtype).itemsize
      _write_json(path, _INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    # Remove an earlier save's files: transformers prefers a single file to an index.
    current = set(files)
    if len(files) > 1:
      current.add(_INDEX)
    for name in os.listdir(path):
      if _WEIGHTS.fullmatch(name) and name not in current:
        os.remove(os.path.join(path, name))
    if tokenizer:
      tokenizer.save(path)
    _write_json(path, _GENERATION, _generation(config, tokenizer, like))
    _write_json(path, _CONFIG, config)

  if jax.process_count() > 1:
    # Only the name: processes may have different paths to the same folder.
    multihost_utils.sync_global_devices(f"saved {os.path.basename(path)}")


def _compare(cfg: ModelConfig, params: Any) -> None:
  """Refuses parameters that do not match the architecture."""

  def leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns (shape, dtype) by path."""
    out = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      out[name] = tuple(x.shape), str(x.dtype)
    return out

  # Layers may be stacked or not, regardless of `cfg.scan`.
  stacked = dataclasses.replace(cfg, scan="layers" in params)
  actual = leaves(params)
  expected = leaves(param_shapes(stacked))
  faults = []
  for name, (shape, _) in actual.items():
    if name not in expected:
      faults.append(f"unknown {name} {shape}")
  for name, (shape, dtype) in expected.items():
    if name not in actual:
      faults.append(f"missing {name}")
      continue
    actual_shape, actual_dtype = actual[name]
    if actual_shape != shape:
      faults.append(f"{name} has shape {actual_shape}, expected {shape}")
    if actual_dtype != dtype:
      faults.append(f"{name} has dtype {actual_dtype}, expected {dtype}")
  if faults:
    raise ValueError(f"the parameters do not fit section model: {_listed(faults)}")


def _carried(tokenizer: Tokenizer | None, like: str | os.PathLike[str]):
  """Returns the config.json fields outside the architecture."""
  # `like` comes first; the tokenizer fills in missing fields.
  out = {}
  if like:
    origin = decoder_fields(read_object(os.path.join(like, _CONFIG)))
    out = {k: origin[k] for k in CARRIED if origin.get(k) is not None}
  if tokenizer:
    for field in ("eos_token_id", "pad_token_id"):
      if getattr(tokenizer.hf, field) is not None:
        out.setdefault(field, getattr(tokenizer.hf, field))
  return _stopping(out, tokenizer)


def _generation(
  config: dict[str, Any], tokenizer: Tokenizer | None, like: str | os.PathLike[str]
):
  """Returns `like`'s generation config, or a new one with the config's token ids."""
  if like and os.path.exists(os.path.join(like, _GENERATION)):
    return _stopping(read_object(os.path.join(like, _GENERATION)), tokenizer)
  ids = ("bos_token_id", "eos_token_id", "pad_token_id")
  return {"do_sample": True, **{k: config[k] for k in ids if k in config}}


def _stopping(config: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
  """Returns the config with the answer's end id before other end ids."""
  if tokenizer is None or tokenizer.end_id is None:
    return config
  # A file has one id, a list, or none; a single id is written without a list.
  others = config.get("eos_token_id", [])
  if not isinstance(others, list):
    others = [others]
  ends = [tokenizer.end_id]
  ends += [i for i in others if i not in (None, tokenizer.end_id)]
  return config | {"eos_token_id": ends if len(ends) > 1 else tokenizer.end_id}


def _split(
  table: dict[str, Entry], itemsize: int, shard_bytes: int
) -> dict[str, list[str]]:
  """Returns array names by file; only one larger array may exceed `shard_bytes`."""
  files: list[list[str]] = [[]]
  room = shard_bytes
  for name, entry in table.items():
    size = math.prod(entry.stored) * itemsize
    if size > room and files[-1]:
      files.append([])
      room = shard_bytes
    files[-1].append(name)
    room -= size
  if len(files) == 1:
    return {_SINGLE: files[0]}
  n = len(files)
  return {
    f"model-{i:05d}-of-{n:05d}.safetensors": names for i, names in enumerate(files, 1)
  }


def _pick(params: Any, entry: Entry) -> Any:
  for key in entry.path:
    params = params[key]
  if entry.layer is not None:
    params = params[entry.layer]
  return params


def gather(x: jax.Array | np.ndarray) -> np.ndarray | None:
  """Gathers a whole array on the first process's host; None on others.

  All processes call this function, for one array at a time, because meanwhile every
  device holds the whole array. JAX can send an array to the first process's devices
  alone only if they are as many as the array's own devices.
  """
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    x = gatherer(x.sharding.mesh)(x).addressable_data(0)
  return None if jax.process_index() else np.asarray(x)


def _write_json(path: str, name: str, value: dict[str, Any]) -> None:
  with atomic_write(os.path.join(path, name)) as f:
    json.dump(value, f, indent=2, sort_keys=True)


def load_config(
  path: str | os.PathLike[str], load: LoadConfig | None = None
) -> ModelConfig:
  """Reads a model folder's architecture.

  Args:
    load: options that the folder does not decide; None for the defaults.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: config.json is not supported; see `from_hf_config`.
  """
  file = os.path.join(path, _CONFIG)
  if not os.path.isfile(file):
    raise FileNotFoundError(
      f"{file}: not a model folder (no config.json){_remedy(os.fspath(path))}"
    )
  cfg = from_hf_config(read_object(file), file)
  return dataclasses.replace(cfg, **dataclasses.asdict(load or LoadConfig()))


def _remedy(path: str) -> str:
  """Returns advice for the error message if the path does not exist."""
  if os.path.exists(path):
    return ""
  # A Hub name has one slash, starts like a word, and its owner is no local folder.
  if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) and not os.path.isdir(
    os.path.dirname(path)
  ):
    return (
      f"; if {path} is a name on the Hugging Face Hub: hf download {path} "
      "--local-dir=DIR, then --config.init=DIR"
    )
  return (
    "; give --config.init=DIR, a folder from the Hugging Face Hub or the model/ of an "
    "SFT or RL run"
  )


def load_model(
  path: str | os.PathLike[str],
  load: LoadConfig | None = None,
  partitioner: Partitioner = ONE_DEVICE,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads a model folder; see `load_config` and `load_params`."""
  cfg = load_config(path, load)
  return cfg, load_params(path, cfg, partitioner)


def load_params(
  path: str | os.PathLike[str],
  cfg: ModelConfig,
  partitioner: Partitioner = ONE_DEVICE,
) -> dict[str, Any]:
  """Reads a folder's parameters onto a mesh, with layers stacked if `cfg.scan`.

  Raises:
    FileNotFoundError: a weight file is missing.
    ValueError: an array is missing, left over, of the wrong shape or an unsupported
      dtype (the message lists them), a file is damaged, the mesh does not divide the
      model, or the devices lack the attention kernel; no array is read before these
      checks, except to compare a tied output matrix with the embedding. Or an array
      holds NaN or infinity.
  """
  # --- Refuse mismatches before any array is read.
  path = os.fspath(path)
  partitioner.check(cfg.axes)
  attention.check(cfg, partitioner)
  shapes = param_shapes(cfg)
  table = name_table(shapes, cfg)
  with contextlib.ExitStack() as files:
    slices = dict(_open(path, files))
    if cfg.attention_gate:
      slices = _decoder_only(path, slices)
    _check(path, table, slices)

    # --- Our arrays by path: each comes from one stored array, or from one per layer.
    entries: dict[tuple[str, ...], list[tuple[Entry, Any]]] = {}
    for name, entry in table.items():
      entries.setdefault(entry.path, []).append((entry, slices[name]))

    def leaf(keys: Any, want: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
      parts = entries[tuple(k.key for k in keys)]
      read = _reader(parts, np.dtype(want.dtype))
      return jax.make_array_from_callback(want.shape, sharding, read)

    # --- Each device reads its own part of each array.
    where = partitioner.tree(shapes)
    return jax.tree_util.tree_map_with_path(leaf, shapes, where)


def _reader(
  parts: list[tuple[Entry, Any]], dtype: np.dtype
) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """Returns a reader of our array's part at an index, stacked layers included."""
  if parts[0][0].layer is None:
    ((entry, stored),) = parts
    return lambda index: np.ascontiguousarray(entry.read(stored, index), dtype)
  by_layer = sorted(parts, key=lambda p: p[0].layer)

  def read(index: tuple[slice, ...]) -> np.ndarray:
    # Filled layer by layer, so that at most one layer is in memory twice.
    picked = by_layer[index[0]]
    out = None
    for i, (entry, stored) in enumerate(picked):
      part = entry.read(stored, index[1:])
      if out is None:
        out = np.empty((len(picked), *part.shape), dtype)
      out[i] = part
    return out

  return read


def _weight_files(path: str) -> tuple[list[str], dict[str, str]]:
  """Returns a folder's weight files, and its index (array -> file), empty if none.

  Raises:
    FileNotFoundError: weight files are missing; the message names them all.
    ValueError: the index is invalid, or there are two sets of weights.
  """
  # --- File names: the single file's, or the index's.
  index = os.path.join(path, _INDEX)
  promised: dict[str, str] = {}
  names = [_SINGLE]
  if os.path.exists(index):
    promised = read_object(index).get("weight_map")
    if not isinstance(promised, dict) or not promised:
      raise ValueError(f"{index}: field 'weight_map' is no table of arrays and files")
    names = sorted(set(map(str, promised.values())))
  # The index is untrusted text: its names may not leave the folder. The files may be
  # links, as in the Hub's cache.
  check_names(names, index)
  if deep := [name for name in names if "/" in name]:
    raise ValueError(f"{index}: file name {deep[0]!r} is not directly in the folder")
  # transformers reads the single file, other readers the index; one of them is stale.
  if names != [_SINGLE] and os.path.exists(os.path.join(path, _SINGLE)):
    raise ValueError(
      f"{path}: has {_SINGLE} and {_INDEX}, and readers differ in which counts; remove "
      "the one that is out of date"
    )

  # --- Missing files, with advice if PyTorch's own format is there.
  missing = [n for n in names if not os.path.exists(os.path.join(path, n))]
  if missing:
    file = os.path.join(path, missing[0])
    more = f" (and {', '.join(missing[1:])})" if missing[1:] else ""
    torch = sorted(n for n in os.listdir(path) if re.match(r"pytorch_model.*\.bin", n))
    if torch and not promised:
      more = (
        f"; {torch[0]} there is PyTorch's own format, which is not read: write the "
        "model anew with transformers' save_pretrained"
      )
    raise FileNotFoundError(f"{file}: the weights are missing{more}")
  return names, promised


def _open(path: str, files: contextlib.ExitStack) -> Iterator[tuple[str, StoredArray]]:
  """Yields (name, array) for each array in a folder's safetensors files.

  Raises:
    FileNotFoundError, ValueError: as `_weight_files`; or a file is not a safetensors
      file, or lacks an array listed in the index.
  """
  names, promised = _weight_files(path)
  for name in names:
    # --- A folder or an LFS pointer gets its own message.
    file = os.path.join(path, name)
    if os.path.isdir(file):
      raise ValueError(f"{file}: is a folder, not a safetensors file")
    with open(file, "rb") as f:
      if f.read(len(_LFS)) == _LFS:
        raise ValueError(
          f"{file}: is a Git LFS pointer, not the weights; run 'git lfs pull' where "
          "the folder was cloned"
        )

    # --- The file's header; arrays stay on disk until they are sliced.
    try:
      opened = files.enter_context(safetensors.safe_open(file, framework="numpy"))
    except safetensors.SafetensorError as e:
      raise ValueError(f"{file}: damaged safetensors file ({e})") from e
    stored_names = set(opened.keys())
    expected = {key for key, of in promised.items() if of == name}
    lacks = sorted(expected - stored_names)
    if lacks:
      raise ValueError(f"{file}: lacks {', '.join(lacks)}, which {_INDEX} promises")
    for key in sorted(stored_names):
      yield key, StoredArray(file, key, opened.get_slice(key))


def _decoder_only(path: str, slices: dict[str, Any]) -> dict[str, Any]:
  """Drops the arrays of the vision tower and of multi-token prediction."""
  out = {}
  for name, stored in slices.items():
    if not _NOT_DECODER.match(name):
      # Beside a vision tower, decoder names have an additional part.
      out[name.replace("model.language_model.", "model.", 1)] = stored
  if len(out) < len(slices):
    _log.info(
      "%s: %d arrays of the vision tower and multi-token prediction are not loaded: "
      "text only, and exports are a decoder alone",
      path,
      len(slices) - len(out),
    )
  return out


def _check(path: str, table: dict[str, Entry], slices: dict[str, Any]) -> None:
  """Refuses files that do not match the architecture."""
  faults = []
  for name, stored in slices.items():
    shape = tuple(stored.get_shape())
    dtype = stored.get_dtype()
    entry = table.get(name)
    if entry is None and name == _HEAD:
      # Some tools write a tied output matrix as well as the embedding.
      entry = table[_EMBEDDING]
    if entry is None:
      faults.append(f"unknown {name} {shape}")
    elif shape != entry.stored:
      faults.append(f"{name} has shape {shape}, expected {entry.stored}")
    elif dtype not in _DTYPES:
      faults.append(f"{name} has dtype {dtype}, supported: {', '.join(_DTYPES)}")
  faults += [f"missing {name}" for name in table if name not in slices]
  if faults:
    raise ValueError(f"{path}: the weights do not fit config.json: {_listed(faults)}")
  tied = _HEAD in slices and _HEAD not in table
  if tied and not _equal(slices[_HEAD], slices[_EMBEDDING]):
    raise ValueError(
      f"{path}: {_HEAD} differs from the embedding, which config.json says it is tied "
      "to, and transformers then uses it; set tie_word_embeddings to false in "
      "config.json"
    )


def _listed(faults: list[str]) -> str:
  """Formats the first faults, and the number of others."""
  if len(faults) > _MOST_FAULTS:
    faults = [*faults[:_MOST_FAULTS], f"and {len(faults) - _MOST_FAULTS} more"]
  return "; ".join(faults)


def _equal(a: Any, b: Any) -> bool:
  """Compares two stored matrices of equal shape, some rows at a time."""
  # An embedding may exceed the free memory, so compare 4 M numbers at a time.
  rows, columns = a.get_shape()
  some = max(1, 2**22 // columns)
  for begin in range(0, rows, some):
    end = min(begin + some, rows)
    part_a = np.asarray(a[begin:end], np.float32)
    part_b = np.asarray(b[begin:end], np.float32)
    if not np.array_equal(part_a, part_b, equal_nan=True):
      return False
  return True
