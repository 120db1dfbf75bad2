"""Model folders in Hugging Face's layout: config.json, safetensors, tokenizer.

One table names every array in both layouts and is used in both directions. A model is a
folder everywhere in this project: what SFT writes is what RL, evaluation, transformers
and vLLM read. Arrays are read slice by slice, each device's part straight from the
file, so no process ever holds more of a model than one array and its own parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import safetensors
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from coa_jax.model.architecture import (
  CARRIED,
  LoadConfig,
  QwenConfig,
  from_hf_config,
  read_hf_config,
  to_hf_config,
)
from coa_jax.model.qwen import param_shapes
from coa_jax.model.sharding import Layout
from coa_jax.protocol.tokens import Tokenizer

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_GENERATION = "generation_config.json"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_DTYPES = ("F32", "BF16", "F16")
# Ours: (Hugging Face's name, which of our axes make up each of its axes). Hugging Face
# stores a matrix as [outputs, inputs], ours are [inputs..., outputs...].
_VECTOR, _MATRIX = ((0,),), ((1,), (0,))
_INTO_HEADS, _FROM_HEADS, _OF_HEADS = ((1, 2), (0,)), ((2,), (0, 1)), ((0, 1),)
_LAYER = {
  "attn_norm": ("input_layernorm.weight", _VECTOR),
  "q": ("self_attn.q_proj.weight", _INTO_HEADS),
  "k": ("self_attn.k_proj.weight", _INTO_HEADS),
  "v": ("self_attn.v_proj.weight", _INTO_HEADS),
  "q_bias": ("self_attn.q_proj.bias", _OF_HEADS),
  "k_bias": ("self_attn.k_proj.bias", _OF_HEADS),
  "v_bias": ("self_attn.v_proj.bias", _OF_HEADS),
  "q_norm": ("self_attn.q_norm.weight", _VECTOR),
  "k_norm": ("self_attn.k_norm.weight", _VECTOR),
  "o": ("self_attn.o_proj.weight", _FROM_HEADS),
  "ff_norm": ("post_attention_layernorm.weight", _VECTOR),
  "gate": ("mlp.gate_proj.weight", _MATRIX),
  "up": ("mlp.up_proj.weight", _MATRIX),
  "down": ("mlp.down_proj.weight", _MATRIX),
}
_TOP = {
  "embed": ("model.embed_tokens.weight", ((0,), (1,))),
  "final_norm": ("model.norm.weight", _VECTOR),
  "head": ("lm_head.weight", _MATRIX),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
  """One array of Hugging Face's and its place among ours.

  Attributes:
    path: keys in the parameters' tree.
    layer: its place on the stacked layer axis; None where there is none.
    groups: which of our axes (the layer axis left out) make up each of its axes.
    shape: of ours, the layer axis left out.
  """

  path: tuple[str, ...]
  layer: int | None
  groups: tuple[tuple[int, ...], ...]
  shape: tuple[int, ...]

  @property
  def stored(self) -> tuple[int, ...]:
    """The shape in the file."""
    return tuple(math.prod(self.shape[i] for i in g) for g in self.groups)

  def read(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Our part at `index`, from something that can be sliced as the file's array."""
    spans = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
    cuts = []
    for group in self.groups:
      # Only the first axis of a group is ever split.
      first, rest = group[0], math.prod(self.shape[i] for i in group[1:])
      cuts.append(slice(spans[first].start * rest, spans[first].stop * rest))
    axes = [i for g in self.groups for i in g]
    part = stored[tuple(cuts)].reshape([len(spans[i]) for i in axes])
    return part.transpose(np.argsort(axes))

  def write(self, x: np.ndarray) -> np.ndarray:
    """The file's array of ours."""
    axes = [i for g in self.groups for i in g]
    return np.ascontiguousarray(x.transpose(axes).reshape(self.stored))


def hf_name(name: str) -> str:
  """Hugging Face's name, inside a layer, of one of our arrays."""
  return _LAYER[name][0]


def _table(shapes: dict[str, Any], layers: int) -> dict[str, _Entry]:
  """Hugging Face's names of a tree of parameters, stacked or not.

  Raises:
    ValueError: listing parameters that have no name there.
  """
  table, unmapped = {}, []
  for keys, x in jax.tree_util.tree_leaves_with_path(shapes):
    path = tuple(k.key for k in keys)
    name = path[-1]
    if len(path) == 1 and name in _TOP:
      hf, groups = _TOP[name]
      table[hf] = _Entry(path, None, groups, tuple(x.shape))
    elif len(path) == 2 and name in _LAYER:
      hf, groups = _LAYER[name]
      if path[0] == "layers":
        for i in range(layers):
          entry = _Entry(path, i, groups, tuple(x.shape[1:]))
          table[f"model.layers.{i}.{hf}"] = entry
      else:
        number = path[0].removeprefix("layer_")
        entry = _Entry(path, None, groups, tuple(x.shape))
        table[f"model.layers.{number}.{hf}"] = entry
    else:
      unmapped.append("/".join(path))
  if unmapped:
    raise ValueError(f"Hugging Face has no name for {', '.join(unmapped)}")
  return table


def save_model(
  path: str | os.PathLike[str],
  cfg: QwenConfig,
  params: Any,
  tokenizer: Tokenizer | None = None,
  like: str | os.PathLike[str] = "",
  shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a folder that transformers and vLLM load: weights, config, tokenizer.

  Every process calls it; the first one writes.

  Args:
    path: made if missing.
    cfg: the architecture.
    params: its parameters, layers stacked or not, wherever they live.
    tokenizer: saved beside the weights; its end and padding ids go into the config.
    like: the folder that training started from; what its config says beside the
      architecture (`architecture.CARRIED`), and its generation config, are kept.
    shard_bytes: most bytes of one file; several files get an index.

  Raises:
    ValueError: Hugging Face has no such architecture or parameter.
  """
  path = os.fspath(path)
  config = to_hf_config(cfg) | _carried(tokenizer, like)
  table = _table(params, cfg.layers)
  files = _split(table, np.dtype(cfg.param_dtype).itemsize, shard_bytes)
  first = jax.process_index() == 0
  if first:
    os.makedirs(path, exist_ok=True)
  for file, names in files.items():
    tensors = {name: table[name].write(_fetch(params, table[name])) for name in names}
    if first:
      target = os.path.join(path, file)
      save_file(tensors, target + ".tmp", metadata={"format": "pt"})
      os.replace(target + ".tmp", target)
  if first:
    if len(files) > 1:
      where = {name: file for file, names in files.items() for name in names}
      size = sum(math.prod(e.stored) for e in table.values())
      size *= np.dtype(cfg.param_dtype).itemsize
      _write_json(path, _INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    # Of an earlier save. transformers reads a single file before any index.
    kept = {*files, _INDEX} if len(files) > 1 else {*files}
    for name in filter(_WEIGHTS.fullmatch, set(os.listdir(path)) - kept):
      os.remove(os.path.join(path, name))
    if tokenizer:
      tokenizer.save(path)
    _write_json(path, _GENERATION, _generation(config, like))
    _write_json(path, _CONFIG, config)
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"saved {path}")


def _carried(tokenizer: Tokenizer | None, like: str | os.PathLike[str]):
  """What a config.json says beside the architecture."""
  out = {}
  if like:
    found = read_hf_config(os.path.join(like, _CONFIG))
    out = {k: found[k] for k in CARRIED if found.get(k) is not None}
  if tokenizer:
    for field in ("eos_token_id", "pad_token_id"):
      if getattr(tokenizer.hf, field) is not None:
        out.setdefault(field, getattr(tokenizer.hf, field))
  return out


def _generation(config: dict[str, Any], like: str | os.PathLike[str]):
  """The generation config: that of `like`, or the ids that end and pad a text."""
  if like and os.path.exists(os.path.join(like, _GENERATION)):
    return read_hf_config(os.path.join(like, _GENERATION))
  ids = ("bos_token_id", "eos_token_id", "pad_token_id")
  return {"do_sample": True, **{k: config[k] for k in ids if k in config}}


def _split(
  table: dict[str, _Entry], itemsize: int, shard_bytes: int
) -> dict[str, list[str]]:
  """File name -> names of its arrays, each file of at most `shard_bytes`."""
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
    return {"model.safetensors": files[0]}
  n = len(files)
  return {
    f"model-{i:05d}-of-{n:05d}.safetensors": names for i, names in enumerate(files, 1)
  }


def _fetch(params: Any, entry: _Entry) -> np.ndarray:
  """One whole array on this host, whichever devices hold it."""
  for key in entry.path:
    params = params[key]
  return gather(params if entry.layer is None else params[entry.layer])


def gather(x: jax.Array | np.ndarray) -> np.ndarray:
  """A whole array on this host; every process calls it."""
  if isinstance(x, jax.Array) and not x.is_fully_addressable:
    x = multihost_utils.process_allgather(x, tiled=True)
  return np.asarray(x)


def _write_json(path: str, name: str, value: dict[str, Any]) -> None:
  file = os.path.join(path, name)
  with open(file + ".tmp", "w", encoding="utf-8") as f:
    json.dump(value, f, indent=2, sort_keys=True)
  os.replace(file + ".tmp", file)


def load_config(
  path: str | os.PathLike[str], load: LoadConfig | None = None
) -> QwenConfig:
  """The architecture of a model folder.

  Args:
    path: the folder.
    load: what the folder does not decide; None for the defaults.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: config.json is not supported; see `from_hf_config`.
  """
  file = os.path.join(path, _CONFIG)
  if not os.path.exists(file):
    raise FileNotFoundError(f"{file}: not a model folder (no config.json)")
  cfg = from_hf_config(read_hf_config(file), file)
  return dataclasses.replace(cfg, **dataclasses.asdict(load or LoadConfig()))


def load_model(
  path: str | os.PathLike[str],
  load: LoadConfig | None = None,
  layout: Layout | None = None,
) -> tuple[QwenConfig, dict[str, Any]]:
  """Reads a model folder: a single safetensors file, or several with an index.

  Args:
    path: the folder.
    load: what the folder does not decide; None for the defaults.
    layout: where the parameters go; None for the default device.

  Returns:
    The architecture and its parameters, stacked if `scan`.

  Raises:
    FileNotFoundError: config.json or a shard is missing.
    ValueError: an array is missing, left over, of the wrong shape or of a dtype that is
      not supported (all are listed), a file is damaged, config.json is not supported,
      or the mesh does not divide. All before an array is read.
  """
  path = os.fspath(path)
  cfg = load_config(path, load)
  if layout:
    layout.check(cfg)
  shapes = param_shapes(cfg)
  table = _table(shapes, cfg.layers)
  with contextlib.ExitStack() as files:
    slices = dict(_open(path, files))
    _check(path, table, slices)
    entries: dict[tuple[str, ...], list[tuple[_Entry, Any]]] = {}
    for name, entry in table.items():
      entries.setdefault(entry.path, []).append((entry, slices[name]))

    def leaf(keys: Any, want: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
      parts = entries[tuple(k.key for k in keys)]
      read = _reader(parts, np.dtype(want.dtype))
      return jax.make_array_from_callback(want.shape, sharding, read)

    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = layout.tree(shapes) if layout else jax.tree.map(lambda _: one, shapes)
    return cfg, jax.tree_util.tree_map_with_path(leaf, shapes, where)


def _reader(
  parts: list[tuple[_Entry, Any]], dtype: np.dtype
) -> Callable[[tuple[slice, ...]], np.ndarray]:
  """Reads our part at an index; of stacked layers those that the index asks for."""
  if parts[0][0].layer is None:
    ((entry, stored),) = parts
    return lambda index: np.ascontiguousarray(entry.read(stored, index), dtype)
  by_layer = sorted(parts, key=lambda p: p[0].layer)

  def read(index: tuple[slice, ...]) -> np.ndarray:
    picked = by_layer[index[0]]
    out = None
    for i, (entry, stored) in enumerate(picked):
      part = entry.read(stored, index[1:])
      if out is None:
        out = np.empty((len(picked), *part.shape), dtype)
      out[i] = part
    return out

  return read


def _open(path: str, files: contextlib.ExitStack) -> Iterator[tuple[str, Any]]:
  """Yields (name, slice) of every array in the safetensors files of a folder.

  Raises:
    FileNotFoundError: naming every file that is missing.
    ValueError: a file is damaged, or lacks an array that the index promises.
  """
  index = os.path.join(path, _INDEX)
  promised: dict[str, str] = {}
  names = ["model.safetensors"]
  if os.path.exists(index):
    promised = read_hf_config(index).get("weight_map")
    if not isinstance(promised, dict) or not promised:
      raise ValueError(f"{index}: field 'weight_map' is no table of arrays and files")
    names = sorted(set(map(str, promised.values())))
  # A folder's index is foreign text: it may not lead out of the folder.
  for name in names:
    if name in ("", ".", "..") or os.path.basename(name) != name:
      raise ValueError(f"{index}: file name {name!r} leads out of the folder")
  missing = [n for n in names if not os.path.exists(os.path.join(path, n))]
  if missing:
    file = os.path.join(path, missing[0])
    others = f" (and {', '.join(missing[1:])})" if missing[1:] else ""
    raise FileNotFoundError(f"{file}: the weights are missing{others}")
  for name in names:
    file = os.path.join(path, name)
    try:
      opened = files.enter_context(safetensors.safe_open(file, framework="numpy"))
    except safetensors.SafetensorError as e:
      raise ValueError(f"{file}: damaged safetensors file ({e})") from e
    held = set(opened.keys())
    lacks = sorted(k for k, f in promised.items() if f == name and k not in held)
    if lacks:
      raise ValueError(f"{file}: lacks {', '.join(lacks)}, which {_INDEX} promises")
    for key in sorted(held):
      yield key, opened.get_slice(key)


def _check(path: str, table: dict[str, _Entry], slices: dict[str, Any]) -> None:
  """Lists everything in which the files do not fit the architecture."""
  faults = []
  for name, stored in slices.items():
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if name not in table:
      # Some tools write the output matrix beside tied embeddings.
      if name != "lm_head.weight":
        faults.append(f"unknown {name} {shape}")
    elif shape != table[name].stored:
      faults.append(f"{name} has shape {shape}, expected {table[name].stored}")
    elif dtype not in _DTYPES:
      faults.append(f"{name} has dtype {dtype}, supported: {', '.join(_DTYPES)}")
  faults += [f"missing {name}" for name in table if name not in slices]
  if faults:
    raise ValueError(f"{path}: the weights do not fit config.json: {'; '.join(faults)}")
