"""A replica pool's queues, futures and threads, without a model."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time

import pytest
from playing import threads
from toy import eventually

from coa_jax.rollout.pool import ReplicaThreads
from coa_jax.rollout.types import Counters, RolloutConfig, Timings


class Attempt:
  """An episode that ends after N rounds."""

  def __init__(self, name: str, rounds: int = 1):
    self.name = name
    self.rounds = rounds

  def __repr__(self) -> str:
    return self.name


class Counting:
  """A mock replica that records its rounds; each round waits for `gate`."""

  def __init__(self, slots: int = 2, fails: str = ""):
    self.slots = slots
    self.fails = fails
    self.counters = Counters()
    self.timings = Timings()
    self.gate = threading.Event()
    self.gate.set()
    self.began = threading.Event()
    self.started: list[str] = []
    self.policies: list = []
    self.playing: list[Attempt] = []
    self.most = 0

  def round(self, policy, version, new):
    self.began.set()
    self.gate.wait(60)
    time.sleep(0.0005)
    self.playing += new
    self.started += [e.name for e in new]
    self.policies.append((policy, version))
    self.most = max(self.most, len(self.playing))
    if self.fails in self.started:
      raise OSError("the device is gone")
    for episode in self.playing:
      episode.rounds -= 1
    ended = [e for e in self.playing if e.rounds <= 0]
    self.playing = [e for e in self.playing if e.rounds > 0]
    return ended

  def drop(self, episode):
    if episode in self.playing:
      self.playing.remove(episode)

  def clear(self):
    self.playing = []


def is_idle() -> bool:
  return not threads("counting")


def pool(*replicas: Counting, policy="p") -> ReplicaThreads:
  out = ReplicaThreads(RolloutConfig(), replicas, name="counting")
  out.publish([policy] * len(replicas), 0)
  return out


@pytest.mark.parametrize("seed", range(5))
def test_every_episode_ends_once_in_the_slots_there_are(seed):
  rng = random.Random(seed)
  replicas = [Counting(slots=rng.randint(1, 4)) for _ in range(3)]
  on = pool(*replicas)
  episodes = [Attempt(f"e{n}", rng.randint(1, 5)) for n in range(100)]
  futures = [on.submit(e, group=n // 8) for n, e in enumerate(episodes)]
  assert [f.result(60) for f in futures] == episodes
  started = [name for r in replicas for name in r.started]
  assert sorted(started) == sorted(e.name for e in episodes)
  assert all(0 < r.most <= r.slots for r in replicas)
  eventually(is_idle)
  assert on.capacity == sum(r.slots for r in replicas)


def test_a_replica_that_is_held_up_holds_up_no_other():
  replicas = [Counting(slots=1) for _ in range(2)]
  on = pool(*replicas)
  replicas[0].gate.clear()
  futures = [on.submit(Attempt(f"e{n}")) for n in range(8)]
  eventually(lambda: sum(f.done() for f in futures) == 7)
  replicas[0].gate.set()
  concurrent.futures.wait(futures, 60)
  assert len(replicas[0].started) == 1
  eventually(is_idle)


def test_first_work_goes_before_waiting_work_and_order_is_kept():
  replica = Counting(slots=1)
  on = pool(replica)
  replica.gate.clear()
  futures = [on.submit(Attempt("running"))]
  futures += [on.submit(Attempt(f"waits {n}")) for n in range(2)]
  futures += [on.submit(Attempt(f"first {n}"), first=True) for n in range(2)]
  replica.gate.set()
  concurrent.futures.wait(futures, 60)
  order = [name for name in replica.started if name != "running"]
  assert order == ["first 0", "first 1", "waits 0", "waits 1"]


def test_a_batch_starts_together_and_running_replicas_go_on():
  """A round with the first episode alone would delay all others by a window."""
  replica = Counting(slots=4)
  on = pool(replica)
  with pytest.raises(KeyError), on.batch():
    futures = [on.submit(Attempt(f"e{n}")) for n in range(4)]
    time.sleep(0.05)
    assert replica.started == []
    raise KeyError  # earlier submissions are still played
  concurrent.futures.wait(futures, 60)
  assert replica.most == 4 and len(replica.policies) == 1
  # An open batch does not delay a running episode.
  replica.gate.clear()
  running = on.submit(Attempt("running"))
  with on.batch():
    beside = on.submit(Attempt("beside"))
    replica.gate.set()
    assert running.result(60)
  assert beside.result(60)
  eventually(is_idle)


def test_a_newer_policy_is_taken_up_in_the_next_round():
  replica = Counting(slots=1)
  on = pool(replica, policy="old")
  endless = Attempt("e", rounds=10**9)
  on.submit(endless)
  for policy, version in (("old", 0), ("new", 1)):
    on.publish([policy], version)
    eventually(lambda newest=(policy, version): replica.policies[-1:] == [newest])
  on.cancel(endless)
  eventually(is_idle)


def test_a_failure_reaches_all_of_its_replica_and_the_next_episode_plays():
  replica = Counting(slots=2, fails="bad")
  on = pool(replica)
  replica.gate.clear()
  futures = [on.submit(Attempt(name)) for name in ("bad", "beside", "waits")]
  replica.gate.set()
  for future in futures:
    with pytest.raises(OSError, match="the device is gone"):
      future.result(60)
  eventually(is_idle)
  replica.fails = ""
  assert on.submit(Attempt("next")).result(60).name == "next"


def test_cancelled_work_never_ends_and_frees_its_slot():
  replica = Counting(slots=1)
  on = pool(replica)
  replica.gate.clear()
  running = Attempt("running", 10**9)
  waiting = Attempt("waiting")
  last = Attempt("last")
  futures = [on.submit(running)]
  assert replica.began.wait(60)  # otherwise it would still be in the queue
  futures += [on.submit(e) for e in (waiting, last)]
  for episode in (running, waiting):
    on.cancel(episode)
    on.cancel(episode)  # no effect the second time
  replica.gate.set()
  assert futures[2].result(60) is last
  for future in futures[:2]:
    with pytest.raises(concurrent.futures.CancelledError):
      future.result(60)
  eventually(is_idle)
  assert "waiting" not in replica.started


def test_a_pool_needs_a_policy_keeps_it_while_it_plays_and_closes_once():
  replica = Counting(slots=1)
  on = ReplicaThreads(RolloutConfig(), [replica], name="counting")
  with pytest.raises(RuntimeError, match="no policy"):
    on.submit(Attempt("e"))
  on.publish(["p"], 0)
  replica.gate.clear()
  future = on.submit(Attempt("e", 10**9))
  with pytest.raises(RuntimeError, match="it needs its policy"):
    on.publish(None, 0)
  replica.gate.set()
  on.close()
  with pytest.raises(concurrent.futures.CancelledError):
    future.result(60)
  eventually(is_idle)
  with pytest.raises(RuntimeError, match="closed"):
    on.submit(Attempt("late"))
