"""The arms of the ablation, and how much of everything each has.

Configs are those of configs/*_world.py; what is here says where an arm differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coa_jax.protocol.roles import DOUBLE_CHECK, PLAN, REFLECTION, SUGGESTED_ANSWER

Fields = Mapping[str, Any]  # "journey.section.field" -> value


def _without(*agents: str) -> Fields:
  """A team without some of its agents: they are cut from its runs and the protocol.

  Thresholds that count the spans of a trajectory count what is left, so they are off.
  """
  variant = "-".join(("unified", *agents))
  journeys = ("distill.teacher", "rl.rollout", "evaluate.rollout")
  out = {f"{journey}.variant": variant for journey in journeys}
  out["distill.filters.min_activations"] = 0
  if REFLECTION in agents:
    out["distill.filters.keep_unreflected"] = 1.0
  return out


_UNFILTERED = {
  "distill.filters.min_activations": 0,
  "distill.filters.min_reward": 0.0,
  "distill.filters.max_repeats": 1000,
  "distill.filters.keep_unreflected": 1.0,
  "distill.filters.corrected_copies": 1,
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """A recipe.

  Attributes:
    title: what the table calls it.
    fields: those in which it differs from the full recipe.
    rl: False where the SFT model is what is evaluated.
    per_domain: one model per domain instead of one for all: with "total" they have as
      many updates together as the one model has, each its domain's share; with "each"
      every one of them has as many.
  """

  title: str
  fields: Fields = dataclasses.field(default_factory=dict)
  rl: bool = True
  per_domain: str = ""

  def changes(self) -> str:
    """Lists what it changes, in words."""
    words = [f"{field}={value!r}" for field, value in self.fields.items()]
    if not self.rl:
      words.append("no RL")
    if self.per_domain:
      updates = {"total": "each its share of the updates", "each": "each all updates"}
      words.append(f"models of {' and '.join(DOMAINS)}, {updates[self.per_domain]}")
    return ", ".join(words) or "nothing"


ARMS: dict[str, Arm] = {
  "full": Arm("full recipe"),
  "no_reflection": Arm("no reflection", _without(REFLECTION)),
  # The filter's fourth stage off: runs that noticed a mistake are written once.
  "no_error_correction": Arm(
    "no error correction", {"distill.filters.corrected_copies": 1}
  ),
  # No verification: neither the candidate nor its score.
  "no_double_check": Arm("no double_check", _without(SUGGESTED_ANSWER, DOUBLE_CHECK)),
  # Beside "SFT only"; its RL is the last but one of this table.
  "no_filtering": Arm("no filtering, SFT only", _UNFILTERED, rl=False),
  # Thoughts, calls and an answer.
  "react": Arm(
    "ReAct, single agent", _without(PLAN, REFLECTION, SUGGESTED_ANSWER, DOUBLE_CHECK)
  ),
  "sft_only": Arm("SFT only", rl=False),
  # From fresh parameters; the tokenizer is the full recipe's.
  "rl_only": Arm("RL only", {"sft.data.steps": 0}),
  "rl_from_unfiltered": Arm("RL from unfiltered SFT", _UNFILTERED),
  "per_domain_total": Arm("one model per domain, same total", per_domain="total"),
  "per_domain_each": Arm("one model per domain, same each", per_domain="each"),
}

TEAM = ARMS["full"]  # whose runs every arm is made of

# What can be answered from pages alone, and what needs a program.
DOMAINS: dict[str, tuple[str, ...]] = {
  "search": ("one_hop", "two_hop", "three_hop", "four_hop"),
  "code": ("comparison", "arithmetic", "computation", "age"),
}


@dataclasses.dataclass(frozen=True)
class Budget:
  """How much of everything an arm has.

  Attributes:
    argument: of the configs, "" or "tiny".
    world: arguments of `make_world`.
    fields: those in which the full recipe differs from configs/*_world.py.
  """

  argument: str
  world: Mapping[str, Any]
  fields: Fields


_MIX = (("one_hop", 0.3), ("two_hop", 0.35), ("computation", 0.35))
_WORLD = dict(mix=_MIX, train_mix=_MIX, unseen_families=("three_hop", "arithmetic"))
# Fewer kinds of questions than the quickstart's, which are learned in a fifth of the
# time. Unseen kinds: longer chains, and numbers that have to be looked
# up before a program has them.
_SMALL = Budget(
  "",
  dict(train=6000, rl=3000, held_out=150, unseen=60, **_WORLD),
  {
    "sft.mesh.devices": 1,  # as in the quickstart
    "sft.data.steps": 500,
    "rl.algo.steps": 16,
    "rl.algo.sampling.prompts": 16,
    "rl.dev.every": 1000,
    "rl.dev.limit": 16,
    "evaluate.tasks.limit": 0,
  },
)
BUDGETS = {
  "small": _SMALL,
  # SFT to its end; at "small" it is in the midst of learning, and seeds differ most.
  "medium": dataclasses.replace(
    _SMALL, fields={**_SMALL.fields, "sft.data.steps": 1000}
  ),
  "tiny": Budget(
    "tiny",
    dict(train=64, rl=32, held_out=8, unseen=4, **_WORLD),
    {
      "sft.mesh.devices": 1,
      "sft.data.steps": 2,
      "sft.data.validation": 4,
      "rl.algo.steps": 1,
      "rl.algo.sampling.prompts": 2,
      "rl.algo.sampling.samples": 2,
      "rl.rollout.slots": 4,
      "rl.rollout.max_len": 192,
      "rl.dev.limit": 2,
      "evaluate.rollout.slots": 4,
      "evaluate.rollout.max_len": 192,
    },
  ),
}
