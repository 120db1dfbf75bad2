"""The list of programs that a config compiles is what a run compiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import toy
from playing import CFG, engine

from coa_jax.model.cache import KVCache
from coa_jax.rollout import sampler, scheduler
from coa_jax.rollout.programs import DeviceCall, cache_sizes, device_calls
from coa_jax.rollout.types import Episode

_MAX_LEN = 500  # a cache of one block, or of two


class _Forced(Episode):
  """Takes given tokens after a given prompt, and is over at its limit."""

  def __init__(self, sequence: int, prompt: int, tokens: int):
    self.seed = 0
    self.sequence = sequence
    self.temperature = 1.0
    self.limit = prompt + tokens
    self._prompt = [3 + sequence] * prompt  # no two share one
    self._tokens = tokens

  def start(self) -> list[int]:
    return self._prompt

  def forced(self) -> list[int]:
    return [4] * self._tokens

  def sampled(self, ids, logps, tag) -> None:
    return None


def _keeps_company(places: int) -> list[_Forced]:
  """One episode that holds the cache at its size, and short ones of every bucket."""
  most = min(places, _MAX_LEN)
  shortest = []
  length = 1
  while length + 2 <= most:
    shortest.append(length)
    length = max(16, 2 * (length - 1)) + 2  # the shortest of the next bucket
  out = [_Forced(0, prompt=most - 60, tokens=60)]
  # By twos, as slots are left: two of a bucket, then two of different ones.
  for length in [*np.repeat(shortest, 2).tolist(), *shortest]:
    out.append(_Forced(len(out), prompt=length, tokens=2))
  return out


@pytest.mark.parametrize("piece", [scheduler.PIECE, 100])
def test_a_run_compiles_what_is_listed_and_nothing_else(monkeypatch, piece: int):
  monkeypatch.setattr(scheduler, "PIECE", piece)
  cfg = dataclasses.replace(CFG, layers=1)
  params = toy.params(layers=1)
  pool = engine(cfg, slots=3, inject_rows=2, window=4, max_len=_MAX_LEN)
  seen = set()
  extend, window = sampler.extend, sampler.window

  def spy_extend(cfg, params, cache, row_R, token_RT, *rest):
    seen.add(DeviceCall("extend", cache.size, *token_RT.shape))
    return extend(cfg, params, cache, row_R, token_RT, *rest)

  def spy_window(cfg, params, cache, state, tables, forced_BW, *rest):
    seen.add(DeviceCall("window", cache.size, *forced_BW.shape))
    return window(cfg, params, cache, state, tables, forced_BW, *rest)

  monkeypatch.setattr(sampler, "extend", spy_extend)
  monkeypatch.setattr(sampler, "window", spy_window)
  for function in (extend, window):
    function.clear_cache()
  for places in cache_sizes(_MAX_LEN):
    toy.play(pool, params, _keeps_company(places))
  assert seen == set(device_calls(pool.config, "cpu"))
  # As often as jit had to compile: no argument but these shapes makes another program.
  assert extend._cache_size() + window._cache_size() == len(seen)


def test_the_sizes_listed_are_those_that_a_cache_takes():
  for most in (1, 100, 256, 257, 700, 1024, 1025):
    listed = cache_sizes(most)
    cfg = dataclasses.replace(CFG, layers=1, width=8, head_dim=2)
    cache = KVCache.one_block(cfg, 1, most)
    sizes = [cache.size]
    for needed in np.unique(np.linspace(1, most, 40, dtype=int)):
      cache = cache.resize(int(needed), most)
      sizes.append(cache.size)
    for needed in (most, most // 3 + 1, most // 9 + 1, 1):
      cache = cache.resize(needed, most)
      sizes.append(cache.size)
    assert sorted(set(sizes)) == listed
