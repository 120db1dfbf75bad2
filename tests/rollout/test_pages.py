"""Page ownership, compared with a simple reference over random histories."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from coa_jax.rollout.pages import PagePool, prefix_keys


@pytest.mark.parametrize("seed", range(5))
def test_a_page_has_one_owner_or_several_readers_and_is_free_after_the_last(seed: int):
  rng = np.random.default_rng(seed)
  pool = PagePool(12)
  rows: list[list[int]] = []  # the pages of each reader
  holds: dict[bytes, list[int]] = {}  # the pages registered last, by key
  for step in range(400):
    readers = collections.Counter(page for row in rows for page in row)
    assert pool.free == pool.size - len(readers)
    action = rng.integers(5)
    if action == 0 and pool.free:
      pages = pool.take(int(rng.integers(1, pool.free + 1)))
      assert not set(pages) & set(readers) and len(set(pages)) == len(pages)
      for key in [key for key, held in holds.items() if set(held) & set(pages)]:
        del holds[key]
      rows.append(pages)
      if rng.integers(2):
        key = bytes([step % 7])
        holds = {k: h for k, h in holds.items() if k != key}
        pool.remember(key, pages)
        holds[key] = pages
    elif action == 1 and rows:
      pool.release(rows.pop(int(rng.integers(len(rows)))))
    elif action == 2:
      key = bytes([int(rng.integers(7))])
      found = pool.find(key)
      assert found == holds.get(key)
      if found:
        rows.append(found)
    elif action == 3 and pool.size < 20:
      pool.grow(pool.size + 1)
    elif action == 4 and rng.integers(10) == 0:
      pool.forget()
      holds.clear()


def test_pages_that_hold_nothing_are_given_away_first_then_the_longest_unread():
  pool = PagePool(5)
  first = pool.take(2)
  second = pool.take(2)
  pool.remember(b"first", first)
  pool.remember(b"second", second)
  pool.release(first)
  pool.release(second)
  (blank,) = pool.take(1)
  assert blank not in first + second
  # A row's last page is taken first: other prompts may share the row's beginning. One
  # key covers the whole row, so it is forgotten.
  assert pool.take(1) == first[-1:]
  assert pool.find(b"first") is None and pool.find(b"second") == second


def test_a_key_is_all_that_stands_before():
  a = list(range(10))
  b = [*a[:4], 99, *a[5:]]
  keys = [prefix_keys(ids, 3) for ids in (a, b, a[:7], a[:6])]
  assert keys[0][0] == keys[1][0] and not set(keys[0][1:]) & set(keys[1][1:])
  assert keys[2][:2] == keys[0][:2] == keys[3] and keys[2][2] != keys[0][2]
  assert prefix_keys([], 3) == []
