"""Several model replicas give the same results as one.

Virtual devices must be configured before JAX starts, so the first test runs the others
in a new process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest
import toy
from jax._src import cache_key
from jax.experimental.compilation_cache import compilation_cache
from playing import CFG, CONFIG, HYBRID, contents, engine, keep_all, play, toy_worker
from started import run_tests_on_devices

from coa_jax.data.tasks.sampling import TaskSampler
from coa_jax.model import cache, decode_params, memory, transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import (
  MeshConfig,
  make_partitioner,
  make_partitioners,
)
from coa_jax.rollout import programs, sampler
from coa_jax.rollout.collect import RolloutCollector, ages
from coa_jax.rollout.replicas import ReplicaPool
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.rollout.types import SamplingConfig
from coa_jax.rollout.worker import RolloutWorker
from tests.model.models import params_of

DEVICES = 4
on_devices = pytest.mark.skipif(
  jax.device_count() != DEVICES, reason="run by test_on_virtual_devices"
)


@pytest.mark.slow
def test_on_virtual_devices():
  if jax.device_count() == DEVICES:
    pytest.skip("this is that run")
  run_tests_on_devices(__file__, DEVICES)


def replicas(tensor: int = 1, model: ModelConfig = CFG) -> ReplicaPool:
  return engine(model, make_partitioner(MeshConfig(data=2, tensor=tensor)))


@on_devices
def test_the_number_of_devices_changes_nothing(novice):
  """Trajectories and log-probs are bit-identical, whichever replica decodes them."""
  expected = play(novice, range(40))
  assert sum(len(t.calls) for t in expected.values()) >= 12
  on = replicas()
  played = play(novice, range(40), on=on)
  assert contents(played) == contents(expected)
  num_given = sum(t.usage.prompt + t.usage.observation for t in played.values())
  assert on.counters.prefilled_tokens + on.counters.copied_tokens == num_given
  assert on.capacity == DEVICES * CONFIG.slots


@on_devices
def test_replicas_find_in_jaxs_cache_what_the_first_has_compiled(
  novice, monkeypatch, tmp_path
):
  """With cache keys that contain no devices, as on GPUs."""
  real = cache_key._hash_serialized_compile_options
  monkeypatch.setattr(
    cache_key,
    "_hash_serialized_compile_options",
    lambda *args, **_: real(*args, strip_device_assignment=True),
  )
  on = replicas()
  for lane in on._lanes:
    lane.replica.device.compiles_ahead = True
  expected = play(novice, range(40))
  for function in (sampler.prefill, sampler.window):
    function.clear_cache()
  events: list[str] = []
  jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
  with compiled_programs(str(tmp_path)):
    played = play(novice, range(40), on=on)
  jax.monitoring.clear_event_listeners()
  assert contents(played) == contents(expected)
  files = os.listdir(tmp_path)
  listed = [
    f for f in files if f.startswith(("jit_prefill", "jit_window")) and "-cache" in f
  ]
  (counts,) = {tuple(lane.replica.device._page_counts) for lane in on._lanes}
  assert len(listed) == len(programs.device_calls(on.config, "cpu", counts))
  hits = events.count("/jax/compilation_cache/cache_hits")
  assert hits >= (DEVICES - 1) * len(listed)


@contextlib.contextmanager
def compiled_programs(folder: str) -> Iterator[None]:
  """Has JAX store every compiled program in a folder."""
  names = {
    "jax_compilation_cache_dir": folder,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
  }
  before = {name: getattr(jax.config, name) for name in names}
  for name, value in names.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


@on_devices
def test_a_few_episodes_are_dealt_out_evenly(novice, monkeypatch):
  """Each replica gets some; a group stays on one replica while there is room."""
  rounds: dict[int, list[str]] = {}
  real = Scheduler.round

  def spy(self, policy, version, new):
    rounds.setdefault(id(self), []).extend(e.task.id for e in new)
    return real(self, policy, version, new)

  monkeypatch.setattr(Scheduler, "round", spy)
  on = replicas()
  on.set_policy(novice, 0)
  futures = []
  for group, task in enumerate(toy.TASKS[:DEVICES]):
    for k in range(3):
      episode = toy.episode(task, toy.TableToolbox(), 3 * group + k)
      futures.append(on.submit(episode, group=group))
  for future in futures:
    future.result()
  assert len(rounds) == DEVICES
  assert all(len(ids) == 3 and len(set(ids)) == 1 for ids in rounds.values())


@on_devices
def test_a_matrix_that_is_split_makes_fewer_replicas(novice):
  on = replicas(tensor=2)
  assert on.capacity == 2 * CONFIG.slots
  played = play(novice, range(8), on=on, temperature=0.0)
  expected = play(novice, range(8), temperature=0.0)
  for n, t in played.items():  # products are summed in another order
    assert [s.ids for s in t.segments] == [s.ids for s in expected[n].segments]


@on_devices
def test_a_hybrids_states_are_split_by_heads():
  params = params_of(HYBRID)
  on = replicas(2, HYBRID)
  played = play(params, range(8), on=on, temperature=0.0)
  expected = play(params, range(8), on=engine(HYBRID), temperature=0.0)
  for n, t in played.items():
    assert [s.ids for s in t.segments] == [s.ids for s in expected[n].segments]


@on_devices
@pytest.mark.parametrize(("trained", "decoded"), [(1, 2), (2, 1)])
def test_replicas_split_matrices_as_rollouts_want_however_training_does(
  novice, trained, decoded
):
  """Bit-identical to rollouts when training has the same split."""
  partitioner = make_partitioner(MeshConfig(tensor=trained), rollout_tensor=decoded)
  params = jax.device_put(novice, partitioner.tree(novice))
  on = engine(CFG, partitioner, tensor=decoded)
  assert on.capacity == DEVICES // decoded * CONFIG.slots
  alike = make_partitioner(MeshConfig(tensor=decoded))
  expected = play(novice, range(8), on=engine(CFG, alike))
  assert contents(play(params, range(8), on=on)) == contents(expected)


@on_devices
def test_rollouts_on_devices_of_their_own_are_the_same(novice):
  """The learner sends weights from its devices, which hold no decoding weights."""
  learner, decoder = make_partitioners(MeshConfig(rollout=2))
  params = jax.device_put(novice, learner.tree(novice))
  on = engine(CFG, decoder)
  on.set_policy(params, 0)
  own = set(jax.devices()[2:])
  for view in on._policies:
    for x in jax.tree.leaves(view):
      assert x.sharding.device_set < own
  assert contents(play(params, range(12), on=on)) == contents(play(novice, range(12)))
  # One device learns; the other two split matrices.
  _, decoder = make_partitioners(MeshConfig(devices=3, rollout=2), rollout_tensor=2)
  on = engine(CFG, decoder, tensor=2)
  expected = play(
    novice, range(4), on=engine(CFG, make_partitioner(MeshConfig(tensor=2)))
  )
  assert contents(play(novice, range(4), on=on)) == contents(expected)


@on_devices
@pytest.mark.parametrize("own", [0, 2])
def test_the_bytes_of_a_device_are_counted(novice, own):
  """Each has half the matrices, and a part of the learner's state if it learns too."""
  learner, decoder = make_partitioners(MeshConfig(rollout=own), rollout_tensor=2)
  params = jax.device_put(novice, learner.tree(novice))
  on = engine(CFG, decoder, tensor=2)
  on.set_policy(params, 0)
  weights = decode_params.decoding_shapes(on.model, decoder)
  budget = memory.cache_budget(on.model, on.config, decoder, weights, params, 1, 10**6)
  device = decoder.mesh.devices.flat[0]

  def held(tree: Any) -> int:
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)

  assert budget.weights == sum(map(held, on._policies)) > 0
  assert budget.state == held(params) and (budget.state > 0) == (own == 0)
  page = cache.KVCache.empty(on.model, 1, toy.MAX_LEN)
  bytes_of_row = sum(x.nbytes for x in jax.tree.leaves(page))
  assert 2 * budget.token == bytes_of_row / toy.MAX_LEN


@on_devices
def test_nothing_of_a_policy_is_left_once_it_is_forgotten(novice):
  """Learning has the devices to itself: no decode parameters or caches stay."""
  partitioner = make_partitioner(MeshConfig())
  params = jax.device_put(novice, partitioner.tree(novice))
  on = engine(dataclasses.replace(CFG, weight_dtype="bfloat16"), partitioner)
  play(params, range(2), on=on)  # constants of compiled programs stay
  before = sum(x.nbytes for x in jax.live_arrays())
  play(params, range(24), on=on)
  on.set_policy(None, 0)
  assert sum(x.nbytes for x in jax.live_arrays()) < before


@on_devices
@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_matrices_are_split_as_others_are(monkeypatch, tied):
  monkeypatch.setattr(decode_params, "has_amx", lambda: True)
  monkeypatch.setattr(decode_params, "WIDE", CFG.width)
  model = dataclasses.replace(CFG, dtype="bfloat16", tie_embeddings=tied)
  on = replicas(2, model)
  params = transformer.init_params(model, 0)
  partitioner = make_partitioner(MeshConfig(data=2, tensor=2))
  view = decode_params.decoding_views(on.model, params, partitioner.decoding())[0]
  assert view["layer_0"]["o"].sharding.spec[1] == "tensor"
  assert view["layer_0"]["o"].dtype == jax.numpy.bfloat16
  played = play(params, range(4), on=on, temperature=0.0)
  alone = engine(model)
  expected = play(params, range(4), on=alone, temperature=0.0)
  for n, t in played.items():
    first, other = (x.segments[-1].ids[:8] for x in (t, expected[n]))
    assert first == other


@on_devices
def test_rollouts_ahead_take_up_a_policy_on_every_device(novice):
  partitioner = make_partitioner(MeshConfig())
  params = jax.device_put(novice, partitioner.tree(novice))
  sampling = SamplingConfig(prompts=12, samples=2, rounds=1, staleness=1)
  steps = 4

  def collect(worker: RolloutWorker, params: dict) -> list:
    tools = toy.TableToolbox(latency=toy.shuffled_latency(1))
    task_sampler = TaskSampler(toy.TASKS, 0)
    with RolloutCollector(
      worker, task_sampler, tools, sampling, keep_all, steps=steps, seed=3
    ) as collector:
      return [collector.next(params, step) for step in range(steps)]

  on_all = toy_worker(partitioner=partitioner.decoding())
  batches = collect(on_all, params)
  for step, batch in enumerate(batches):
    assert len(batch.groups) == 12 and set(ages(batch.groups, step)) <= {0, 1}
  # The same tokens as on one device, whichever replica decoded them.
  on_one = toy_worker()
  expected = collect(on_one, novice)

  def tokens(batches: list) -> list:
    played = [t for batch in batches for t in batch.played]
    return [(t.task_id, t.sample, toy.sampled_ids(t)) for t in played]

  assert tokens(batches) == tokens(expected)
