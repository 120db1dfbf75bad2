"""Rollouts on the real sampler: the properties that training relies on.

budget: the laws of one engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import zlib

import jax
import numpy as np
import pytest
import toy
from playing import CFG, CONFIG, content, contents, engine, play, toy_worker

from coa_jax.learner import batch as batching
from coa_jax.model import cache as caching
from coa_jax.model import transformer
from coa_jax.model.kernels import paged
from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Author, CallStatus, Status, ToolCall
from coa_jax.rollout import pages as paging
from coa_jax.rollout import programs, sampler, scheduler, slot_cache
from coa_jax.rollout.replicas import ReplicaPool
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import Episode


def set_in_flight(pool: ReplicaPool, windows: int) -> None:
  """Sets how many windows a CPU dispatches before it reads the first."""
  for lane in pool._lanes:
    lane.replica.device._most_in_flight = windows


class GreedyTurn(Episode):
  """Samples 30 tokens greedily after a prompt, and stores them."""

  seed = 0
  temperature = 0.0

  def __init__(self, sequence: int, prompt: list[int]):
    self.sequence = sequence
    self.limit = len(prompt) + 30
    self._prompt = prompt

  def start(self) -> list[int]:
    return self._prompt

  def sampled(self, ids, logps, tag) -> None:
    self.sampled_ids = ids
    self.sampled_logps = logps


@pytest.mark.parametrize(("trained", "temperature"), [(False, 1.0), (True, 0.7)])
def test_sampler_log_probs_are_learner_log_probs(trained, temperature):
  """With a model of two layers."""
  params = toy.actor(60).params if trained else toy.params()
  on = engine(toy.MODEL)
  played = play(params, range(12), on=on, temperature=temperature)
  played = [played[n] for n in sorted(played)]
  assert not trained or sum(len(t.calls) for t in played) >= 12
  theirs = toy.logps_of(toy.MODEL, params, played, temperature)
  for t, expected in zip(played, theirs, strict=True):
    mine = toy.sampled_logps(t)
    assert len(mine) == t.usage.generated == len(expected) > 0
    np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_rescoring_gives_the_samplers_log_probs_bit_for_bit(
  novice, dtype, temperature, in_flight
):
  """The decoding program runs on the same tokens, in half precision too."""
  cfg = dataclasses.replace(CFG, dtype=dtype)
  worker = toy_worker(cfg, CONFIG)
  set_in_flight(worker.engine, in_flight)
  tools = toy.TableToolbox()
  groups = worker.generate_groups(novice, toy.TASKS, tools, 4, temperature, seed=3)
  played = [t for group in groups for t in group]
  assert sum(bool(t.calls) for t in played) >= 4
  again = worker.rescore(novice, played, temperature)
  assert again == [toy.sampled_logps(t) for t in played]
  # Another policy gives other log-probs.
  other = worker.rescore(toy.params(layers=1), played[:2], temperature)
  logp_diff = np.abs(np.concatenate(other) - np.concatenate(again[:2]))
  assert logp_diff.max() > 0.1


def test_rescoring_refuses_what_would_not_have_stopped_there(novice):
  worker = toy_worker()
  (group,) = worker.generate_groups(
    novice, toy.TASKS[:1], toy.TableToolbox(), 2, 1.0, seed=3
  )
  last = [s for s in group[1].segments if s.author == Author.POLICY][-1]
  del last.ids[-1], last.logps[-1]
  with pytest.raises(ValueError, match=r"'2 \+ 3'.* stops elsewhere"):
    worker.rescore(novice, group, 1.0)


def test_every_sampled_id_is_the_trained_id(novice, monkeypatch):
  """Tokens with loss weight in the batch are exactly the sampled ones."""
  drawn: dict[int, list[int]] = {}
  real = toy.CoAEpisode.sampled

  def spy(self, ids, logps, tag):
    drawn.setdefault(self.sequence, []).extend(ids)
    return real(self, ids, logps, tag)

  monkeypatch.setattr(toy.CoAEpisode, "sampled", spy)
  played = play(novice, range(12))
  for n, t in played.items():
    batch = batching.empty(1, toy.MAX_LEN)
    batching.fill(batch, 0, [t], [1.0])
    assert batch.tokens_BT[batch.loss_mask_BT > 0].tolist() == drawn[n]
    rest = [s for s in t.segments if s.author != Author.POLICY]
    assert t.num_tokens == len(drawn[n]) + sum(len(s.ids) for s in rest)


def test_prefilled_tokens_are_prompts_and_observations_exactly(novice):
  on = engine()
  played = play(novice, range(12), on=on)
  num_given = generated = 0
  for t in played.values():
    by_author = {a: 0 for a in Author}
    for s in t.segments:
      by_author[s.author] += len(s.ids)
    assert by_author[Author.PROMPT] == t.usage.prompt > 0
    assert by_author[Author.TOOL] == t.usage.observation
    assert by_author[Author.POLICY] == t.usage.generated
    num_given += t.usage.prompt + t.usage.observation
    generated += t.usage.generated
  assert sum(t.usage.observation > 0 for t in played.values()) >= 6
  assert on.counters.prefilled_tokens + on.counters.copied_tokens == num_given
  assert on.counters.sampled_tokens == generated
  assert generated <= on.counters.slot_steps <= on.counters.windows * 8 * 5


def test_a_prompt_that_a_neighbour_holds_is_copied_from_there(novice):
  """The samples of a group share their prompt's prefill; nothing else changes."""
  order = [0, 4, 8, 12, 16, 1, 5, 20, 9]  # TASKS[0] five times, then mostly TASKS[1]
  on = engine()
  shared = play(novice, order, on=on)
  num_given = sum(t.usage.prompt + t.usage.observation for t in shared.values())
  assert on.counters.prefilled_tokens + on.counters.copied_tokens == num_given
  assert on.counters.copied_tokens >= 4 * shared[0].usage.prompt
  for n in order:
    on = engine()
    (alone,) = play(novice, [n], on=on).values()
    assert content(alone) == content(shared[n])
    assert on.counters.copied_tokens == 0


@pytest.fixture(params=[pytest.param(paged.SHORT, marks=pytest.mark.soak), 16])
def short(request, monkeypatch):
  """Maximum length of short rows: longer ones are read block by block."""
  monkeypatch.setattr(programs, "SHORT", request.param)
  monkeypatch.setattr(paged, "SHORT", request.param)
  sampler.prefill.clear_cache()  # SHORT is not among its arguments
  yield
  sampler.prefill.clear_cache()


@pytest.mark.slow
def test_pages_change_nothing(novice, monkeypatch, short):
  """Neither their number nor their earlier owners; the pool grows as needed."""
  monkeypatch.setattr(caching, "PAGE_SIZE", 16)
  with monkeypatch.context() as fixed:
    fixed.setattr(slot_cache, "page_counts", lambda *_: [50])
    expected = play(novice, range(16), on=engine(window=3))
  assert max(t.num_tokens for t in expected.values()) > 64
  sizes = []
  real = sampler.window

  def spy(cfg, params, cache, *args):
    sizes.append(cache.pages)
    return real(cfg, params, cache, *args)

  monkeypatch.setattr(sampler, "window", spy)
  on = engine(window=3)
  grown = play(novice, range(16), on=on)
  assert contents(grown) == contents(expected)
  assert {10, 15, 20} <= set(sizes) <= {5, 7, 10, 15, 20, 30, 40}
  # A reused engine remembers nothing.
  again = play(novice, [3, 5], on=on)
  assert all(content(t) == content(expected[n]) for n, t in again.items())
  other = play(novice, [3], on=on, seed=4)
  assert content(other[3]) != content(expected[3])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("pages", "in_flight"), [(40, 3), pytest.param(8, 2, marks=pytest.mark.soak)]
)
def test_windows_in_flight_change_nothing(novice, monkeypatch, in_flight, pages):
  """Even while other slots stop, wait for tools, pause or start."""
  monkeypatch.setattr(caching, "PAGE_SIZE", 16)
  expected = play(novice, range(16), on=engine(window=3))
  monkeypatch.setattr(slot_cache, "page_counts", lambda *_: [pages])
  beside = []
  real = scheduler.Scheduler._hand_out

  def spy(self):
    beside.append(sum(not w.is_read for w in self.device.windows[1:]))
    return real(self)

  monkeypatch.setattr(scheduler.Scheduler, "_hand_out", spy)
  on = engine(window=3)
  set_in_flight(on, in_flight)
  for seed in range(3):
    slow = toy.TableToolbox(latency=toy.shuffled_latency(seed))
    assert contents(play(novice, range(16), slow, on=on)) == contents(expected)
  # Most windows were read with as many others in flight as allowed.
  assert np.bincount(beside)[in_flight - 1] > len(beside) / 2
  assert max(beside) == in_flight - 1
  assert (on.counters.pauses > 0) == (pages == 8)
  one_by_one = engine(window=3)
  play(novice, range(16), on=one_by_one)
  assert on.counters.sampled_tokens == 3 * one_by_one.counters.sampled_tokens


@pytest.mark.slow
@pytest.mark.parametrize("pages", [8, 13])
def test_without_free_pages_the_youngest_pauses_and_goes_on_alike(
  novice, monkeypatch, pages: int
):
  """Also with random tool latency; the first trajectory never pauses."""
  monkeypatch.setattr(caching, "PAGE_SIZE", 16)
  expected = play(novice, range(16), on=engine(window=3))
  monkeypatch.setattr(slot_cache, "page_counts", lambda *_: [pages])
  paused = []
  real = scheduler.Scheduler._pause

  def spy(self, slot):
    paused.append(slot.episode.sequence)
    real(self, slot)

  monkeypatch.setattr(scheduler.Scheduler, "_pause", spy)
  on = engine(window=3)
  played = play(
    novice, range(16), toy.TableToolbox(latency=toy.shuffled_latency(3)), on=on
  )
  assert contents(played) == contents(expected)
  assert on.counters.pauses == len(paused) > 0 and 0 not in paused


def test_a_prompt_finds_room_though_what_it_begins_with_fills_the_pool(novice):
  """One slot with one page: an equal next prompt reuses the page."""
  on = engine(slots=1)
  played = play(novice, [0, 4, 8, 1], on=on)
  assert on.counters.copied_tokens == 2 * played[0].usage.prompt
  for n in (4, 1):
    (alone,) = play(novice, [n], on=engine(slots=1)).values()
    assert content(alone) == content(played[n])


def test_memory_for_less_than_one_trajectory_is_refused():
  on = engine(memory=1e-6, max_len=3000)
  with pytest.raises(
    ValueError, match=r"one trajectory of rollout\.max_len=3000: it .*"
  ):
    play(toy.params(layers=1), [0], on=on)


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout", ["heads_first", pytest.param("places_last", marks=pytest.mark.soak)]
)
def test_prompts_that_begin_alike_are_prefilled_once_and_play_alike(
  monkeypatch, layout
):
  """Whole pieces are shared: the rest is prefilled in the same shapes as alone.

  On a GPU the prompts share pages by reference.
  """
  monkeypatch.setattr(caching, "_layout", lambda *_: layout)
  monkeypatch.setattr(caching, "PAGE_SIZE", 16)
  monkeypatch.setattr(paging, "PIECE", 32)
  params = toy.params(layers=1)
  rng = np.random.default_rng(0)
  begin = rng.integers(3, 60, 70).tolist()
  prompts = [begin + rng.integers(3, 60, n).tolist() for n in (3, 20, 20, 1, 30)]
  prompts[2] = prompts[1]  # an equal one; the next is only a prefix
  prompts.append(begin[:40])

  def episodes(which) -> list[GreedyTurn]:
    return [GreedyTurn(n, prompts[n]) for n in which]

  alone = {}
  for n in range(6):
    on = engine()
    (alone[n],) = toy.play(on, params, episodes([n]))
    assert on.counters.copied_tokens == 0
  on = engine()  # five slots: the sixth prompt starts after another has ended
  for episode in toy.play(on, params, episodes(range(6))):
    assert episode.sampled_ids == alone[episode.sequence].sampled_ids
    assert episode.sampled_logps == alone[episode.sequence].sampled_logps
  # Three prompts copy two pieces of 32, the last one copies one, the equal one all.
  assert on.counters.copied_tokens == 3 * 64 + len(prompts[2]) + 32


def test_the_cache_is_given_back_before_the_last_episode(novice):
  """Learning begins then, and needs the device's memory."""
  on = engine()
  on.set_policy(novice, 0)
  episodes = [
    toy.episode(toy.TASKS[n % len(toy.TASKS)], toy.TableToolbox(), n) for n in range(9)
  ]
  held: list[int] = []
  older = jax.live_arrays()  # kept alive, so that no new array has their ids
  known = {id(x) for x in older}

  def look(_: object) -> None:
    pools = [x for x in jax.live_arrays() if x.ndim == 4 and id(x) not in known]
    held.append(len(pools))

  with on.batch():
    futures = [on.submit(e) for e in episodes]
    for future in futures:
      future.add_done_callback(look)
  for future in futures:
    future.result(60)
  toy.eventually(lambda: len(held) == len(episodes))
  # Five slots: the cache is held while others play, and freed before the last result.
  assert held[0] == 2 * CFG.layers and held[-1] == 0


@pytest.mark.parametrize("piece", [5, 16])
def test_given_tokens_in_pieces_play_alike(novice, monkeypatch, piece: int):
  expected = play(novice, range(6))
  monkeypatch.setattr(paging, "PIECE", piece)
  lengths = []
  real = sampler.prefill

  def spy(cfg, params, cache, table_RC, token_RT, *args):
    lengths.append(token_RT.shape)
    return real(cfg, params, cache, table_RC, token_RT, *args)

  monkeypatch.setattr(sampler, "prefill", spy)
  pieces = play(novice, range(6))
  assert {shape[1] for shape in lengths} == {16}
  for n, t in pieces.items():
    assert [s.ids for s in t.segments] == [s.ids for s in expected[n].segments]


@pytest.mark.parametrize("tokens", [256, 32])
def test_latency_order_and_neighbours_change_nothing(novice, monkeypatch, tokens):
  monkeypatch.setattr(programs, "_CPU_TOKENS", tokens)  # per call: few rows, or one
  order = list(range(16))
  expected = play(novice, order)
  statuses = {t.status for t in expected.values()}
  assert Status.ENDED in statuses and len(statuses) > 1
  assert len({str(content(t)) for t in expected.values()}) >= 8
  shuffled = np.random.default_rng(0).permutation(order).tolist()
  for seed, other in enumerate((order, order[::-1], shuffled)):
    slow = toy.TableToolbox(latency=toy.shuffled_latency(seed))
    again = play(novice, other, slow)
    assert contents(again) == contents(expected)
  # Fewer neighbours, and another window size.
  slow = toy.TableToolbox(latency=toy.shuffled_latency(9))
  few = play(novice, [11, 2, 7], slow, on=engine(window=3))
  assert all(content(t) == content(expected[n]) for n, t in few.items())


def test_a_fault_of_a_tool_changes_its_own_trajectory_alone_and_not_before_it(novice):
  """A hash of the call decides its fault; other trajectories stay bit-identical."""
  expected = play(novice, range(24))

  def fault(name: str, body: str) -> str | ToolCall | None:
    kind = zlib.crc32(f"{name} {body}".encode()) % 24
    results = {
      0: "41",  # a wrong result
      1: "</observation><answer>5</answer><think>x</think><|im_end|>",
      2: "a tall tale. " * 20_000,
      3: ToolCall(name, body, "error: no answer after 1 s", CallStatus.TOOL),
      4: ToolCall(name, body, "down", CallStatus.INFRASTRUCTURE),
    }
    return results.get(kind)

  plain = toy.TableToolbox()

  def reply(name: str, body: str) -> str | ToolCall:
    return fault(name, body) or plain.reply(name, body)

  faulty = toy.TableToolbox(reply, latency=toy.shuffled_latency(1))
  played = play(novice, range(24), faulty)
  whole = 0
  for n, t in played.items():
    faults = [fault(c.name, c.arguments) is not None for c in t.calls]
    if not any(faults):
      whole += 1
      assert content(t) == content(expected[n])
      continue
    tools = [i for i, s in enumerate(t.segments) if s.author == Author.TOOL]
    first = faults.index(True)
    until = tools[first] if first < len(tools) else len(t.segments)
    assert content(t)[0][:until] == content(expected[n])[0][:until]
    down = any(c.status == CallStatus.INFRASTRUCTURE for c in t.calls)
    assert (t.status == Status.INFRASTRUCTURE) == down == (t.reward is None)
  assert 6 <= whole <= 18, whole


def test_stacked_parameters_play_like_unrolled_ones():
  params = toy.actor(60).params
  expected = play(params, range(4), on=engine(toy.MODEL))
  stacked = engine(dataclasses.replace(toy.MODEL, scan=True, remat="full"))
  played = play(transformer.stack(params, toy.MODEL.layers), range(4), on=stacked)
  assert contents(played) == contents(expected)


def test_a_call_that_does_not_end_delays_one_window_only(novice, monkeypatch):
  """Other slots' windows wait for a call only once: a hung one would slow them all."""
  beside_windows = []
  real = scheduler.concurrent.futures.wait

  def spy(futures, timeout=None, **how):
    if "return_when" not in how:
      beside_windows.extend(futures)
    return real(futures, timeout, **how)

  monkeypatch.setattr(scheduler.concurrent.futures, "wait", spy)
  play(novice, range(8), toy.TableToolbox(latency=lambda: 0.3))
  assert len(beside_windows) >= 4
  assert len(set(beside_windows)) == len(beside_windows)


def test_waiting_for_a_tool_is_not_decoding(novice):
  """With one slot nothing decodes while its tool sleeps."""
  on = engine(slots=1)
  slow = toy.TableToolbox(latency=lambda: 0.3)
  episodes = [toy.episode(toy.TASKS[0], slow, n) for n in range(4)]
  began = time.monotonic()
  before = on.timings
  assert len(toy.play(on, novice, episodes)) == 4
  wall = time.monotonic() - began
  spent = on.timings.since(before)
  assert slow.calls and spent["tools"] > 0.9 * 0.3 * len(slow.calls)
  assert spent["decode"] > 0 and spent["sync"] > 0 and spent["idle"] == 0
  assert sum(spent.values()) <= wall
  time.sleep(0.2)
  toy.play(on, novice, [toy.episode(toy.TASKS[0], slow, 9)])
  assert on.timings.idle >= 0.2


def test_the_trained_policy_plays_its_scripts(actor):
  worker = toy_worker(toy.MODEL)
  toolbox = toy.TableToolbox()
  groups = worker.generate_groups(
    actor.params, toy.TASKS, toolbox, 2, 0.0, 0, version=3
  )
  for (question, script), group in zip(toy.SCRIPTS.items(), groups, strict=True):
    assert [t.sample for t in group] == [0, 1]
    for t in group:
      assert t.task_id == question and t.status == Status.ENDED and t.reward == 1.0
      turns = itertools.groupby(t.segments[1:], key=lambda s: s.author)
      text = ["".join(s.text for s in turn) for _, turn in turns]
      observations = [roles.wrap(roles.OBSERVATION, x) for x in script[1::2]]
      assert text[0::2] == list(script[0::2]) and text[1::2] == observations
      assert t.usage.tool_calls == len(observations) == len(t.calls)
      policy = [s for s in t.segments if s.author == Author.POLICY]
      assert all(s.versions == [3] * len(s.ids) for s in policy)
      assert all(not s.logps for s in t.segments if s.author != Author.POLICY)


def test_out_of_tokens_is_truncated_and_graded():
  short = engine(max_len=40)
  played = play(toy.params(layers=1), range(8), on=short).values()
  # Random tokens sometimes close a tool's tag; leave those trajectories out.
  truncated = [t for t in played if t.status == Status.TRUNCATED and not t.calls]
  assert len(truncated) >= 4
  for t in truncated:
    assert t.reward == 0.0 and t.num_tokens == 40


@pytest.mark.parametrize("spare", [0, 1])
def test_an_observation_that_just_fits_leaves_one_place(actor, spare: int):
  tok = toy.tokenizer()
  t = toy.trajectories()[0]
  before = sum(len(s.ids) for s in t.segments[:2])
  observation = len(tok.encode_observation("z" * 30).ids)
  # One token can be sampled after an observation that just fits.
  on = engine(toy.MODEL, max_len=before + observation + spare)
  toolbox = toy.TableToolbox(lambda name, body: "z" * 30)
  (t,) = play(actor.params, [0], toolbox, on=on, temperature=0.0).values()
  # The call is recorded even if its observation does not fit.
  assert t.status == Status.TRUNCATED and t.reward == 0.0 and len(t.calls) == 1
  assert (Author.TOOL in {s.author for s in t.segments}) == bool(spare)
  assert t.usage.observation == (observation if spare else 0)
  assert on.counters.prefilled_tokens == t.usage.prompt + t.usage.observation
  assert t.num_tokens == (before + observation + 1 if spare else before)


def test_a_prompt_without_room_names_the_field():
  with pytest.raises(ValueError, match=r"leaves no room in rollout\.max_len=8; raise"):
    play(toy.params(layers=1), [1], on=engine(max_len=8))


def test_a_worker_wants_tools_of_its_variant_and_a_tokenizer_that_fits():
  with pytest.raises(ValueError, match="unknown protocol variant 'webb'"):
    dataclasses.replace(CONFIG, variant="webb")
  with pytest.raises(ValueError, match="has no tool 'telescope'"):
    make_worker(CFG, toy.tokenizer(), CONFIG, ["telescope"])
  small = dataclasses.replace(CFG, vocab_size=64)
  with pytest.raises(ValueError, match=r"set model\.vocab_size"):
    make_worker(small, toy.tokenizer(), CONFIG, toy.TOOLS)
