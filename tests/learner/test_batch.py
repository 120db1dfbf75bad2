"""Packing places each sequence once; the loss mask follows authorship."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.learner import batch as batching
from coa_jax.protocol.trajectory import Author, Segment, Trajectory

LENGTHS = st.lists(st.integers(0, 40), max_size=40)


@given(LENGTHS, st.integers(1, 32))
def test_every_sequence_that_fits_is_in_one_row_and_no_row_overflows(lengths, length):
  rows = batching.pack(lengths, length)
  placed = sorted(itertools.chain(*rows))
  assert placed == [i for i, n in enumerate(lengths) if 0 < n <= length]
  assert all(row == sorted(row) and row for row in rows)
  totals = [sum(lengths[i] for i in row) for row in rows]
  assert all(total <= length for total in totals)
  # No two rows fit into one.
  assert len(totals) < 2 or sum(sorted(totals)[:2]) > length


def by_turns(*counts: int, prompt: int = 2) -> Trajectory:
  """A prompt, then interleaved policy and tool segments with these token counts."""
  ids = itertools.count(1)
  segments = [
    Segment(Author.PROMPT, "question", "", [next(ids) for _ in range(prompt)])
  ]
  for n, count in enumerate(counts):
    author = Author.TOOL if n % 2 else Author.POLICY
    segment = Segment(author, "", "", [next(ids) for _ in range(count)])
    if author == Author.POLICY:
      segment.logps = [-i / 8 for i in segment.ids]
    segments.append(segment)
  return Trajectory("t", segments)


def test_a_row_holds_what_its_trajectories_hold():
  batch = batching.empty(2, 12)
  batching.fill(batch, 1, [by_turns(2, 1, 1), by_turns(1)], [0.5, -2.0])
  arrays = {k: x for k, x in vars(batch).items() if x is not None}
  row = {k: x[1].tolist() for k, x in arrays.items()}
  assert row["tokens_BT"] == [1, 2, 3, 4, 5, 6, 1, 2, 3, 0, 0, 0]
  assert row["segment_BT"] == [1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0, 0]
  assert row["position_BT"] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0, 0]
  assert row["loss_mask_BT"] == [0, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0]
  assert row["advantage_BT"] == [0, 0, 0.5, 0.5, 0, 0.5, 0, 0, -2, 0, 0, 0]
  assert row["logp_BT"] == [0, 0, -3 / 8, -0.5, 0, -0.75, 0, 0, -3 / 8, 0, 0, 0]
  assert row.pop("grammar_BT") == [-1] * 12
  assert not any(getattr(batch, k)[0].any() for k in row)


def test_only_the_policy_is_trained_on_whatever_the_others_say():
  for author in (Author.PROMPT, Author.TOOL, Author.ENVIRONMENT):
    batch = batching.empty(1, 4)
    batching.fill(batch, 0, [Trajectory("t", [Segment(author, "answer", "", [1, 2])])])
    assert not batch.loss_mask_BT.any() and batch.segment_BT.any()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_batches_have_one_shape_and_hold_every_token(counts, rows: int):
  played = [by_turns(n) for n in counts]  # 3 to 11 tokens
  advantages = [float(n) for n in range(len(played))]
  out = list(batching.batches(played, rows, 10, advantages))
  assert all(b.tokens_BT.shape == (rows, 10) for b in out)
  tokens, total = 0, 0.0
  for t, advantage in zip(played, advantages, strict=True):
    if t.num_tokens <= 10:
      tokens += t.num_tokens
      total += advantage * (t.num_tokens - 2)
  assert sum(int((b.segment_BT > 0).sum()) for b in out) == tokens
  assert sum(float(b.advantage_BT.sum()) for b in out) == pytest.approx(total)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 4))
def test_values_of_a_trajectory_are_read_back_at_its_place_only(counts, rows):
  played = [by_turns(n, 1, n % 3) for n in counts]  # 5 to 13 tokens
  packed = batching.Packed(played, rows, 16)
  assert packed.counts == [n + n % 3 for n in counts]
  logps = [[x for s in t.segments for x in s.logps] for t in played]
  for mine, expected in zip(packed.read("logp_BT"), logps, strict=True):
    np.testing.assert_allclose(mine, expected)
  values = [np.arange(1, n + 1) + 100.0 * i for i, n in enumerate(packed.counts)]
  packed.write("old_BT", values)
  for mine, expected in zip(packed.read("old_BT"), values, strict=True):
    np.testing.assert_array_equal(mine, expected)
  for b in packed.batches:
    np.testing.assert_array_equal(b.old_BT > 0, b.loss_mask_BT > 0)
  packed.write("loss_weight_BT", [float(i) for i in range(len(played))])
  assert [x.tolist() for x in packed.read("loss_weight_BT")] == [
    [float(i)] * n for i, n in enumerate(packed.counts)
  ]


def test_a_trajectory_longer_than_a_row_is_no_batch():
  with pytest.raises(ValueError, match="a trajectory of 11 tokens, rows of 10"):
    batching.Packed([by_turns(9)], 2, 10)
