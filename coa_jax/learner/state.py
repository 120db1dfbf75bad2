"""TrainState, and the one jitted step: accumulate gradients, then apply them.

A step takes any number of equally shaped micro-batches up to a fixed maximum, so
nothing recompiles when the number of trajectories changes. Sums are divided once, by
counts over the whole step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from coa_jax.learner.batch import Batch
from coa_jax.model.sharding import ONE_DEVICE, Partitioner
from coa_jax.runtime.compiling import compile_all

# (trained, frozen, micro-batch) -> (loss summed over tokens, {name: sum over tokens})
SumLoss = Callable[[Any, Any, Batch], tuple[jax.Array, dict[str, jax.Array]]]


@flax.struct.dataclass
class TrainState:
  """The trained state; arrays only, no functions.

  Attributes:
    step: int32 number of steps made; in RL a step may make several updates.
    params: float32 master weights, or adapters (see `lora.py`).
    opt_state: the optimizer's state; its arrays may be in host memory between steps.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def init_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  partitioner: Partitioner = ONE_DEVICE,
  offload: bool = False,
) -> TrainState:
  """Makes a state at step 0; optimizer arrays are split like the parameters."""

  def fresh(params: Any) -> TrainState:
    return TrainState(jnp.int32(0), params, optimizer.init(params))

  # Made in place: no device ever holds all moments.
  shapes = jax.eval_shape(fresh, params)
  shardings = partitioner.out_shardings(shapes)
  if offload:
    shardings = state_shardings(shapes, partitioner, offload)
  return jax.jit(fresh, out_shardings=shardings)(params)


def state_shardings(
  state: TrainState, partitioner: Partitioner, offload: bool = False
) -> TrainState:
  """Returns a state's shardings.

  Args:
    offload: keeps the optimizer's arrays in host memory, except its counters.
  """
  shardings = partitioner.tree(state)
  if not offload:
    return shardings

  def on_host(x: Any, sharding: Sharding) -> Sharding:
    return sharding.with_memory_kind("pinned_host") if x.ndim else sharding

  moments = jax.tree.map(on_host, state.opt_state, shardings.opt_state)
  return shardings.replace(opt_state=moments)


class Learner:
  """A loss and an optimizer, jitted once; shared by SFT and RL."""

  def __init__(
    self,
    loss: SumLoss,
    optimizer: optax.GradientTransformation,
    partitioner: Partitioner = ONE_DEVICE,
    offload: bool = False,
  ):
    """Takes a loss summed over tokens, its optimizer, and the mesh.

    With `offload`, states are as from `init_state` with `offload`.
    """
    self._optimizer = optimizer
    self._partitioner = partitioner
    self._offload = offload
    self.most = 1  # the compiled step's micro-batches
    step = functools.partial(_step, loss, optimizer, partitioner, offload)
    self.jitted = jax.jit(step, donate_argnums=0)
    # On a CPU compilation is quick.
    self.compiles_ahead = partitioner.platform != "cpu"
    self._compiled_for = 0  # micro-batches

  def init(self, params: Any) -> TrainState:
    """Makes the state at step 0 with these parameters; see `init_state`."""
    return init_state(params, self._optimizer, self._partitioner, self._offload)

  @functools.partial(jax.profiler.annotate_function, name="update")
  def step(
    self,
    state: TrainState,
    micro_batches: Sequence[Batch],
    denominator: float,
    frozen: Any = None,
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """Makes one update from all micro-batches.

    Args:
      state: donated.
      micro_batches: numpy, all [B, T]; a process passes its own rows. A larger number
        than before recompiles the step; see `reserve`.
      denominator: divisor of the summed loss (e.g. the number of policy tokens).
      frozen: untrained parameters read by the loss.

    Returns:
      The new state; and `loss` and the loss's sums, divided by the denominator, and
      `grad_norm`.

    Raises:
      ValueError: there is no micro-batch, or the denominator is not above 0.
    """
    # --- Refuse a division by 0, which would make the parameters NaN.
    count = len(micro_batches)
    if not count:
      raise ValueError("a step needs at least one micro-batch")
    if not denominator > 0:
      raise ValueError(
        f"a step's sums are divided by {denominator}: no token in it counts"
      )

    # --- Stack the micro-batches, then empty ones: one shape, one program.
    self.reserve(count)
    nothing = jax.tree.map(np.zeros_like, micro_batches[0])
    filled = [*micro_batches, *[nothing] * (self.most - count)]
    batch_MBT = jax.tree.map(lambda *x: np.stack(x), *filled)
    batch_MBT = self._partitioner.put(batch_MBT)
    # A step's loss is ready before its state. On a CPU a step queued behind another
    # holds temporaries of its own (100M: 6.6 GB at most instead of 4.3).
    jax.block_until_ready(state)
    arguments = (state, frozen, batch_MBT, count, np.float32(denominator))
    if self.compiles_ahead and self._compiled_for != self.most:
      compile_all("the learner", [functools.partial(self.jitted.lower, *arguments)])
      self._compiled_for = self.most
    return self.jitted(*arguments)

  def reserve(self, micro_batches: int) -> None:
    """Reserves room for N micro-batches, before the step is compiled."""
    self.most = max(self.most, micro_batches)


def _step(
  loss: SumLoss,
  optimizer: optax.GradientTransformation,
  partitioner: Partitioner,
  offload: bool,
  state: TrainState,
  frozen: Any,
  batch_MBT: Batch,
  count: jax.Array,
  denominator: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Makes one update from the first `count` of M micro-batches; `Learner` jits it."""

  def place(tree: Any) -> Any:
    if partitioner.mesh.size == 1:
      return tree
    return jax.lax.with_sharding_constraint(tree, partitioner.tree(tree))

  @functools.partial(jax.jit, inline=True)  # traced once for its shapes and the loop
  def sums(params: Any, frozen: Any, batch: Batch) -> Any:
    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, parts), grads = gradient(params, frozen, batch)
    return place(grads), {"loss": value, **parts}

  def sums_of(m: jax.Array | int) -> Any:
    batch = jax.tree.map(lambda x: x[m], batch_MBT)
    return sums(state.params, frozen, batch)

  # --- Sum loss and gradient over the micro-batches; empty ones are not read.
  if batch_MBT.tokens_BT.shape[0] == 1:
    total = sums_of(0)
  else:
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(sums_of, 0))
    total = jax.lax.fori_loop(
      0, count, lambda m, total: jax.tree.map(jnp.add, total, sums_of(m)), nothing
    )

  # --- Means, and the update.
  grads, values = jax.tree.map(lambda x: x / denominator, total)
  opt_state = state.opt_state
  if offload:
    opt_state = jax.device_put(opt_state, state_shardings(state, partitioner).opt_state)
  updates, opt_state = optimizer.update(grads, opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  metrics = {**values, "grad_norm": optax.tree.norm(grads)}
  after = place(TrainState(state.step + 1, params, opt_state))
  if offload:
    after = jax.device_put(after, state_shardings(after, partitioner, offload))
  return after, metrics
