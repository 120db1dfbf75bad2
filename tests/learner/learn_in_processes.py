"""Runs two RL steps in one of several processes; see test_learning_together.py.

python tests/learner/learn_in_processes.py OUT.npz CASE DEVICES [COORDINATOR N I]

Writes every batch array that this process builds on its host, the indices of its rows,
and the metrics of both steps.
"""

from __future__ import annotations

import os
import sys

import virtual_devices

out, case, devices, *others = sys.argv[1:]
os.environ.update(virtual_devices.environment(int(devices), virtual_devices.QUICK))

import jax  # noqa: E402
import numpy as np  # noqa: E402
import toy  # noqa: E402

from coa_jax.learner import update as updates  # noqa: E402
from coa_jax.learner.algorithms import PRESETS, BatchConfig, LossConfig  # noqa: E402
from coa_jax.learner.optim import OptimConfig  # noqa: E402
from coa_jax.model import transformer  # noqa: E402
from coa_jax.model.distribution import NO_TRUNCATION  # noqa: E402
from coa_jax.model.sharding import MeshConfig, make_partitioner  # noqa: E402
from coa_jax.protocol.trajectory import Author, Segment, Trajectory  # noqa: E402
from coa_jax.rollout.exchange import gather_trajectories  # noqa: E402

ROWS, LENGTH, GROUPS, SAMPLES = 8, 128, 6, 3
CRITIC = {"is_clip": 2.0, "kl_coef": 0.1, "kl_in": "reward", "critic_lr": 1e-3}
# Loss, mesh, minibatches. If `context` spans processes, two processes hold each row.
CASES = {
  "grpo": (PRESETS["grpo"], dict(fsdp=4), 1),
  "whitened": (dict(advantage="reinforce++_baseline"), dict(fsdp=2, context=2), 2),
  "critic": ({**PRESETS["ppo"], **CRITIC}, dict(data=2, fsdp=2), 2),
}


def played(rng: np.random.Generator) -> Trajectory:
  """A trajectory with random turns, some empty, and random log-probs."""
  segments = [Segment(Author.PROMPT, "", "", rng.integers(0, 90, 9).tolist())]
  for _ in range(rng.integers(1, 5)):
    for author in (Author.POLICY, Author.TOOL):
      ids = rng.integers(0, 90, rng.integers(0, 14)).tolist()
      segment = Segment(author, "", "", ids)
      if author == Author.POLICY:
        logps = -4.5 + 0.1 * rng.standard_normal(len(ids))
        segment.logps = logps.astype(np.float32).tolist()
        segment.versions = [0] * len(ids)
      segments.append(segment)
  reward = None if rng.random() < 0.1 else float(rng.random())
  return Trajectory(f"task {rng.integers(1000)}", segments, reward=reward)


def main() -> None:
  """Runs two steps."""
  if others:
    jax.distributed.initialize(others[0], int(others[1]), int(others[2]))
  loss, mesh, minibatches = CASES[case]
  partitioner = make_partitioner(MeshConfig(**mesh))
  update = updates.PolicyUpdate(
    toy.ONE_LAYER,
    LossConfig(**loss),
    BatchConfig(rows=ROWS, length=LENGTH, minibatches=minibatches),
    OptimConfig(lr=1e-3, schedule="constant"),
    None,
    partitioner,
    NO_TRUNCATION,
    steps=2,
    prompts=GROUPS,
    samples=SAMPLES,
  )
  params = transformer.init_params(toy.ONE_LAYER, 0, partitioner)
  state, frozen = update.init(params, 0)

  # --- Record the host arrays on their way to the devices.
  found = {"rows": np.flatnonzero(partitioner.rows(ROWS))}
  real = update._learner.step

  def step(state, batches, tokens, frozen):
    for batch in batches:
      for name, x in vars(batch).items():
        if x is not None:
          found.setdefault(name, []).append(np.asarray(x))
    return real(state, batches, tokens, frozen)

  update._learner.step = step

  # --- Each of P processes plays every P-th group.
  rng = np.random.default_rng(0)
  values = []
  for _ in range(2):
    own = []
    for n in range(GROUPS):
      group = [played(rng) for _ in range(SAMPLES)]
      if n % jax.process_count() == jax.process_index():
        own += [(n, t) for t in group]
    groups = [[] for _ in range(GROUPS)]
    for n, t in gather_trajectories(own):
      groups[n].append(t)
    state, out_values = update(state, frozen, groups)
    values.append([out_values[name] for name in sorted(out_values)])
  found = {name: np.stack(x) for name, x in found.items()}
  np.savez(out, values=np.array(values), **found)


if __name__ == "__main__":
  main()
