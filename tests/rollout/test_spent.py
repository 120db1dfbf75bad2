"""What an engine's seconds go into."""

from __future__ import annotations

import dataclasses
import time

import toy

from coa_jax.protocol.grammar.automaton import compile_stops
from coa_jax.rollout.replicas import Scheduler
from coa_jax.rollout.types import RolloutConfig


def test_seconds_are_told_apart_waiting_for_a_tool_from_decoding():
  """One slot, so that nothing decodes while its tool sleeps."""
  table = compile_stops(toy.VARIANT, toy.tokenizer(), toy.MODEL.vocab_size)
  config = RolloutConfig(style="brief", slots=1, max_len=toy.MAX_LEN)
  on, slow = Scheduler(toy.MODEL, table, config), toy.TableToolbox(latency=lambda: 0.3)
  episodes = [toy.episode(toy.TASKS[0], slow, n) for n in range(4)]
  params = toy.actor(60).params
  began, before = time.monotonic(), dataclasses.replace(on.spent)
  assert len(list(on.run(params, iter(episodes), 3))) == 4
  wall, spent = time.monotonic() - began, on.spent.since(before)
  assert slow.calls and spent["tools"] > 0.9 * 0.3 * len(slow.calls)
  assert spent["decode"] > 0 and spent["sync"] > 0
  assert sum(spent.values()) <= wall
