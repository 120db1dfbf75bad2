"""Token data sets on disk: they read back as written, and the row order resumes."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from started import free_address, outputs

from coa_jax.learner import batch as batching
from coa_jax.learner.dataset import Dataset, check_ids
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol.trajectory import Author, Segment, Trajectory


def numbered(folder, count: int, length: int = 4) -> Dataset:
  """A data set whose n-th sequence (from 1) is `length` times token n."""
  where = os.path.join(folder, f"{count}_{length}")
  if not os.path.exists(where):
    Dataset.write(
      where,
      [
        Trajectory(str(n), [Segment(Author.POLICY, "", "", [n] * length)])
        for n in range(1, count + 1)
      ],
    )
  return Dataset(where)


def stream(
  dataset: Dataset, size: int, seed: int, first: int, count: int, per_row: int = 1
) -> list[int]:
  """Numbers of the four-token sequences in training order, from micro-batch `first`."""
  every = np.arange(len(dataset))
  found = dataset.endless(every, size, 4 * per_row, ONE_DEVICE, seed, first)
  out: list[int] = []
  for micro in itertools.islice(found, count):
    out += micro.batch.tokens_BT[:, ::4].ravel().tolist()
  return out


def test_a_batch_of_it_is_the_batch_of_the_trajectories(tmp_path):
  trajectories = toy.trajectories()
  Dataset.write(str(tmp_path / "d"), trajectories)
  dataset, length = Dataset(str(tmp_path / "d")), toy.MAX_LEN
  every = np.arange(len(dataset))
  theirs = list(batching.batches(trajectories, 3, length))
  for micro, expected in zip(
    dataset.once(every, 3, length, ONE_DEVICE), theirs, strict=True
  ):
    for name, array in vars(expected).items():
      ours = getattr(micro.batch, name)
      assert (ours is None) == (array is None)
      if array is not None:
        np.testing.assert_array_equal(ours, array, err_msg=name)
        assert ours.dtype == array.dtype
    assert micro.policy == expected.loss_mask_BT.sum() > 0
    counts = [n for row in expected.segment_BT for n in np.bincount(row)[1:]]
    assert micro.lengths == counts
  assert not (tmp_path / "d.tmp").exists()


def test_the_index_of_each_trajectory(tmp_path):
  written = [
    Trajectory("a", [Segment(Author.PROMPT, "", "", [5, 0])]),
    Trajectory("b", [Segment(Author.POLICY, "", "", [0, 7, 9])]),
    Trajectory("a", []),
    Trajectory(
      "c", [Segment(Author.TOOL, "", "", [1]), Segment(Author.POLICY, "", "")]
    ),
  ]
  Dataset.write(str(tmp_path / "d"), written)
  dataset = Dataset(str(tmp_path / "d"))
  assert len(dataset) == 4
  assert dataset.lengths_N.tolist() == [2, 3, 0, 1]
  assert dataset.policy_N.tolist() == [0, 3, 0, 0]
  assert dataset.task_N.tolist() == [0, 1, 0, 2]
  ids, ours = dataset.read(0)
  assert ids.tolist() == [5, 0] and ours.tolist() == [False, False]
  ids, ours = dataset.read(1)
  assert ids.tolist() == [0, 7, 9] and ours.all() and ids.dtype == np.int32


@pytest.mark.parametrize("bad", [-7, 10, 2**40, 1.0, True, "3"])
def test_an_id_that_no_token_has_is_named(bad):
  ids = [0, 9, bad, 4]
  for author in (Author.PROMPT, Author.POLICY):
    segments = [Segment(Author.PROMPT, "", "why", [1]), Segment(author, "", "ab", ids)]
    message = (
      f"task 'q' has token id {bad!r} in 'ab'; ids are whole numbers from 0 to 9"
    )
    with pytest.raises(ValueError, match=message):
      check_ids(Trajectory("q", segments), 10)
  check_ids(Trajectory("q", [Segment(Author.POLICY, "", "", [0, 9])]), 10)
  check_ids(Trajectory("q", [Segment(Author.POLICY, "", "")]), 10)


@pytest.mark.slow
@settings(max_examples=20)
@given(
  rows=st.integers(1, 23),
  size=st.integers(1, 9),
  first=st.integers(0, 7),
  seed=st.sampled_from([0, 1, 2**32 - 1]),
  per_row=st.integers(1, 2),
)
def test_every_epoch_has_every_row_once_wherever_it_is_resumed(
  tmp_path_factory, rows, size, first, seed, per_row
):
  epoch = rows * per_row
  dataset = numbered(tmp_path_factory.getbasetemp(), epoch)
  whole = stream(dataset, size, seed, 0, first + 8, per_row)
  epochs = [whole[i : i + epoch] for i in range(0, len(whole) - epoch + 1, epoch)]
  assert all(sorted(x) == list(range(1, epoch + 1)) for x in epochs)
  again = stream(dataset, size, seed, first, 8, per_row)
  assert again == whole[first * size * per_row :]
  if rows > 8 and len(epochs) > 1:
    assert epochs[0] != epochs[1]
    assert stream(dataset, size, 7, 0, first + 8, per_row) != whole
  # The batch size only cuts the same stream at other places.
  shared = stream(dataset, size + 1, seed, 0, 8, per_row)
  both = min(len(shared), len(whole))
  assert shared[:both] == whole[:both]


CHILD = """
import itertools, json, sys
import jax, numpy as np
address, processes, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, processes, process)
from coa_jax.learner.dataset import Dataset
from coa_jax.model.sharding import MeshConfig, make_partitioner
partitioner, dataset = make_partitioner(MeshConfig(fsdp=-1)), Dataset(sys.argv[4])
seen = {}
for first in (0, 3):
  rows = dataset.endless(np.arange(10), 4, 4, partitioner, 5, first)
  for micro in itertools.islice(rows, 5 - first):
    placed = partitioner.put(micro.batch)
    ids = micro.batch.tokens_BT[:, 0]
    seen.setdefault(first, []).append(
      [[int(row[0]) for shard in placed.tokens_BT.addressable_shards
        for row in shard.data], int((ids > 0).sum()), micro.policy])
print(json.dumps([seen[0], seen[3]]))
"""


@pytest.mark.slow
def test_processes_share_the_rows_of_an_epoch_and_read_their_own(tmp_path):
  """Real JAX processes: the rows on each one's devices, from the start and resumed."""
  dataset, address = numbered(tmp_path, 10), free_address()
  both = (["-c", CHILD, address, "2", str(i), tmp_path / "10_4"] for i in range(2))
  seen = [json.loads(said.splitlines()[-1]) for said in outputs(*both)]
  for first, ours in zip((0, 3), zip(*seen, strict=True), strict=True):
    alone = stream(dataset, 4, 5, first, 5 - first)
    together = [sorted(a[0] + b[0]) for a, b in zip(*ours, strict=True)]
    assert together == [sorted(alone[i : i + 4]) for i in range(0, len(alone), 4)]
    for rows, read, policy in itertools.chain(*ours):
      assert len(rows) == read == 2  # out of four; the other rows are never read
      assert policy == 16  # in the whole batch
  # 5 batches x 4 rows = 2 epochs x 10 rows.
  rows = [row for process, _ in seen for part, _, _ in process for row in part]
  assert sorted(rows) == sorted([*range(1, 11)] * 2)


MEMORY = """
import sys, numpy as np
from coa_jax.learner.dataset import Dataset
from coa_jax.model.sharding import ONE_DEVICE
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
def peak():
  with open("/proc/self/status") as f:
    return next(int(x.split()[1]) / 1024 for x in f if x.startswith("VmHWM"))
def rows(count):
  for n in range(count):
    yield Trajectory(str(n), [Segment(Author.POLICY, "", "", [n % 9] * 4000)])
Dataset.write(sys.argv[1] + "/few", rows(20))
few = Dataset(sys.argv[1] + "/few")
few.batch([np.array([0])], 8, 4096, ONE_DEVICE)
before = peak()
Dataset.write(sys.argv[1] + "/many", rows(2000))
many = Dataset(sys.argv[1] + "/many")
for n in range(100):
  many.batch([np.array([n])], 8, 4096, ONE_DEVICE)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_tokens(tmp_path):
  """8 million tokens: 32 MB on disk, about 300 MB as lists of Python integers."""
  (grown,) = outputs(["-c", MEMORY, tmp_path])
  assert float(grown) < 20  # MB: sign arrays, and mapped pages that were read
