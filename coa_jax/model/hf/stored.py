"""Weight files: written whole, read part by part, refused if NaN or infinite."""

from __future__ import annotations

import os
import stat
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from coa_jax.runtime.disk import atomic_path


def save_tensors(path: str, tensors: dict[str, np.ndarray]) -> None:
  """Writes a safetensors file with the folder's default file mode."""
  with atomic_path(path) as unfinished:
    # The library makes a file that only its owner can read.
    with open(unfinished, "wb") as f:
      mode = os.fstat(f.fileno()).st_mode
    save_file(tensors, unfinished, metadata={"format": "pt"})
    if os.stat(unfinished).st_mode != mode:
      os.chmod(unfinished, stat.S_IMODE(mode))


class StoredArray:
  """An array in a safetensors file; reading NaN or infinity is refused.

  Attributes:
    get_shape: returns the array's shape.
    get_dtype: returns its dtype, in safetensors' words ("BF16").
  """

  def __init__(self, file: str, name: str, array: Any):
    """Takes the file, the array's name there, and its slice from `safe_open`."""
    self._file = file
    self._name = name
    self._array = array
    # `hf.io` uses this object like the library's own slice.
    self.get_shape = array.get_shape
    self.get_dtype = array.get_dtype

  def __getitem__(self, index: Any) -> np.ndarray:
    """Reads a part.

    Raises:
      ValueError: the part holds NaN or infinity; the message names file and array.
    """
    part = self._array[index]
    if not is_finite(part):
      raise ValueError(
        f"{self._file}: array {self._name} holds NaN or infinity; weights are finite "
        "numbers: take the model from where they were"
      )
    return part


def is_finite(x: np.ndarray) -> bool:
  """Returns whether all numbers in a floating-point array are finite.

  Takes a fraction of the time of `np.isfinite(x).all()` and almost no memory; this
  matters because every loaded weight is checked.
  """
  # --- float32: a sum of squares is finite only if every number is.
  if x.dtype == np.float32:
    flat = x.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
      squares = np.dot(flat, flat)
    # Large finite numbers overflow too, so an infinite sum is checked again.
    return bool(np.isfinite(squares) or np.isfinite(x).all())

  # --- Half precision.
  if x.size == 0 or x.itemsize != 2:
    return bool(np.isfinite(x).all())
  # NumPy is slow in half precision. As bits, nonfinite numbers exceed all others of the
  # same sign, and the sign is the highest bit.
  positive, negative = np.array([np.inf, -np.inf], x.dtype).view(np.uint16)
  return bool(x.view(np.int16).max() < positive and x.view(np.uint16).max() < negative)
