"""What a distillation is asked for: whose brain, how many runs, in which dialect."""

from __future__ import annotations

import dataclasses

from coa_jax.protocol.prompts import STYLES
from coa_jax.protocol.roles import Variant
from coa_jax.teacher.agents import TeamConfig, review_style

BRAINS = ("scripted", "annotated", "chat")


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
  """Config section `teacher`.

  Attributes:
    brain: "scripted" (section `scripted`; tasks of the generated world only),
      "annotated" (tasks with worked solutions, such as GSM8K's training rows) or "chat"
      (section `chat`; any OpenAI-compatible endpoint).
    samples: runs per task.
    select: True to keep one of them, chosen by a list-wise selector (best of N); chat
      brains only.
    facts: whether plans begin with the facts that are known and needed; for models.
    workers: runs at once.
    variant: the dialect of the trajectories.
    prompt: the style of their prompt; see `protocol.prompts`.
    tokenizer: folder of the tokenizer that costs are counted by; None counts words,
      digits and punctuation marks.
    max_turns: limits of a run, and likewise the next two; see `agents.TeamConfig`.
  """

  brain: str = "scripted"
  samples: int = 1
  select: bool = False
  facts: bool = False
  workers: int = 4
  variant: str = "unified"
  prompt: str = "brief"
  tokenizer: str | None = None
  max_turns: int = 24
  max_calls: int = 12
  max_checks: int = 3

  def __post_init__(self):
    if self.brain not in BRAINS:
      raise ValueError(f"brain is {self.brain!r}; accepted: {', '.join(BRAINS)}")
    if self.prompt not in STYLES:
      raise ValueError(f"prompt is {self.prompt!r}; accepted: {', '.join(STYLES)}")
    if self.samples < 1 or self.workers < 1:
      raise ValueError("samples and workers must be at least 1")
    if self.brain != "chat" and (self.select or self.facts):
      raise ValueError(f"select and facts ask for brain 'chat', not {self.brain!r}")
    if self.select and self.samples < 2:
      raise ValueError("select chooses among samples: set samples to 2 or more")

  def limits(self, variant: Variant) -> TeamConfig:
    """The limits of a run whose trajectory is of this variant."""
    return TeamConfig(
      max_turns=self.max_turns,
      max_calls=self.max_calls,
      max_checks=self.max_checks,
      review=review_style(variant),
      facts=self.facts,
    )
