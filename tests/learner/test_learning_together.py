"""Multi-process learning: each process builds its own rows, equal to one process's."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from started import free_address, outputs

from coa_jax.protocol.trajectory import (
  Author,
  CallStatus,
  Segment,
  Status,
  ToolCall,
  Trajectory,
)
from coa_jax.rollout.exchange import from_bytes, to_bytes

PROGRAM = pathlib.Path(__file__).with_name("learn_in_processes.py")
SOAK = pytest.mark.soak
# Network outputs: sums over devices, which several processes add in another order.
OF_NETWORKS = {"old_BT", "reference_BT", "value_BT", "return_BT"}


def learnt(folder: pathlib.Path, case: str, processes: int) -> list[dict]:
  """Runs the processes, with four devices in all; returns what each one wrote."""
  outs = [folder / f"{processes}_{i}.npz" for i in range(processes)]
  commands = [[PROGRAM, out, case, str(4 // processes)] for out in outs]
  if processes > 1:
    address = free_address()
    for i, command in enumerate(commands):
      command += [address, str(processes), str(i)]
  outputs(*commands)
  found = []
  for out in outs:
    with np.load(out) as arrays:
      found.append(dict(arrays))
  return found


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "counts"),
  [
    *(pytest.param("critic", (count,), marks=SOAK) for count in (2, 4)),
    *(pytest.param("grpo", (count,), marks=SOAK) for count in (2, 4)),
    ("whitened", (4,)),
    pytest.param("whitened", (2,), marks=SOAK),
  ],
)
def test_processes_that_learn_together_are_one(tmp_path, case, counts):
  (one,) = learnt(tmp_path, case, 1)
  rows = len(one["rows"])
  assert one["tokens_BT"].any(axis=2).all(axis=0).any()  # some rows are always used
  for processes in counts:
    held = np.zeros(rows, int)
    for part in learnt(tmp_path, case, processes):
      mine = part.pop("rows")
      held[mine] += 1
      values = part.pop("values")
      np.testing.assert_allclose(values, one["values"], rtol=2e-5, atol=1e-6)
      for name, x in part.items():
        assert x.shape[1] == len(mine) < rows  # no rows from others
        expected = one[name][:, mine]
        # With a critic the advantage depends on the critic's values.
        if name in OF_NETWORKS or (case, name) == ("critic", "advantage_BT"):
          np.testing.assert_allclose(x, expected, rtol=2e-5, atol=1e-6, err_msg=name)
        else:
          np.testing.assert_array_equal(x, expected, err_msg=name)
    assert (held == (2 if case == "whitened" and processes == 4 else 1)).all()


def test_trajectories_are_read_as_they_were_written():
  logps = [-1.1, -0.0, -np.inf, -1e-42, -3.3e38]
  segments = [
    Segment(Author.PROMPT, "", "text", [5, 2**31 - 1, 0]),
    Segment(Author.POLICY, "think", "\ud800", [1, 2], logps[:2], [3, 3]),
    Segment(Author.TOOL, "code", "", []),
    Segment(Author.TOOL, "code", "", [7]),
    Segment(Author.POLICY, "answer", "", [4, 5, 6], logps[2:], [3, 4, 4]),
  ]
  calls = [ToolCall("code", "1", "2", CallStatus.TOOL, 0.1)]
  played = Trajectory("t", segments, calls, Status.ENDED, 0.3, {"answer": 1.0})
  numbered = [(4, played), (2, Trajectory("u"))]
  again = from_bytes(to_bytes(numbered))
  assert again == numbered
  read = np.array([x for s in again[0][1].segments for x in s.logps])
  np.testing.assert_array_equal(np.signbit(read), True)
  assert from_bytes(to_bytes([])) == []
