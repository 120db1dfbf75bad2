"""A run compiles exactly the programs listed for its config."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import jax
import pytest
import toy
from playing import CONFIG, engine

from coa_jax.rollout import pages as paging
from coa_jax.rollout import sampler, slot_cache
from coa_jax.rollout.programs import DeviceCall, device_calls
from coa_jax.rollout.types import Episode
from coa_jax.runtime import compiling

_MAX_LEN = 500  # rows have one page or two


class _Forced(Episode):
  """Forces tokens after a unique prompt, and after an observation."""

  def __init__(self, sequence: int, prompt: int, given: int = 0):
    self.seed = 0
    self.sequence = sequence
    self.temperature = 1.0
    self.limit = prompt + 2
    self._prompt = [3 + sequence] * prompt  # unique: no shared prefix
    self._given = [4] * given

  def start(self) -> list[int]:
    return self._prompt

  def forced(self) -> list[int]:
    return [4] * 2

  def sampled(self, ids, logps, tag) -> concurrent.futures.Future | None:
    if not self._given:
      return None
    future = concurrent.futures.Future()
    future.set_result(self._given)
    self.limit += len(self._given) + 2
    self._given = []
    return future

  def observed(self, result: list[int]) -> list[int]:
    return result


def _episodes() -> list[_Forced]:
  """Prefills in every length bucket, in the first page and in the second."""
  out = [_Forced(0, prompt=400)]
  for given in (1, 17, 33, 65, 129):
    out.append(_Forced(len(out), prompt=given + 1))
    out.append(_Forced(len(out), prompt=258, given=given))
  return out


@pytest.mark.slow
@pytest.mark.parametrize("piece", [paging.PIECE, 100])
@pytest.mark.parametrize("pages", [3, 5])
def test_a_run_compiles_what_is_listed_and_nothing_else(monkeypatch, piece, pages):
  monkeypatch.setattr(paging, "PIECE", piece)
  monkeypatch.setattr(slot_cache, "page_counts", lambda *_: [pages])
  params = toy.params(layers=1)
  pool = engine(slots=3, prefill_rows=2, window=4, max_len=_MAX_LEN)
  seen = set()
  prefill, window = sampler.prefill, sampler.window

  def spy_prefill(cfg, params, cache, table_RC, token_RT, *rest):
    shape = (cache.pages, table_RC.shape[1], *token_RT.shape)
    seen.add(DeviceCall("prefill", *shape))
    return prefill(cfg, params, cache, table_RC, token_RT, *rest)

  def spy_window(cfg, params, cache, table_BC, state, tables, forced_BW, *rest):
    shape = (cache.pages, table_BC.shape[1], *forced_BW.shape)
    seen.add(DeviceCall("window", *shape))
    return window(cfg, params, cache, table_BC, state, tables, forced_BW, *rest)

  monkeypatch.setattr(sampler, "prefill", spy_prefill)
  monkeypatch.setattr(sampler, "window", spy_window)
  for function in (prefill, window):
    function.clear_cache()
  toy.play(pool, params, _episodes())
  assert seen == set(device_calls(pool.config, "cpu", [pages]))
  # jit compiled no others: only these shapes make a new program.
  assert prefill._cache_size() + window._cache_size() == len(seen)


@pytest.mark.slow
def test_programs_are_compiled_before_the_first_episode(monkeypatch, caplog, capsys):
  """All of them once, and again if fewer pages fit; later calls find them compiled."""
  monkeypatch.setattr(slot_cache, "page_counts", lambda *_: [pages])
  pages = 4
  params = jax.device_put(toy.params(layers=1))
  pool = engine(slots=3, prefill_rows=2, window=4, max_len=_MAX_LEN)
  (lane,) = pool._lanes
  lane.replica.device._most_in_flight = 2
  lane.replica.device.compiles_ahead = True
  listed = len(device_calls(pool.config, "cpu", [4]))
  for function in (sampler.prefill, sampler.window):
    function.clear_cache()

  def compiled() -> int:
    """Counts the sampler programs compiled since the last call."""
    said = [r.getMessage() for r in caplog.records]
    caplog.clear()
    names = (
      "Finished XLA compilation of jit(prefill)",
      "Finished XLA compilation of jit(window)",
    )
    return sum(line.startswith(names) for line in said)

  ahead = []
  real = compiling.compile_all

  def spy(*args, **options) -> None:
    real(*args, **options)
    ahead.append(compiled())

  monkeypatch.setattr(compiling, "compile_all", spy)
  jax.config.update("jax_log_compiles", True)  # in all threads
  try:
    for pages in (4, 5, 4, 3):  # noqa: B007 - what a device has left varies
      toy.play(pool, params, _episodes())
  finally:
    jax.config.update("jax_log_compiles", False)
  fewer = len(device_calls(pool.config, "cpu", [3]))
  assert ahead == [listed, fewer] and compiled() == 0
  said = capsys.readouterr().err
  assert f"compiling programs of the sampler: {listed}" in said
  assert f"compiled programs of the sampler: {listed} of {listed} in" in said


def test_long_rows_have_one_program_for_any_number_of_pages():
  config = dataclasses.replace(CONFIG, slots=16, prefill_rows=16, max_len=32768)
  calls = device_calls(config, "tpu", [640])
  assert len(calls) == 3 * 6 + 1 and {call.blocks for call in calls} == {128}
  assert str(calls[-1]) == "window 16 x 8, 128 of 640 pages"
  # Short rows have several programs on a CPU only: it reads their pages at once.
  short = dataclasses.replace(config, max_len=1024)
  blocks = {
    on: {c.blocks for c in device_calls(short, on, [8])} for on in ("cpu", "gpu")
  }
  assert blocks == {"cpu": {1, 2, 4}, "gpu": {4}}
