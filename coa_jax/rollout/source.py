"""What a step of RL learns from: played when it asks, or ahead of it all the time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from coa_jax.protocol.trajectory import Trajectory
from coa_jax.rollout.ahead import Ahead, Plan, ages
from coa_jax.rollout.player import Player
from coa_jax.tasks.sampling import Draw
from coa_jax.tasks.task import Task
from coa_jax.tools.toolbox import Toolbox

Group = list[Trajectory]
# keep_G of groups: whether the rewards of each differ.
Informative = Callable[[Sequence[Group]], np.ndarray]


class Wanted(Protocol):
  """Fields of `learner.algorithms.AlgoConfig`, which says what they mean."""

  steps: int
  prompts: int
  samples: int
  rounds: int
  round_prompts: int
  filter_groups: bool
  temperature: float
  staleness: int


@dataclasses.dataclass
class Rollouts:
  """What one step learns from.

  Attributes:
    groups: those that were kept; a trajectory without a reward has left its group.
    played: every trajectory rolled out, kept or not.
    asked: groups rolled out.
    informative: those of them whose rewards differ.
    cursor: JSON values that say where the next step's rollouts go on.
    figures: more to log, by name.
    spent: seconds of the wait for them, by phase (`report/timers.py`).
  """

  groups: list[Group] = dataclasses.field(default_factory=list)
  played: list[Trajectory] = dataclasses.field(default_factory=list)
  asked: int = 0
  informative: int = 0
  cursor: dict[str, Any] = dataclasses.field(default_factory=dict)
  figures: dict[str, float] = dataclasses.field(default_factory=dict)
  spent: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Asking:
  """Who plays what, and what a step wants of it.

  Attributes:
    player: plays; of an `OffPolicy` source nobody else may use it meanwhile.
    draw: of the tasks.
    toolbox: answers the calls.
    algo: what a step wants.
    informative: which groups' rewards differ.
    seed: of all sampling.
  """

  player: Player
  draw: Draw
  toolbox: Toolbox
  algo: Wanted
  informative: Informative
  seed: int


class OnPolicy(contextlib.ExitStack):
  """Rollouts of the policy that learns from them, played when it asks."""

  def __init__(self, asking: Asking, cursor: dict[str, Any]):
    """Args: as those of `open_source`."""
    super().__init__()
    self._asking = asking
    self._cursor = cursor or {"round": 0, "draw": asking.draw.state}
    asking.draw.restore(self._cursor["draw"])

  def next(self, params: Any, step: int) -> Rollouts:
    """What the step learns from."""
    out = collect(self._asking, params, step, self._cursor["round"])
    self._cursor = out.cursor
    return out

  def evaluate(
    self, params: Any, step: int, tasks: Sequence[Task], toolbox: Toolbox
  ) -> list[Trajectory]:
    """A greedy attempt at each task, by the policy after `step` updates."""
    args = params, tasks, toolbox, 1, 0.0, self._asking.seed, step
    groups = self._asking.player.groups(*args, evaluation=True)
    return [t for group in groups for t in group]


class OffPolicy(contextlib.ExitStack):
  """Rollouts that go on while the learner learns; as `OnPolicy` to who asks."""

  def __init__(self, asking: Asking, step: int, cursor: dict[str, Any]):
    """Args: as those of `open_source`."""
    super().__init__()
    player, algo = asking.player, asking.algo
    self._informative = asking.informative
    plan = Plan(
      steps=algo.steps,
      prompts=algo.prompts,
      most=algo.rounds * (algo.round_prompts or algo.prompts),
      samples=algo.samples,
      temperature=algo.temperature,
      staleness=algo.staleness,
    )

    def keep(group: Group) -> bool:
      return not algo.filter_groups or bool(self._informative([group])[0])

    args = player, asking.draw, asking.toolbox, plan, asking.seed, keep, step, cursor
    self._ahead = self.enter_context(Ahead(*args))

  def next(self, params: Any, step: int) -> Rollouts:
    """What the step learns from; a token of it is `staleness` updates old at most."""
    taken = self._ahead.next(params, step)
    old = np.array(ages(taken.kept, step) or [0])
    figures = {
      "staleness": old.mean(),
      "staleness_max": old.max(),
      "off_policy_share": np.mean(old > 0),
      "learner_waited": taken.learner_waited,
      "rollouts_waited": taken.rollouts_waited,
    }
    return Rollouts(
      groups=taken.kept,
      played=[t for group in taken.played for t in group],
      asked=len(taken.played),
      informative=int(self._informative(taken.played).sum()),
      cursor=taken.cursor,
      figures=figures,
      spent={"rollout": taken.learner_waited},
    )

  def evaluate(
    self, params: Any, step: int, tasks: Sequence[Task], toolbox: Toolbox
  ) -> list[Trajectory]:
    """As that of `OnPolicy`; the rollouts go on beside it."""
    return self._ahead.evaluate(params, step, tasks, toolbox)


Source = OnPolicy | OffPolicy


def open_source(asking: Asking, step: int, cursor: dict[str, Any]) -> Source:
  """What `algo.staleness` asks for; use as a context manager.

  Args:
    asking: who plays what.
    step: updates made so far.
    cursor: that of the last step's rollouts; empty at a run's beginning.
  """
  if asking.algo.staleness:
    return OffPolicy(asking, step, cursor)
  return OnPolicy(asking, cursor)


def collect(asking: Asking, params: Any, step: int, first: int) -> Rollouts:
  """Rolls out groups until enough of them have rewards that differ.

  Which tasks are asked and every sampled token depend on (seed, first, params) alone,
  and on the state of the draw; the order in which trajectories ended does not matter.

  Args:
    asking: who plays what.
    params: the policy.
    step: its version.
    first: the first round of the run that was not rolled out before, so that no task
      is skipped; the cursor says which is the next.
  """
  player, draw, algo = asking.player, asking.draw, asking.algo
  out = Rollouts()
  spent = dataclasses.replace(player.engine.spent)
  size = algo.round_prompts or algo.prompts
  for nth in range(first, first + algo.rounds):
    asked = [draw.task(nth * size + i, step) for i in range(size)]
    key = int(np.random.SeedSequence((asking.seed, nth)).generate_state(1)[0])
    how = asking.toolbox, algo.samples, algo.temperature, key
    groups = player.groups(params, asked, *how, version=step)
    for group in groups:
      draw.learn(group)
    out.asked += len(groups)
    out.played += [t for g in groups for t in g]
    keep_G = asking.informative(groups)
    out.informative += int(keep_G.sum())
    if algo.filter_groups:
      groups = [g for g, keep in zip(groups, keep_G, strict=True) if keep]
    out.groups = (out.groups + groups)[: algo.prompts]
    if len(out.groups) == algo.prompts:
      break
  out.spent = player.engine.spent.since(spent)
  out.cursor = {"round": nth + 1, "draw": draw.state}
  return out
