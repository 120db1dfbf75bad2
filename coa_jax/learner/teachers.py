"""On-policy distillation: other models score the tokens that the policy sampled.

A policy token's advantage becomes

  task * A + coef * (log p_teacher - log p_policy).

The second term is minus a one-sample estimate of the token's reverse KL from policy to
teacher. It is not discounted, because each token answers for itself (K. Lu et al.,
"On-Policy Distillation", Thinking Machines Lab, 2025). A teacher reads the same ids as
the policy, with the same temperature and grammar; otherwise grammar-forced tokens would
dominate the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.learner.algorithms import BatchConfig
from coa_jax.learner.batch import Batch, Packed
from coa_jax.learner.log_probs import token_logps
from coa_jax.model import attention
from coa_jax.model.config import LoadConfig, ModelConfig
from coa_jax.model.distribution import TokenMask
from coa_jax.model.hf.io import load_config
from coa_jax.model.ops import used
from coa_jax.model.sharding import Partitioner
from coa_jax.protocol import roles
from coa_jax.protocol.grammar.tables import Constraint
from coa_jax.protocol.prompts import prompt_segments
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tokens import Tokenizer
from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.runtime.fields import bounded, check_fields, nearest
from coa_jax.runtime.processes import gather_json

# Maximum difference per token in nats, as in the loss's ratios.
_MOST = 20.0
_ANSWERS = "{answers}"

# (trajectories, the policy's parameters) -> log-probs of their policy tokens
Scorer = Callable[[Sequence[Trajectory], Any], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class DistillationConfig:
  """Config section `distillation`: on-policy distillation.

  A teacher is a model folder with the policy's tokenizer, or the http:// address of a
  `vllm serve` with such a model.

  Attributes:
    teacher: scores every token without a teacher by role or family; "" for the policy
      itself, which needs a `hint`, or for no teacher.
    roles: teachers by the tag around a token, e.g. {"code": "models/coder"}.
    families: teachers by the task's family, for tokens without a teacher by role.
    hint: added to the question that teachers read, for example "The answer is
      {answers}."; {answers} stands for the task's answers.
    coef: factor of the teachers' term.
    task: factor of the task's advantage; 0 learns from teachers alone.
  """

  teacher: str = ""
  roles: dict[str, str] = dataclasses.field(default_factory=dict)
  families: dict[str, str] = dataclasses.field(default_factory=dict)
  hint: str = ""
  coef: float = bounded(1.0, above=0)
  task: float = bounded(1.0, least=0)

  def __post_init__(self):
    check_fields(self)
    known = (*roles.ROLES, *roles.TOOLS)
    for role in self.roles:
      if role not in known:
        raise ValueError(f"roles: no tag {role!r}{nearest(role, known)}")
    if not (self.teacher or self.roles or self.families or self.hint):
      raise ValueError(
        "no teacher: set teacher, roles or families to a model folder, or a hint for "
        "the policy itself"
      )

  @property
  def sources(self) -> list[str]:
    """Lists the teachers' folders and addresses, each once; "" is the policy."""
    names = [*self.roles.values(), *self.families.values(), self.teacher]
    return [name for name in dict.fromkeys(names) if name or self.hint]

  @property
  def folders(self) -> list[str]:
    """Lists the teachers that are model folders."""
    return [name for name in self.sources if name and not is_address(name)]

  def of_tokens(self, trajectory: Trajectory) -> list[str]:
    """Returns each policy token's teacher, by its source."""
    family = self.families.get(trajectory.meta.get("family", ""), self.teacher)
    out: list[str] = []
    for segment in trajectory.segments:
      if segment.author == Author.POLICY:
        out += [self.roles.get(segment.role, family)] * len(segment.ids)
    return out


def check_folder(
  folder: str, init: str, load: LoadConfig, partitioner: Partitioner, length: int
) -> None:
  """Refuses a teacher that can not score the policy's ids on the learner's mesh.

  Raises:
    FileNotFoundError, ValueError: as `load_config` and `Tokenizer.load`; or the
      tokenizers differ.
  """
  cfg = load_config(folder, load)
  partitioner.check(cfg.axes)
  attention.check(cfg, partitioner, length)
  own = Tokenizer.load(init).bytes_of
  theirs = Tokenizer.load(folder).bytes_of
  if own != theirs:
    differ = sum(a != b for a, b in zip(own, theirs, strict=False))
    raise ValueError(
      f"{folder}: as a teacher it must have the tokenizer of {init}; it has "
      f"{len(theirs)} ids for {len(own)}, of which {differ} stand for other text"
    )


def is_address(source: str) -> bool:
  """Whether a teacher is a server."""
  return source.startswith(("http://", "https://"))


class Teachers:
  """A run's teachers.

  Attributes:
    task: factor of the task's advantage.
    is_policy: whether one of them is the policy itself.
    params: parameters of the teachers on the learner's devices.
  """

  def __init__(
    self,
    config: DistillationConfig,
    scorers: Mapping[str, Scorer],
    hinted: Callable[[Trajectory], Trajectory | None],
  ):
    """Takes one scorer per source in the config.

    Args:
      hinted: makes the teachers' version of a trajectory; None if it fits no row.
    """
    self.task = config.task
    self.is_policy = "" in config.sources
    self._config = config
    self._scorers = scorers
    self._hinted = hinted
    self.params = [s.params for s in scorers.values() if isinstance(s, ModelTeacher)]

  def terms(
    self, trajectories: Sequence[Trajectory], policy: Any
  ) -> tuple[list[np.ndarray], dict[str, float]]:
    """Computes each policy token's teacher term.

    Args:
      trajectories: with the sampler's log-probs; the same in every process.
      policy: the policy's parameters, read if `is_policy`.

    Returns:
      An array per trajectory, 0 where no teacher scores; and the metrics `teacher_kl`,
      the mean of log p_policy - log p_teacher, and `teacher_share`, the share of scored
      tokens.
    """
    hinted = [self._hinted(t) for t in trajectories]
    sources = [np.array(self._config.of_tokens(t), object) for t in trajectories]
    terms = [np.zeros(len(s)) for s in sources]
    scored = 0
    for source, scorer in self._scorers.items():
      mine = [
        i
        for i, of_token in enumerate(sources)
        if hinted[i] is not None and (of_token == source).any()
      ]
      if not mine:
        continue
      scores = scorer([hinted[i] for i in mine], policy)
      for i, logp in zip(mine, scores, strict=True):
        here = sources[i] == source
        difference = logp - policy_logps(trajectories[i])
        terms[i][here] = np.clip(difference, -_MOST, _MOST)[here]
        scored += int(here.sum())
    tokens = sum(map(len, terms))
    kl = -sum(float(x.sum()) for x in terms) / max(1, scored)
    coef = self._config.coef
    figures = {"teacher_kl": kl, "teacher_share": scored / max(1, tokens)}
    return [coef * x for x in terms], figures


def policy_logps(trajectory: Trajectory) -> np.ndarray:
  """Returns the sampler's log-probs of the policy tokens."""
  out: list[float] = []
  for segment in trajectory.segments:
    if segment.author == Author.POLICY:
      out += segment.logps
  return np.array(out)


class ModelTeacher:
  """A scorer on the learner's devices, jitted once."""

  def __init__(
    self,
    cfg: ModelConfig,
    params: Any,
    batch: BatchConfig,
    partitioner: Partitioner,
    temperature: float = 1.0,
    constraint: Constraint | None = None,
  ):
    """Keeps the parameters in the compute dtype.

    Args:
      params: its parameters; None scores with the policy's.
    """
    self.params = jax.tree.map(lambda x: jnp.array(used(cfg, x), cfg.dtype), params)
    self._batch = batch
    self._partitioner = partitioner
    if constraint:
      # Models with one tokenizer may differ in rows beyond its ids: class 0, no text.
      class_V = np.zeros(cfg.vocab_size, constraint.class_V.dtype)
      shared = min(len(class_V), len(constraint.class_V))
      class_V[:shared] = constraint.class_V[:shared]
      constraint = dataclasses.replace(constraint, class_V=class_V)
    self._constraint = constraint
    allowed = TokenMask.of(constraint)

    def score(params: Any, batch: Batch) -> jax.Array:
      # Without the rollouts' truncation, which may exclude the policy's tokens.
      logp_BT, *_ = token_logps(
        cfg,
        params,
        batch,
        temperature,
        partitioner,
        constraint=allowed,
      )
      return logp_BT

    self._score = jax.jit(score, out_shardings=partitioner.sharding("B."))

  def __call__(
    self, trajectories: Sequence[Trajectory], policy: Any
  ) -> list[np.ndarray]:
    """Scores trajectories; see `Scorer`. Every process calls it."""
    packed = Packed(
      trajectories,
      self._batch.rows,
      self._batch.length,
      self._constraint,
      self._partitioner,
    )
    params = policy if self.params is None else self.params
    scores = []
    for batch in packed.batches:
      logp_BT = self._score(params, self._partitioner.put(batch))
      scores.append(self._partitioner.own(logp_BT))
    packed.replace("reference_BT", scores)
    own = [x.tolist() for x in packed.read("reference_BT")]
    out = [np.zeros(0)] * len(trajectories)
    for part in gather_json(list(zip(packed.own, own, strict=True))):
      for i, logp in part:
        out[i] = np.array(logp)
    return out


def make_hinted(
  hint: str, tokenizer: Tokenizer, variant: Variant, style: str, length: int
) -> Callable[[Trajectory], Trajectory | None]:
  """Returns the function `hinted` for `Teachers`, which adds the hint.

  Args:
    hint: as in `DistillationConfig`; "" changes nothing.
    length: maximum tokens of a trajectory with its hint.
  """

  def hinted(trajectory: Trajectory) -> Trajectory | None:
    if not hint:
      return trajectory
    answers = roles.ANSWER_SEPARATOR.join(trajectory.meta["answers"])
    question = f"{trajectory.meta['question']}\n\n{hint.replace(_ANSWERS, answers)}"
    segments = prompt_segments(variant, question, style)
    tokenizer.encode_prompt(segments)
    segments += [s for s in trajectory.segments if s.author != Author.PROMPT]
    out = dataclasses.replace(trajectory, segments=segments)
    return out if out.num_tokens <= length else None

  return hinted
