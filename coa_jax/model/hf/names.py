"""Maps array names and shapes between Hugging Face's layout and ours.

One table serves both directions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from coa_jax.model.config import ModelConfig

# Our name -> Hugging Face's name, and our axes joined into each of its axes. Hugging
# Face stores a matrix as [outputs, inputs], we as [inputs..., outputs...].
_VECTOR = ((0,),)
_MATRIX = ((1,), (0,))
_INTO_HEADS = ((1, 2), (0,))
_FROM_HEADS = ((2,), (0, 1))
_OF_HEADS = ((0, 1),)
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
  "delta_qkv": ("linear_attn.in_proj_qkv.weight", _INTO_HEADS),
  "delta_gate": ("linear_attn.in_proj_z.weight", _INTO_HEADS),
  "delta_write": ("linear_attn.in_proj_b.weight", _MATRIX),
  "delta_rate": ("linear_attn.in_proj_a.weight", _MATRIX),
  "delta_rate_bias": ("linear_attn.dt_bias", _VECTOR),
  "delta_decay_log": ("linear_attn.A_log", _VECTOR),
  "delta_conv": ("linear_attn.conv1d.weight", ((0, 1), (), (2,))),
  "delta_norm": ("linear_attn.norm.weight", _VECTOR),
  "delta_out": ("linear_attn.out_proj.weight", _FROM_HEADS),
}
# We store each key head's query, key and values together, so that devices may split
# them by head; Hugging Face stores all queries, then all keys, then all values.
_BY_HEAD = ("delta_qkv", "delta_conv")
_TOP = {
  "embed": ("model.embed_tokens.weight", ((0,), (1,))),
  "final_norm": ("model.norm.weight", _VECTOR),
  "head": ("lm_head.weight", _MATRIX),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """A Hugging Face array, and its place in our parameters.

  Attributes:
    path: keys in the parameter tree.
    layer: index on the stacked layer axis; None if not stacked.
    groups: our axes (without the layer axis) joined into each file axis.
    shape: our shape, without the layer axis.
    sections: part widths along the first group's second axis, if the file stores all
      heads' first parts, then all second parts, ...; () if it stores head after head.
  """

  path: tuple[str, ...]
  layer: int | None
  groups: tuple[tuple[int, ...], ...]
  shape: tuple[int, ...]
  sections: tuple[int, ...] = ()

  @property
  def axes(self) -> list[int]:
    """Returns our axes in the file's order, not joined."""
    return list(itertools.chain.from_iterable(self.groups))

  @property
  def stored(self) -> tuple[int, ...]:
    """Returns the shape in the file."""
    return tuple(map(self._size, self.groups))

  def _size(self, axes: tuple[int, ...]) -> int:
    return math.prod(self.shape[i] for i in axes)

  def read(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Reads our array's part at `index` from a sliceable file array."""
    # --- The slice along each of our axes, then along each file axis.
    spans = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
    cuts = []
    for group in self.groups:
      if not group:  # a file axis of size 1
        cuts.append(slice(0, 1))
        continue
      # Only a group's first axis is ever split.
      first = spans[group[0]]
      rest = self._size(group[1:])
      cuts.append(slice(first.start * rest, first.stop * rest))

    # --- The part in the file's layout, then in ours.
    if self.sections:
      part = self._read_sections(stored, spans[self.groups[0][0]], cuts)
    else:
      part = stored[tuple(cuts)]
    part = part.reshape([len(spans[i]) for i in self.axes])
    return part.transpose(np.argsort(self.axes))

  def _read_sections(self, stored: Any, heads: range, cuts: list[slice]) -> np.ndarray:
    """Reads the rows of `heads`, as [heads, parts, ...]."""
    parts = []
    begin = 0
    for width in self.sections:
      cuts[0] = slice(begin + heads.start * width, begin + heads.stop * width)
      part = stored[tuple(cuts)]
      parts.append(part.reshape(len(heads), width, *part.shape[1:]))
      begin += self.shape[self.groups[0][0]] * width
    return np.concatenate(parts, axis=1)

  def write(self, x: np.ndarray) -> np.ndarray:
    """Converts our array to the file's layout."""
    x = x.transpose(self.axes)
    if self.sections:
      parts = np.split(x, np.cumsum(self.sections)[:-1], axis=1)
      x = np.concatenate([part.reshape(-1, *x.shape[2:]) for part in parts])
    return np.ascontiguousarray(x.reshape(self.stored))


def hf_name(name: str) -> str:
  """Returns Hugging Face's name for one of our arrays, relative to its layer."""
  return _LAYER[name][0]


def sections_of(cfg: ModelConfig, name: str) -> tuple[int, ...]:
  """Returns `Entry.sections` for one of our arrays."""
  if name not in _BY_HEAD:
    return ()
  d = cfg.delta
  return d.key_dim, d.key_dim, d.channels - 2 * d.key_dim


def name_table(shapes: dict[str, Any], cfg: ModelConfig) -> dict[str, Entry]:
  """Maps Hugging Face's names to our parameters, with layers stacked or not.

  Raises:
    ValueError: some parameters have no name there; the message lists them.
  """
  out = {}
  unmapped = []
  for keys, x in jax.tree_util.tree_leaves_with_path(shapes):
    path = tuple(k.key for k in keys)
    name = path[-1]
    if len(path) == 1 and name in _TOP:
      hf, groups = _TOP[name]
      out[hf] = Entry(path, None, groups, tuple(x.shape))
    elif len(path) > 1 and name in _LAYER:
      hf, groups = _LAYER[name]
      sections = sections_of(cfg, name)
      # Stacked layers are one array here, and one per layer in the file.
      if path[0] == "layers":
        block = int(path[1].removeprefix("block_")) if len(path) == 3 else 0
        for turn in range(x.shape[0]):
          entry = Entry(path, turn, groups, tuple(x.shape[1:]), sections)
          number = turn * len(cfg.layer_kinds) + block
          out[f"model.layers.{number}.{hf}"] = entry
      else:
        number = int(path[0].removeprefix("layer_"))
        entry = Entry(path, None, groups, tuple(x.shape), sections)
        out[f"model.layers.{number}.{hf}"] = entry
    else:
      unmapped.append("/".join(path))
  if unmapped:
    raise ValueError(f"Hugging Face has no name for {', '.join(unmapped)}")
  return out
