"""One process of `experiments.bench.processes`.

  python -m experiments.bench.processes_work JOB.json I

It learns one step of RL and one of SFT from made-up trajectories, of which it has
played its part, and prints as JSON the bytes that went through it and that it held.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax import evaluate, processes
from coa_jax.learner import log_probs
from coa_jax.learner.algorithms import BatchConfig, LossConfig
from coa_jax.learner.dataset import Dataset
from coa_jax.learner.optim import OptimConfig, make_optimizer
from coa_jax.learner.state import Learner, init_state
from coa_jax.learner.update import PolicyUpdate
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import NO_TRUNCATION
from coa_jax.model.sharding import MeshConfig, Partitioner, make_partitioner
from coa_jax.model.transformer import init_params
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.rollout.figures import gather_outcomes
from coa_jax.tasks.task import Task

# What learns does not matter here: the bytes are those of its batches.
MODEL = ModelConfig(
  vocab_size=512, width=32, layers=1, heads=2, kv_heads=2, head_dim=16, ff=32
)
SAMPLES = 4


class Meter:
  """Counts what goes between processes, and what is made on the host for the devices.

  Attributes:
    sent: bytes, to each other process.
    received: bytes, from all others.
    held: bytes of the largest batch that was put onto the devices.
  """

  def __init__(self):
    self.sent = 0
    self.received = 0
    self.held = 0

  @contextlib.contextmanager
  def on(self) -> Iterator[Meter]:
    """Counts while inside."""
    gather, exchange, put = (
      processes._all_gather,
      processes._all_to_all,
      Partitioner.put,
    )
    others = jax.process_count() - 1

    def metered_gather(own: np.ndarray) -> np.ndarray:
      self.sent += own.nbytes * others
      self.received += own.nbytes * others
      return gather(own)

    def metered_exchange(own_PS: np.ndarray) -> np.ndarray:
      self.sent += own_PS[1:].nbytes
      out_PS = exchange(own_PS)
      self.received += out_PS[1:].nbytes
      return out_PS

    def metered_put(partitioner: Partitioner, tree: Any) -> Any:
      size = sum(x.nbytes for x in jax.tree.leaves(tree))
      self.held = max(self.held, size)
      return put(partitioner, tree)

    processes._all_gather = metered_gather
    processes._all_to_all = metered_exchange
    Partitioner.put = metered_put
    try:
      yield self
    finally:
      processes._all_gather = gather
      processes._all_to_all = exchange
      Partitioner.put = put

  def take(self) -> dict[str, int]:
    """Returns the figures so far and begins anew."""
    out = dict(vars(self))
    self.__init__()
    return out


def drawn(rng: np.random.Generator, length: int) -> Trajectory:
  """A trajectory of `length` / 4 to `length` tokens, half of them the policy's."""
  left = int(rng.integers(length // 4, length))
  segments = []
  author = Author.PROMPT
  while left:
    n = min(left, int(rng.integers(20, 200)))
    left -= n
    ids = rng.integers(0, MODEL.vocab_size, n).tolist()
    segment = Segment(author, "", " word" * (n * 3 // 4), ids)
    if author == Author.POLICY:
      segment.role = "think"
      segment.logps = rng.normal(-1, 0.3, n).astype(np.float32).tolist()
      segment.versions = [0] * n
    segments.append(segment)
    author = Author.TOOL if author == Author.POLICY else Author.POLICY
  return Trajectory("task", segments, reward=float(rng.random()))


def rl_step(
  own: list[tuple[int, Trajectory]], partitioner: Partitioner, length: int
) -> dict[str, Any]:
  """A step of RL, and beside it two other ways to exchange what was played."""
  # --- As JSON to everybody, as RL and evaluation did.
  meter = Meter()
  with meter.on():
    parts = processes.gather_json([(number, t.to_json()) for number, t in own])
    count = sum(map(len, parts))
    as_json = meter.take()

    # --- What the figures of an evaluation need of them.
    evaluate.gather_scored([t for _, t in own], [Task("task", "", ())])
    scored = meter.take()

    # --- The outcomes to everybody.
    groups: dict[int, list[Any]] = {}
    for number, t in gather_outcomes(own):
      groups.setdefault(number, []).append(t)
    outcomes = meter.take()

    # --- The tokens to their rows, and the step.
    rows = partitioner.ways("B")
    update = PolicyUpdate(
      MODEL,
      LossConfig(),
      BatchConfig(rows=rows, length=length),
      OptimConfig(schedule="constant"),
      None,
      partitioner,
      NO_TRUNCATION,
      steps=1,
      prompts=len(groups),
      samples=SAMPLES,
    )
    state, frozen = update.init(init_params(MODEL, 0, partitioner), 0)
    meter.take()
    _, values = update(state, frozen, [groups[n] for n in sorted(groups)])
    learnt = meter.take()
  return {
    "trajectories": count,
    "json": as_json,
    "scored": scored,
    "outcomes": outcomes,
    "learn": learnt,
    "grad_norm": values["grad_norm"],
  }


def sft_step(
  trajectories: list[Trajectory], partitioner: Partitioner, length: int
) -> dict[str, Any]:
  """A step of SFT over all trajectories."""
  with tempfile.TemporaryDirectory() as folder:
    Dataset.write(f"{folder}/data", trajectories)
    dataset = Dataset(f"{folder}/data")
    every = np.arange(len(dataset))
    micro = list(
      dataset.once(every, partitioner.ways("B"), length, partitioner=partitioner)
    )

    def loss(params: Any, _: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
      return log_probs.cross_entropy(MODEL, params, batch, partitioner), {}

    optimizer = make_optimizer(OptimConfig(), 1)
    learner = Learner(loss, optimizer, partitioner)
    state = init_state(init_params(MODEL, 0, partitioner), optimizer, partitioner)
    meter = Meter()
    with meter.on():
      tokens = sum(m.policy for m in micro)
      _, values = learner.step(state, [m.batch for m in micro], tokens)
      return {**meter.take(), "loss": float(jnp.asarray(values["loss"]))}


def main(path: str, process: int) -> None:
  """Runs the job."""
  with open(path, encoding="utf-8") as f:
    job = json.load(f)
  count = job["processes"]
  jax.distributed.initialize(job["address"], count, process)
  partitioner = make_partitioner(MeshConfig())
  length = job["length"]

  # --- All draw the same; each has played every P-th group.
  rng = np.random.default_rng(0)
  own = []
  every = []
  for n in range(job["groups"] * count):
    group = [drawn(rng, length) for _ in range(SAMPLES)]
    every += group
    if n % count == process:
      own += [(n, t) for t in group]
  figures = {
    "tokens": sum(t.num_tokens for t in every),
    "rl": rl_step(own, partitioner, length),
    "sft": sft_step(every, partitioner, length),
  }
  print(json.dumps(figures), flush=True)


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]))
