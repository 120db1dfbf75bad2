"""One RL step: updates the policy, and the critic, from groups of trajectories.

The state's parameters are {"policy": ...} and, with a critic, {"critic": {"trunk": ...,
"value_head": ...}}: a separate transformer, initialised from the policy. With LoRA both
are adapters over one frozen base, which is also the reference policy.

budget: policy, critic and reference of one step share their arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.learner import advantages, log_probs, policy_loss, surrogates
from coa_jax.learner.algorithms import BatchConfig, LossConfig
from coa_jax.learner.batch import Batch, Packed
from coa_jax.learner.optim import OptimConfig, make_optimizer, side_by_side
from coa_jax.learner.state import Learner, TrainState
from coa_jax.learner.teachers import Teachers
from coa_jax.model import lora
from coa_jax.model.config import ModelConfig
from coa_jax.model.distribution import TokenMask, Truncation
from coa_jax.model.lora import LoraConfig
from coa_jax.model.ops import used
from coa_jax.model.sharding import Partitioner
from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.protocol.trajectory import Trajectory

Group = Sequence[Trajectory]


class PolicyUpdate:
  """Learns from rollouts; jitted once."""

  def __init__(
    self,
    cfg: ModelConfig,
    loss: LossConfig,
    batch: BatchConfig,
    optim: OptimConfig,
    lora_config: LoraConfig | None,
    partitioner: Partitioner,
    truncation: Truncation,
    *,
    steps: int,
    prompts: int,
    samples: int,
    temperature: float = 1.0,
    max_logp_diff: float = 0.1,
    constraint: Constraint | None = None,
    teachers: Teachers | None = None,
  ):
    """Builds the optimizer, and compiles nothing yet.

    Args:
      optim: the policy's; the critic has its own learning rate.
      steps: the run's batches of rollouts.
      prompts: maximum groups per batch.
      samples: maximum contexts per group.
      max_logp_diff: nats; see `GuardConfig`.
    """
    self._cfg = cfg
    self._loss = loss
    self._batch = batch
    self._lora_config = lora_config
    self._partitioner = partitioner
    self._max_logp_diff = max_logp_diff
    self._temperature = temperature
    self._truncation = truncation
    self._constraint = constraint
    self._allowed = TokenMask.of(constraint)
    self._teachers = teachers

    # --- One optimizer per network. The schedule counts updates; a step makes several.
    updates = steps * batch.updates
    optimizers = {"policy": make_optimizer(optim, updates)}
    if loss.has_critic:
      critic = dataclasses.replace(optim, name="adamw", lr=loss.critic_lr)
      optimizers["critic"] = make_optimizer(critic, updates)

    # --- The step, with room for an update with one trajectory per row.
    optimizer = side_by_side(optimizers)
    self._learner = Learner(self._total_loss, optimizer, partitioner, optim.offload)
    groups = -(-prompts // batch.minibatches)
    self._learner.reserve(-(-groups * samples // batch.rows))
    # The host computes advantages from scores; a process reads its own whole rows.
    by_row = partitioner.sharding("B.")
    self._score = jax.jit(self._scores, out_shardings=by_row)

  def init(self, params: Any, seed: int) -> tuple[TrainState, Any]:
    """Makes the state at step 0, and the frozen parameters, from the initial policy.

    Returns:
      The state; and {"base": parameters below adapters, or None; "reference": the
      reference policy's parameters, or None if unused or equal to the base}.
    """
    # --- The policy: all parameters, or adapters over a base.
    policy, base = lora.split(
      self._cfg, params, self._lora_config, seed, self._partitioner
    )
    trained = {"policy": policy}

    # --- The KL's reference. With adapters the frozen base is the reference.
    reference = None
    if self._loss.kl_coef and base is None:
      # In the compute dtype; a copy, since the state's parameters are donated.
      dtype = self._cfg.dtype
      reference = jax.tree.map(
        lambda x: jnp.array(used(self._cfg, x), dtype, copy=True), params
      )
    # --- The critic. Its head is 0, so that every value starts at 0.
    if self._loss.has_critic:
      # Another seed: the critic has its own adapters.
      trunk, _ = lora.split(
        self._cfg, params, self._lora_config, seed + 1, self._partitioner
      )
      trained["critic"] = {
        "trunk": jax.tree.map(jnp.copy, trunk),
        "value_head": jnp.zeros((self._cfg.width, 1)),
      }
    state = self._learner.init(trained)
    return state, {"base": base, "reference": reference}

  def policy(self, state: TrainState, frozen: Any) -> Any:
    """Returns the policy's parameters for decoding."""
    return lora.merged(state.params["policy"], frozen["base"], self._lora_config)

  @functools.partial(jax.profiler.annotate_function, name="learn")
  def __call__(
    self, state: TrainState, frozen: Any, groups: Sequence[Group]
  ) -> tuple[TrainState, dict[str, float]]:
    """Learns from groups; the state's step always rises by one.

    Args:
      state: donated.
      frozen: as from `init`.
      groups: one task's trajectories each, the same in every process; a trajectory
        without a reward has left its group.

    Returns:
      The new state; and means over policy tokens and updates, but `logp_diff` and
      `logp_diff_share` are the first update's. No means without a trajectory.
    """
    # --- Each update's groups, packed; all fields are known before the first update.
    step = state.step + 1
    parts: list[Sequence[Group]] = []
    for i in range(self._batch.minibatches):
      part = groups[i :: self._batch.minibatches]
      # Skip updates without trajectories: they would have no tokens.
      if any(map(_graded, part)):
        parts.append(part)
    if not parts:
      return state.replace(step=step), {}
    contexts = [_contexts(part) for part in parts]
    rows, length = self._batch.rows, self._batch.length
    packed = [
      Packed(c.rows, rows, length, self._constraint, self._partitioner)
      for c in contexts
    ]
    figures = self._prepare(state, frozen, parts, contexts, packed)

    # --- The updates.
    log = []
    for _ in range(self._batch.epochs):
      for p in packed:
        # Over all micro-batches: their split changes no gradient.
        tokens = float(max(1, sum(p.counts)))
        state, values = self._learner.step(state, p.batches, tokens, frozen)
        log.append({k: float(v) for k, v in values.items()})
    values = {}
    for name in log[0]:
      values[name] = float(np.mean([row[name] for row in log]))
    # After the first update the learner is no longer the sampler.
    for name in ("logp_diff", "logp_diff_share"):
      values[name] = log[0][name]
    return state.replace(step=step), values | figures

  @property
  def micro_batches(self) -> int:
    """Counts the compiled step's micro-batches."""
    return self._learner.most

  @property
  def jitted(self) -> dict[str, Any]:
    """Returns a step's programs: `learn`, and `score` if the step uses it.

    `score` takes the state's parameters, `init`'s frozen parameters and a batch;
    `learn` takes the state, the frozen parameters, micro-batches, their number and the
    denominator.
    """
    out = {"learn": self._learner.jitted}
    if self._reads_networks:
      out["score"] = self._score
    return out

  def _prepare(
    self,
    state: TrainState,
    frozen: Any,
    parts: Sequence[Sequence[Group]],
    contexts: Sequence[_Contexts],
    packed: Sequence[Packed],
  ) -> dict[str, float]:
    """Fills in the batches' network scores, advantages and loss weights.

    Returns:
      The teachers' metrics; empty without teachers.
    """
    config = self._loss

    # --- The networks' scores before the step's first update.
    for p in packed:
      self._read_networks(state, frozen, p)
    kl = None
    if config.kl_coef and config.kl_in == "reward":
      # The old policy: the sampler, or the learner before the step.
      old = "old_BT" if self._keeps_old else "logp_BT"
      kl = []
      for p in packed:
        for x, y in zip(p.read(old), p.read("reference_BT"), strict=True):
          kl.append(np.asarray(surrogates.kl(x, y, config.kl_estimator)))
    value = None
    if config.has_critic:
      value = []
      for p in packed:
        value += p.read("value_BT")

    # --- Advantages of all trajectories together: some are whitened over the batch.
    groups: list[Group] = []
    rows: list[Trajectory] = []
    counts: list[int] = []
    owners: list[int] = []
    own: list[int] = []
    for part, c, p in zip(parts, contexts, packed, strict=True):
      own += [len(counts) + i for i in p.own]
      # Trajectories are numbered within their part, from 0.
      begin = owners[-1] + 1 if owners else 0
      owners += [begin + i for i in c.owners]
      groups += part
      rows += c.rows
      counts += p.counts
    advantage, returns = policy_loss.token_advantages(
      config,
      rewards_of(groups),
      counts,
      kl,
      value,
      advantages.Share(own, len(counts)),
      owners,
    )
    figures: dict[str, float] = {}
    if self._teachers:
      policy = self.policy(state, frozen) if self._teachers.is_policy else None
      terms, figures = self._teachers.terms(rows, policy)
      advantage = [
        self._teachers.task * a + terms[i] for i, a in zip(own, advantage, strict=True)
      ]

    # --- Write each update's part.
    begin = 0
    for c, p in zip(contexts, packed, strict=True):
      end = begin + len(p.own)
      weights = policy_loss.aggregation_weights(
        config, p.counts, self._batch.length, c.owners
      )
      p.write("advantage_BT", advantage[begin:end])
      p.write("loss_weight_BT", [weights[i] for i in p.own])
      if returns is not None:
        p.write("return_BT", returns[begin:end])
      begin = end
    return figures

  def _read_networks(self, state: TrainState, frozen: Any, packed: Packed) -> None:
    """Fills in the networks' scores before the step's first update, if used."""
    if not self._reads_networks:
      return
    scores = []
    for batch in packed.batches:
      batch = self._partitioner.put(batch)
      scores.append(self._score(state.params, frozen, batch))
    for name in scores[0]:
      packed.replace(name, [self._partitioner.own(s[name]) for s in scores])

  @property
  def _reads_networks(self) -> bool:
    """Whether a step begins by scoring its tokens."""
    return bool(self._loss.kl_coef or self._loss.has_critic or self._keeps_old)

  @property
  def _keeps_old(self) -> bool:
    """Whether a step must record the learner's log-probs before its first update."""
    return bool(self._loss.is_clip) and self._batch.updates > 1

  def _scores(self, trained: Any, frozen: Any, batch: Batch) -> dict[str, jax.Array]:
    """Returns the batch fields computed by networks; jitted as `_score`."""
    out = {}
    if self._keeps_old:
      policy = self._assembled(trained["policy"], frozen)
      out["old_BT"], *_ = self._logps(policy, batch)
    if self._loss.kl_coef:
      reference = frozen["reference"] or frozen["base"]
      out["reference_BT"], *_ = self._logps(reference, batch)
    if self._loss.has_critic:
      out["value_BT"] = self._values(trained["critic"], frozen, batch)
    return out

  def _assembled(self, trained: Any, frozen: Any) -> Any:
    return lora.assemble(trained, frozen["base"], self._lora_config)

  def _logps(self, params: Any, batch: Batch) -> tuple[jax.Array, ...]:
    return log_probs.token_logps(
      self._cfg,
      params,
      batch,
      temperature=self._temperature,
      partitioner=self._partitioner,
      truncation=self._truncation,
      constraint=self._allowed,
    )

  def _values(self, critic: Any, frozen: Any, batch: Batch) -> jax.Array:
    trunk = self._assembled(critic["trunk"], frozen)
    return log_probs.token_values(
      self._cfg, trunk, critic["value_head"], batch, self._partitioner
    )

  def _total_loss(
    self, trained: Any, frozen: Any, batch: Batch
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums the losses of policy and critic; neither's gradient reaches the other."""
    config = self._loss

    # --- The policy.
    policy = self._assembled(trained["policy"], frozen)
    logp_BT, entropy_BT, removed_BT = self._logps(policy, batch)
    loss, sums = policy_loss.policy_loss(config, logp_BT, batch)
    logp_diff_BT = jnp.abs(logp_BT - batch.logp_BT)
    figures = {
      "entropy": entropy_BT,
      "removed_mass": removed_BT,
      "logp_diff": logp_diff_BT,
      "logp_diff_share": (logp_diff_BT > self._max_logp_diff).astype(jnp.float32),
      # Tokens whose probability ratio of policy and sampler is above e or below 1 / e.
      "ratio_outlier_share": (logp_diff_BT > 1.0).astype(jnp.float32),
    }

    # --- The critic.
    if config.has_critic:
      value_BT = self._values(trained["critic"], frozen, batch)
      value_loss_BT, clipped_BT = surrogates.value_loss(
        value_BT, batch.value_BT, batch.return_BT, config.value_clip
      )
      loss += jnp.sum(batch.loss_mask_BT * value_loss_BT)
      figures["value"] = value_BT
      figures["value_loss"] = value_loss_BT
      figures["value_clipped"] = clipped_BT

    # --- Figures, summed over policy tokens.
    for name, figure_BT in figures.items():
      sums[name] = jax.lax.stop_gradient(jnp.sum(batch.loss_mask_BT * figure_BT))
    return loss, sums


class _Contexts(NamedTuple):
  """The contexts of an update's graded trajectories.

  Attributes:
    rows: each context as a trajectory of its own.
    owners: each context's trajectory number.
  """

  rows: list[Trajectory]
  owners: list[int]


def _contexts(part: Sequence[Group]) -> _Contexts:
  out = _Contexts([], [])
  trajectories = itertools.chain.from_iterable(map(_graded, part))
  for number, trajectory in enumerate(trajectories):
    split = trajectory.split()
    out.rows.extend(split)
    out.owners.extend([number] * len(split))
  return out


def rewards_of(
  groups: Sequence[Group],
  value: Callable[[Trajectory], float] = lambda t: t.reward,
) -> np.ndarray:
  """Puts each trajectory's `value`, by default its reward, into reward_GK.

  NaN if a sample or its reward is missing.
  """
  most = max(map(len, groups), default=0)
  reward_GK = np.full((len(groups), most), np.nan)
  for g, group in enumerate(groups):
    for k, t in enumerate(group):
      if t.reward is not None:
        reward_GK[g, k] = value(t)
  return reward_GK


def _graded(group: Group) -> list[Trajectory]:
  return [t for t in group if t.reward is not None]
