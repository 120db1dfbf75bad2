"""Helpers to play toy tasks on our own sampler."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable

import numpy as np
import toy

from coa_jax.model.config import DeltaNet, ModelConfig
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.protocol.grammar.automaton import compile_stops
from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.replicas import ReplicaPool
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.types import Engine, RolloutConfig

CFG = toy.ONE_LAYER
HYBRID = dataclasses.replace(
  toy.MODEL,
  layer_kinds=("delta", "attention"),
  delta=DeltaNet(2, 4, 16, 8),
  attention_gate=True,
  norm_offset=True,
  rotary_dim=4,
)
CONFIG = RolloutConfig(
  style="brief", slots=5, window=8, max_len=toy.MAX_LEN, prefill_rows=4
)


def engine(
  model: ModelConfig = CFG, partitioner: Partitioner = ONE_DEVICE, **changes
) -> ReplicaPool:
  """Makes an engine; `changes` override CONFIG."""
  automaton = compile_stops(toy.VARIANT.yield_tags, toy.tokenizer(), model.vocab_size)
  config = dataclasses.replace(CONFIG, **changes)
  return ReplicaPool(model, automaton, config, partitioner.decoding(config.tensor))


def toy_worker(model: ModelConfig = CFG, config: RolloutConfig = CONFIG, **options):
  """Makes a `RolloutWorker` with the toy tools."""
  return make_worker(model, toy.tokenizer(), config, toy.TOOLS, **options)


def play(
  params: dict,
  order: Iterable[int],
  toolbox: toy.TableToolbox | None = None,
  on: Engine | None = None,
  **fields,
) -> dict[int, Trajectory]:
  """Plays sequences in this order; sequence n plays task n modulo the task count."""
  toolbox = toolbox or toy.TableToolbox()
  order = list(order)
  episodes = [
    toy.episode(toy.TASKS[n % len(toy.TASKS)], toolbox, n, **fields) for n in order
  ]
  done = toy.play(on or engine(), params, episodes)
  assert sorted(e.sequence for e in done) == sorted(order)
  return {e.sequence: toy.graded(e) for e in done}


def content(t: Trajectory) -> tuple:
  """A trajectory's reproducible fields, without seconds and versions."""
  segments = [(s.author, s.text, s.ids, s.logps) for s in t.segments]
  calls = [(c.name, c.arguments, c.result, c.status) for c in t.calls]
  return segments, calls, t.status, t.reward, t.reward_parts


def contents(played: dict[int, Trajectory]) -> dict[int, tuple]:
  return {n: content(t) for n, t in played.items()}


def versions(t: Trajectory) -> list[int]:
  """Each sampled token's policy version."""
  return [v for s in t.segments for v in s.versions]


def threads(name: str = "replica") -> list[threading.Thread]:
  """An engine's running threads."""
  return [t for t in threading.enumerate() if t.name == name]


def keep_all(groups: list) -> np.ndarray:
  return np.ones(len(groups), bool)
