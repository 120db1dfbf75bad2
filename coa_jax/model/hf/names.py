"""Names and shapes of a model's arrays in Hugging Face's layout and in ours.

One table, used in both directions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

# Ours: (Hugging Face's name, our axes that form each of its axes). Hugging Face stores
# a matrix as [outputs, inputs], ours are [inputs..., outputs...].
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
}
_TOP = {
  "embed": ("model.embed_tokens.weight", ((0,), (1,))),
  "final_norm": ("model.norm.weight", _VECTOR),
  "head": ("lm_head.weight", _MATRIX),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """One array of Hugging Face's and its place among ours.

  Attributes:
    path: keys in the parameters' tree.
    layer: its index on the stacked layer axis; None without one.
    groups: our axes (without the layer axis) that form each of its axes.
    shape: our shape, without the layer axis.
  """

  path: tuple[str, ...]
  layer: int | None
  groups: tuple[tuple[int, ...], ...]
  shape: tuple[int, ...]

  @property
  def axes(self) -> list[int]:
    """Returns our axes in the file's order, not joined."""
    return list(itertools.chain.from_iterable(self.groups))

  @property
  def stored(self) -> tuple[int, ...]:
    """Returns the shape in the file."""
    return tuple(map(self._size, self.groups))

  def _size(self, axes: tuple[int, ...]) -> int:
    """Returns the product of some of our axes' sizes."""
    return math.prod(self.shape[i] for i in axes)

  def read(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Reads our part at `index` from a sliceable file array."""
    # --- The slice of each of our axes, and so of each file axis.
    spans = [range(*s.indices(n)) for s, n in zip(index, self.shape, strict=True)]
    cuts = []
    for group in self.groups:
      # Only the first axis of a group is ever split.
      first = spans[group[0]]
      rest = self._size(group[1:])
      cuts.append(slice(first.start * rest, first.stop * rest))

    # --- The part in the file's order, and its axes back into ours.
    part = stored[tuple(cuts)].reshape([len(spans[i]) for i in self.axes])
    return part.transpose(np.argsort(self.axes))

  def write(self, x: np.ndarray) -> np.ndarray:
    """Makes the file's array of ours."""
    return np.ascontiguousarray(x.transpose(self.axes).reshape(self.stored))


def hf_name(name: str) -> str:
  """Returns Hugging Face's name, inside a layer, of one of our arrays."""
  return _LAYER[name][0]


def name_table(shapes: dict[str, Any], layers: int) -> dict[str, Entry]:
  """Lists Hugging Face's names of a tree of parameters, stacked or not.

  Raises:
    ValueError: listing parameters that have no name there.
  """
  out = {}
  unmapped = []
  for keys, x in jax.tree_util.tree_leaves_with_path(shapes):
    path = tuple(k.key for k in keys)
    name = path[-1]
    if len(path) == 1 and name in _TOP:
      hf, groups = _TOP[name]
      out[hf] = Entry(path, None, groups, tuple(x.shape))
    elif len(path) == 2 and name in _LAYER:
      hf, groups = _LAYER[name]
      # Stacked, we have one array; the file has one per layer.
      if path[0] == "layers":
        for i in range(layers):
          entry = Entry(path, i, groups, tuple(x.shape[1:]))
          out[f"model.layers.{i}.{hf}"] = entry
      else:
        number = path[0].removeprefix("layer_")
        entry = Entry(path, None, groups, tuple(x.shape))
        out[f"model.layers.{number}.{hf}"] = entry
    else:
      unmapped.append("/".join(path))
  if unmapped:
    raise ValueError(f"Hugging Face has no name for {', '.join(unmapped)}")
  return out
