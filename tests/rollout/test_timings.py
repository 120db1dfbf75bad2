"""What an engine's seconds go into."""

from __future__ import annotations

import time

import toy
from playing import engine


def test_waiting_for_a_tool_is_not_decoding():
  """One slot, so that nothing decodes while its tool sleeps."""
  on = engine(slots=1)
  slow = toy.TableToolbox(latency=lambda: 0.3)
  episodes = [toy.episode(toy.TASKS[0], slow, n) for n in range(4)]
  params = toy.actor(60).params
  began = time.monotonic()
  before = on.timings
  assert len(toy.play(on, params, episodes)) == 4
  wall = time.monotonic() - began
  spent = on.timings.since(before)
  assert slow.calls and spent["tools"] > 0.9 * 0.3 * len(slow.calls)
  assert spent["decode"] > 0 and spent["sync"] > 0 and spent["idle"] == 0
  assert sum(spent.values()) <= wall
  time.sleep(0.2)
  toy.play(on, params, [toy.episode(toy.TASKS[0], slow, 9)])
  assert on.timings.idle >= 0.2
