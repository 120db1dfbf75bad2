"""Writes cases.json: the shared inputs for our losses and the peers'.

  python tests/learner/oracles/make_cases.py

Each case has 8 rows with 12 tokens, in two groups of 4; three rows have holes
(observations). `near` is slightly off-policy. `far` is far off-policy, so every bound
is active. `hard` has a row without policy tokens, a row with only one, a group without
variance, and log-ratios beyond every clamp.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
B, T, K = 8, 12, 4


def case(seed: int, drift: float, hard: bool = False) -> dict[str, list]:
  """One case's arrays as lists, [B] or [B, T]."""
  rng = np.random.default_rng(seed)
  mask = np.zeros((B, T))
  for row, n in enumerate((12, 9, 5, 12, 7, 11, 3, 8)):
    mask[row, :n] = 1
  for row, hole in ((0, slice(4, 7)), (3, slice(2, 9)), (5, slice(6, 8))):
    mask[row, hole] = 0
  reward = np.array([1, 0, 0.5, 0, 0, 1, 1, 0.25]) + rng.normal(scale=0.1, size=B)
  old = -rng.gamma(1.0, 1.2, size=(B, T)) - 0.01
  logp = np.minimum(old + rng.normal(scale=drift, size=(B, T)), -1e-3)
  if hard:
    mask[2], mask[6] = 0, 0
    mask[6, 3] = 1
    reward[K:] = 0.5
    logp[0, 1], old[0, 2], logp[1, 0], old[1, 4] = -60.0, -70.0, -35.0, -45.0
  reference = np.minimum(old + rng.normal(scale=drift, size=(B, T)), -1e-3)
  sampler = np.minimum(old + rng.normal(scale=drift / 2, size=(B, T)), -1e-3)
  value = rng.normal(scale=0.5, size=(B, T))
  arrays = {
    "mask": mask,
    "reward": reward,
    "advantage": rng.normal(size=B),
    "logp": logp,
    "old": old,
    "reference": reference,
    "sampler": sampler,
    "value": value,
    "new_value": value + rng.normal(scale=0.6, size=(B, T)),
    "return": rng.normal(size=(B, T)),
  }
  return {k: np.round(v, 6).tolist() for k, v in arrays.items()}


if __name__ == "__main__":
  cases = {"near": case(0, 0.3), "far": case(1, 2.0), "hard": case(2, 0.5, True)}
  text = json.dumps(cases).replace("}, ", "},\n")
  (HERE / "cases.json").write_text(text + "\n", encoding="utf-8")
