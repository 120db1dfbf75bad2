"""Several replicas of the model decode as one does, and end as one does.

JAX is told of virtual devices before it starts, so the first test runs the others.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading

import jax
import pytest
import toy
from test_scheduler import CFG, CONFIG, content, play, scheduler

from coa_jax.model import decode_params, transformer
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import MeshConfig, make_layout
from coa_jax.protocol.grammar.automaton import compile_stops
from coa_jax.rollout.ahead import Ahead, Plan, ages
from coa_jax.rollout.replicas import Scheduler
from coa_jax.rollout.streaming import Ask, Team
from coa_jax.rollout.worker import RolloutWorker
from coa_jax.tasks.sampling import Draw

DEVICES = 4
on_devices = pytest.mark.skipif(
  jax.device_count() != DEVICES, reason="run by test_on_virtual_devices"
)


def test_on_virtual_devices():
  if jax.device_count() == DEVICES:
    pytest.skip("this is that run")
  flags = f"--xla_force_host_platform_device_count={DEVICES}"
  command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0"]
  done = subprocess.run(
    [*command, "-p", "no:cacheprovider", __file__],
    env={**os.environ, "XLA_FLAGS": flags},
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stdout[-4000:]
  assert "s......" in done.stdout  # this test was skipped, the others were run


def replicas(tensor: int = 1, model: ModelConfig = CFG) -> Scheduler:
  table = compile_stops(toy.VARIANT, toy.tokenizer(), CFG.vocab_size)
  layout = make_layout(MeshConfig(data=2, tensor=tensor))
  return Scheduler(model, table, CONFIG, layout)


@pytest.fixture(scope="module")
def novice() -> dict:
  return toy.actor(60).params


@on_devices
def test_the_number_of_devices_changes_nothing(novice):
  """The same trajectories and log-probs bit for bit, whoever decodes them."""
  order = list(range(40))
  expected = play(novice, toy.TableToolbox(), order)
  assert sum(len(t.calls) for t in expected.values()) >= 12
  on = replicas()
  played = play(novice, toy.TableToolbox(), order, on=on)
  assert {n: content(t) for n, t in played.items()} == {
    n: content(t) for n, t in expected.items()
  }
  each = [slots.counters for slots in on._slots]
  assert len(each) == DEVICES and all(c.sampled_tokens > 0 for c in each)
  given = sum(t.usage.prompt + t.usage.observation for t in played.values())
  assert on.counters.prefilled_tokens + on.counters.copied_tokens == given
  assert on.counters.sampled_tokens == sum(c.sampled_tokens for c in each)
  # A few are dealt out evenly, not to whoever asks first.
  on = replicas()
  play(novice, toy.TableToolbox(), order[:8], on=on)
  assert {s.counters.prefilled_tokens > 0 for s in on._slots} == {True}


@on_devices
def test_a_matrix_that_is_split_makes_fewer_replicas(novice):
  on = replicas(tensor=2)
  assert [s.layout.mesh.size for s in on._slots] == [2, 2]
  played = play(novice, toy.TableToolbox(), range(8), on=on, temperature=0.0)
  expected = play(novice, toy.TableToolbox(), range(8), temperature=0.0)
  for n, t in played.items():  # products are added up in another order
    assert [s.ids for s in t.segments] == [s.ids for s in expected[n].segments]


@on_devices
@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_matrices_are_split_as_others_are(monkeypatch, tied):
  monkeypatch.setattr(decode_params, "has_amx", lambda: True)
  monkeypatch.setattr(decode_params, "WIDE", CFG.width)
  model = dataclasses.replace(CFG, dtype="bfloat16", tie_embeddings=tied)
  on, params = replicas(2, model), transformer.init_params(model, 0)
  view = on.views(params)[0]
  assert view["layer_0"]["o"].sharding.spec[1] == "tensor"
  assert view["layer_0"]["o"].dtype == jax.numpy.bfloat16
  played = play(params, toy.TableToolbox(), range(4), on=on, temperature=0.0)
  alone = scheduler(model)
  expected = play(params, toy.TableToolbox(), range(4), on=alone, temperature=0.0)
  for n, t in played.items():
    first, other = (x.segments[-1].ids[:8] for x in (t, expected[n]))
    assert first == other


@on_devices
def test_a_slow_tool_holds_up_no_replica(novice):
  """While one trajectory's tool hangs all others end."""
  release = threading.Event()
  hung = set()

  def reply(name: str, body: str) -> str:
    if not hung:
      hung.add(body)
      release.wait(600)
    return toy.TableToolbox().reply(name, body)

  episodes = [
    toy.episode(toy.TASKS[n % 4], toy.TableToolbox(reply), n) for n in range(24)
  ]
  ended = []
  for episode in replicas().run(novice, iter(episodes), 3):
    ended.append(episode.sequence)
    if len(ended) == 23:
      release.set()
  assert sorted(ended) == list(range(24)) and len(hung) == 1


@on_devices
def test_threads_end_with_the_run_whatever_ends_it(novice):
  def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "replica"]

  on = replicas()
  episodes = [toy.episode(toy.TASKS[n % 4], toy.TableToolbox(), n) for n in range(40)]
  stream = on.run(novice, iter(episodes), 3)
  next(stream)
  assert threads()
  stream.close()
  assert not threads()

  def broken():
    yield from [toy.episode(toy.TASKS[0], toy.TableToolbox(), n) for n in range(25)]
    raise OSError("the queue broke")

  with pytest.raises(OSError, match="the queue broke"):
    list(on.run(novice, broken(), 3))
  assert not threads()
  assert len(play(novice, toy.TableToolbox(), range(12), on=on)) == 12


@on_devices
def test_rollouts_ahead_take_up_a_policy_on_every_device(novice):
  layout = make_layout(MeshConfig())
  player = RolloutWorker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS, layout)
  params = jax.device_put(novice, layout.tree(novice))
  plan = Plan(steps=4, prompts=12, most=12, samples=2, temperature=1.0, staleness=1)
  args = toy.TableToolbox(latency=toy.shuffled_latency(1)), plan, 3, lambda group: True
  with Ahead(player, Draw(toy.TASKS, 0), *args) as ahead:
    taken = [ahead.next(params, step) for step in range(plan.steps)]
  for step, one in enumerate(taken):
    assert len(one.kept) == 12 and set(ages(one.kept, step)) <= {0, 1}
  each = [slots.counters for slots in player.engine._slots]
  assert len(each) == DEVICES and all(c.sampled_tokens > 0 for c in each)
  # The same as on one device, whoever decoded them.
  with Ahead(
    RolloutWorker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS), Draw(toy.TASKS, 0), *args
  ) as alone:
    expected = [alone.next(novice, step) for step in range(plan.steps)]

  def tokens(steps: list) -> list:
    played = [t for one in steps for group in one.played for t in group]
    return [(t.task_id, t.sample, toy.sampled_ids(t)) for t in played]

  assert tokens(taken) == tokens(expected)
  names = [t.name for t in threading.enumerate()]
  assert "ahead" not in names and "replica" not in names


@on_devices
def test_a_team_answers_on_all_devices(actor):
  layout = make_layout(MeshConfig())
  player = RolloutWorker(CFG, toy.tokenizer(), CONFIG, toy.TOOLS, layout)
  params = jax.device_put(actor.params, layout.tree(actor.params))
  with Team(player, params, toy.TableToolbox()) as team:
    team.warm_up()
    for _ in range(3):
      told, over = [], threading.Semaphore(0)

      def tell(what, told=told, over=over) -> None:
        told.append(what)
        if not hasattr(what, "is_tag"):
          over.release()

      for i in range(12):
        team.ask(Ask("4 * 4 + 1", 0.0, seed=i), tell)
      assert all(over.acquire(timeout=300) for _ in range(12))
      ends = [t for t in told if not hasattr(t, "is_tag")]
      assert all(t.text.endswith(toy.end("17")) for t in ends) and len(ends) == 12
