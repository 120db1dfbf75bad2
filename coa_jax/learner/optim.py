"""Optimizers and schedules from config, built on optax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from optax import contrib

from coa_jax.model.sharding import inputs_of, letters_of
from coa_jax.runtime.fields import bounded, check_fields, choice


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """Config section `optim`.

  Attributes:
    name: adamw, or muon (matrices by Muon, the rest by AdamW).
    lr: peak learning rate; with muon, the matrices'.
    adam_lr: with muon, the peak rate for embeddings, norms and biases.
    schedule: after warm-up: cosine or linear to `final`, or constant.
    warmup: steps of linear warm-up from 0.
    final: last learning rate as a fraction of the peak.
    weight_decay: decoupled; matrices only.
    clip_norm: gradients are scaled down to this global norm; 0 for no clipping.
    b1: Adam's first-moment decay.
    b2: Adam's second-moment decay.
    offload: keeps the moments in host memory except while a step applies them.
  """

  name: str = choice("adamw", of=("adamw", "muon"))
  lr: float = bounded(1e-3, least=0)
  adam_lr: float = bounded(1e-3, least=0)
  schedule: str = choice("cosine", of=("cosine", "linear", "constant"))
  warmup: int = bounded(0, least=0)
  final: float = bounded(0.1, least=0)
  weight_decay: float = bounded(0.0, least=0)
  clip_norm: float = bounded(1.0, least=0)
  b1: float = bounded(0.9, least=0, below=1)
  b2: float = bounded(0.95, least=0, below=1)
  offload: bool = False

  def __post_init__(self):
    check_fields(self)

  @property
  def extension_fault(self) -> str:
    """Explains why more steps would change the run from its start; "" if not."""
    if self.schedule == "constant":
      return ""
    return (
      f"optim.schedule={self.schedule!r} has lowered the learning rate to the end of "
      "the shorter run; only a run with 'constant' can be extended"
    )


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
  """Builds the optimizer for a run of `steps` updates."""
  rate = _schedule(config, config.lr, steps)
  chain = []
  # Clip first, so that moments see clipped gradients.
  if config.clip_norm:
    chain.append(optax.clip_by_global_norm(config.clip_norm))
  if config.name == "adamw":
    chain.append(
      optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
        mask=_is_matrix,
      )
    )
  else:
    # Adam trains non-matrices, at its own rate.
    chain.append(
      contrib.muon(
        rate,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_learning_rate=_schedule(config, config.adam_lr, steps),
        muon_weight_dimension_numbers=_muon_dimensions,
      )
    )
  return optax.chain(*chain)


def side_by_side(
  optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
  """Combines optimizers, one per entry of a parameter dict.

  Each clips by its own entry's gradient norm.
  """

  def init(params: Any) -> Any:
    return {name: o.init(params[name]) for name, o in optimizers.items()}

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates = {}
    states = {}
    for name, optimizer in optimizers.items():
      updates[name], states[name] = optimizer.update(
        grads[name], state[name], params[name]
      )
    return updates, states

  return optax.GradientTransformation(init, update)


def _schedule(config: OptimConfig, peak: float, steps: int) -> optax.Schedule:
  rest = max(1, steps - config.warmup)  # optax divides by it
  if config.schedule == "cosine":
    after = optax.cosine_decay_schedule(peak, rest, alpha=config.final)
  elif config.schedule == "linear":
    after = optax.linear_schedule(peak, peak * config.final, rest)
  else:
    after = optax.constant_schedule(peak)
  if not config.warmup:
    return after
  # The decay begins when the peak is reached, and ends with the run.
  up = optax.linear_schedule(0.0, peak, config.warmup)
  return optax.join_schedules([up, after], [config.warmup])


def _inputs(path: tuple[Any, ...]) -> int:
  """Counts the leading input axes of a layer's matrix; 0 for other parameters."""
  name = path[-1].key
  # The output head is treated like the embedding: the two may be tied.
  if name in ("head", "value_head"):
    return 0
  return inputs_of(name)


def _is_matrix(params: Any) -> Any:
  return jax.tree_util.tree_map_with_path(lambda p, _: bool(_inputs(p)), params)


def _muon_dimensions(params: Any) -> Any:
  """Returns Muon's input and output axes; a stacked layer axis comes first."""

  def dimensions(path, x):
    num_inputs = _inputs(path)
    if not num_inputs:
      return None  # Adam's
    # From the end: scanned layers have a leading axis outside the matrix.
    axes = tuple(range(x.ndim - len(letters_of(path)), x.ndim))
    return contrib.MuonDimensionNumbers(axes[:num_inputs], axes[num_inputs:])

  return jax.tree_util.tree_map_with_path(dimensions, params)
