"""The JAX engine: a process's model replicas behind one `submit`.

Each replica (`rollout.tensor` devices) decodes in its own thread: no replica waits for
another's windows or tools. An episode's samples do not depend on its replica.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from coa_jax.model import decode_params
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.protocol.grammar.tables import Automaton, Constraint
from coa_jax.rollout.device_loop import DeviceLoop
from coa_jax.rollout.pool import ReplicaThreads
from coa_jax.rollout.scheduler import Scheduler
from coa_jax.rollout.types import RolloutConfig


class ReplicaPool(ReplicaThreads):
  """Our own sampler as an engine; see `types.Engine`.

  An episode's tokens depend only on (its seed, its sequence, the parameters, its tools'
  answers).
  """

  takes_tokens = True

  def __init__(
    self,
    model: ModelConfig,
    automaton: Automaton,
    config: RolloutConfig,
    partitioner: Partitioner = ONE_DEVICE,
    constraint: Constraint | None = None,
    own_top_p: bool = False,
  ):
    """Prepares every replica's slots.

    Args:
      model: the architecture; `decode_params.architecture` makes the decoder's.
      partitioner: a decoding mesh (`Partitioner.decoding`); each process decodes on
        its own devices.

    Raises:
      ValueError: the mesh does not divide the model, or splits it over processes.
    """
    self.own_top_p = own_top_p
    self.model = decode_params.architecture(model, partitioner)
    self._partitioner = partitioner
    replicas = partitioner.replicas()
    # All are checked before the first is made.
    for replica in replicas:
      replica.check(model.axes)
    schedulers = []
    for replica in replicas:
      device = DeviceLoop(self.model, automaton, config, replica, constraint, own_top_p)
      schedulers.append(Scheduler(device))
    super().__init__(config, schedulers, name="replica")

  def set_policy(self, params: Any, version: int) -> None:
    """Samples with these parameters from now on; see `types.Engine`.

    Do not donate the parameters while episodes run: decoding reads them in place if
    possible (`decode_params.decoding_views`).
    """
    views = None
    if params is not None:
      began = time.monotonic()
      views = decode_params.decoding_views(self.model, params, self._partitioner)
      # Wait here, so that the copy's seconds do not count as the first window's.
      jax.block_until_ready(views)
      self._sync_seconds += time.monotonic() - began
    self.publish(views, version)
    if views is None:
      # After `cancel` no episode is left, but a replica's thread may still run a round:
      # the thread frees the cache when it ends.
      self._join_threads()
