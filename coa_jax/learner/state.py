"""TrainState and the jitted pieces of a step: accumulate gradients, apply them.

A step of any size is a Python loop over micro-batches of one shape, so nothing ever
recompiles when the number of trajectories changes; sums are divided once, by counts
over the whole step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from coa_jax.learner.batch import Batch

# (params, micro-batch) -> (loss summed over tokens, {name: sum over tokens})
SumLoss = Callable[[Any, Batch], tuple[jax.Array, dict[str, jax.Array]]]


@flax.struct.dataclass
class TrainState:
  """What training changes; no functions inside.

  Attributes:
    step: int32 number of updates made.
    params: float32 master weights.
    opt_state: the optimizer's.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
  """A state at step 0."""
  return TrainState(jnp.int32(0), params, jax.jit(optimizer.init)(params))


class Learner:
  """A loss and an optimizer, jitted once; shared by SFT and RL."""

  def __init__(self, loss: SumLoss, optimizer: optax.GradientTransformation):
    """Args: a loss that sums over tokens, and what applies its gradient."""
    sums = functools.partial(_sums, loss)
    self._first = jax.jit(sums)
    self._next = jax.jit(functools.partial(_add, sums), donate_argnums=1)
    self._apply = jax.jit(functools.partial(_apply, optimizer), donate_argnums=0)

  def step(
    self, state: TrainState, micro_batches: list[Batch], denominator: float
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update from all micro-batches.

    Args:
      state: donated.
      micro_batches: of one shape.
      denominator: what the summed loss is divided by (e.g. policy tokens in all).

    Returns:
      The new state, and `loss`, `grad_norm` and the loss's sums over the denominator.
    """
    total = self._first(state.params, micro_batches[0])
    for batch in micro_batches[1:]:
      total = self._next(state.params, total, batch)
    return self._apply(state, total, denominator)


def _sums(loss: SumLoss, params: Any, batch: Batch) -> Any:
  (value, sums), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
  return grads, {"loss": value, **sums}


def _add(sums: Callable[[Any, Batch], Any], params: Any, total: Any, batch: Batch):
  return jax.tree.map(jnp.add, total, sums(params, batch))


def _apply(
  optimizer: optax.GradientTransformation,
  state: TrainState,
  total: Any,
  denominator: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
  grads, sums = jax.tree.map(lambda x: x / denominator, total)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  metrics = {**sums, "grad_norm": optax.tree.norm(grads)}
  return TrainState(state.step + 1, params, opt_state), metrics
