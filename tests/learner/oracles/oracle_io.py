"""Reads cases.json and prints a peer's results; needs only numpy."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable

import numpy as np

HERE = pathlib.Path(__file__).parent
# Settings shared by all peers and by us.
CLIP_LOW, CLIP_HIGH, DUAL, VALUE_CLIP = 0.2, 0.28, 3.0, 0.5
GAMMA, LAM, KL = 0.97, 0.9, 0.05
GROUP = np.repeat([0, 1], 4)


def read_cases() -> dict[str, dict[str, np.ndarray]]:
  """Returns {case: {field: float64 array}}."""
  cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
  return {name: {k: np.array(v) for k, v in c.items()} for name, c in cases.items()}


def print_all(compute: Callable[[dict[str, np.ndarray]], dict[str, object]]) -> None:
  """Prints {case: {quantity: number or nested list}}, with nine digits per number."""
  out = {}
  for name, case in read_cases().items():
    values = {k: np.asarray(v, np.float64) for k, v in compute(case).items()}
    out[name] = {k: _short(v) for k, v in values.items()}
  sys.stdout.write(
    json.dumps(out, separators=(",", ":")).replace('],"', '],\n"') + "\n"
  )


def _short(x: np.ndarray) -> float | list:
  if x.ndim:
    return [_short(y) for y in x]
  value = float(f"{x:.9g}")
  return int(value) if value == int(value) and abs(value) < 1e9 else value
