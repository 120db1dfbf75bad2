"""The work of `bench.train` and `bench.mfu`: a model folder and rows of tokens.

A peer's interpreter runs this file too: nothing of ours, nor JAX, is imported on top.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

_BATCHES = 4  # different batches, used in turn
_SHARES = (3, 4, 5, 9, 11)  # 32nds of a row that its segments take
_MODEL, _ROWS, JOB = "model", "rows.npz", "job.json"


@dataclasses.dataclass(frozen=True)
class Size:
  """A model and the work of one step.

  Attributes:
    model: fields of `ModelConfig`.
    rows: of a step, whatever goes through the model at once.
    steps: of a round.
    length: tokens of a row, a multiple of 32.
    dtype: of the computation. Trained parameters are float32, frozen ones of `dtype`.
    lora: rank of adapters on every matrix of the layers; 0 trains all parameters.
  """

  model: Mapping[str, Any]
  rows: int
  steps: int
  length: int = 1024
  dtype: str = "float32"
  lora: int = 0

  @property
  def param_dtype(self) -> str:
    """Of the folder's weights."""
    return self.dtype if self.lora else "float32"


def model_fields(
  V: int, D: int, L: int, N: int, K: int, H: int, F: int
) -> dict[str, Any]:
  return {
    "vocab_size": V,
    "width": D,
    "layers": L,
    "heads": N,
    "kv_heads": K,
    "head_dim": H,
    "ff": F,
    # tunix computes its rotary frequencies with this base whatever its config says.
    "rope_theta": 1e6,
  }


SIZES = {
  "1M": Size(model_fields(1_344, 128, 4, 4, 2, 32, 384), rows=8, steps=4),
  "5M": Size(model_fields(4_096, 256, 6, 4, 2, 64, 640), rows=8, steps=2),
  "100M": Size(model_fields(32_768, 768, 12, 12, 4, 64, 2_048), rows=2, steps=1),
}


def segments(length: int) -> list[int]:
  """Tokens of the segments of a row, in some order."""
  return [share * length // sum(_SHARES) for share in _SHARES]


def make_rows(size: Size, seed: int) -> dict[str, np.ndarray]:
  """Full rows of random tokens; every row has the same segments in another order.

  So every row has as many weighted tokens, and a mean of rows' means is the mean.

  Returns:
    tokens, segment, position (int32) and weight (float32), each [rows, length]. The
    first quarter of a segment, which stands for a prompt, has weight 0.
  """
  rng = np.random.default_rng(seed)
  shape = (size.rows, size.length)
  out = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment", "position")}
  out["tokens"][:] = rng.integers(0, size.model["vocab_size"], shape)
  out["weight"] = np.zeros(shape, np.float32)
  for row in range(size.rows):
    begin = 0
    for number, n in enumerate(rng.permutation(segments(size.length)), 1):
      out["segment"][row, begin : begin + n] = number
      out["position"][row, begin : begin + n] = np.arange(n)
      out["weight"][row, begin + n // 4 : begin + n] = 1
      begin += n
  return out


def write_work(folder: str, seed: int = 0) -> None:
  """What all contestants read: a model folder and the batches, [batches, rows, T].

  Args:
    folder: holds the job, of which `size` is read.
    seed: of weights and rows.
  """
  from coa_jax.model.config import ModelConfig
  from coa_jax.model.hf.io import save_model
  from coa_jax.model.transformer import init_params

  with open(os.path.join(folder, JOB), encoding="utf-8") as f:
    size = Size(**json.load(f)["size"])
  cfg = ModelConfig(**{**size.model, "param_dtype": size.param_dtype})
  save_model(os.path.join(folder, _MODEL), cfg, init_params(cfg, seed))
  batches = [make_rows(size, seed + i) for i in range(_BATCHES)]
  stacked = {k: np.stack([b[k] for b in batches]) for k in batches[0]}
  np.savez(os.path.join(folder, _ROWS), **stacked)


class Work:
  """What a contestant trains on; every step takes the next of the batches.

  Attributes:
    model: the folder to load.
    setting: the contestant's, without its rows.
    rows: that go through the model at once.
    size: what is trained.
    pieces: of a step.
    tokens: that count in a step.
  """

  def __init__(self, folder: str, setting: Mapping[str, Any]):
    """Args: the folder that `write_work` filled; the contestant's setting.

    Raises:
      ValueError: the setting's rows do not divide a step's.
    """
    self.model = os.path.join(folder, _MODEL)
    self.setting = dict(setting)
    with np.load(os.path.join(folder, _ROWS)) as arrays:
      self._arrays = dict(arrays)
    with open(os.path.join(folder, JOB), encoding="utf-8") as f:
      self.size = Size(**json.load(f)["size"])
    shape = self._arrays["tokens"].shape
    self.rows = min(self.setting.pop("rows"), shape[1])
    if shape[1] % self.rows:
      raise ValueError(f"rows={self.rows} does not divide a step's {shape[1]} rows")
    self.pieces = shape[1] // self.rows
    # Weighted tokens of a step, the same in all.
    self.tokens = float(self._arrays["weight"][0].sum())
    self._step = 0

  def micro_batches(self) -> list[dict[str, np.ndarray]]:
    """The next step's rows, in `pieces` parts; arrays as `make_rows` returns."""
    batch = {k: x[self._step % _BATCHES] for k, x in self._arrays.items()}
    self._step += 1
    starts = range(0, self.pieces * self.rows, self.rows)
    return [{k: x[i : i + self.rows] for k, x in batch.items()} for i in starts]
