"""Distillation settings: backend, number of runs, dialect."""

from __future__ import annotations

import dataclasses

from coa_jax.data.teacher.agents import TeamConfig
from coa_jax.data.teacher.prompts import review_style
from coa_jax.protocol.prompts import STYLES
from coa_jax.protocol.roles import Variant
from coa_jax.runtime.fields import bounded, check_fields, choice

GSM8K_PROGRAMS = "gsm8k_programs"
BACKENDS = ("scripted", "gsm8k_replay", GSM8K_PROGRAMS, "chat")


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
  """Config section `teacher`.

  Attributes:
    backend: the model behind the agents: "scripted" (section `scripted`; tasks from the
      generated world only), "gsm8k_replay" (tasks with worked solutions, such as
      GSM8K's training rows; a program for each note), "gsm8k_programs" (the same, one
      program for all notes) or "chat" (section `chat`; any OpenAI-compatible endpoint).
    samples: runs per task.
    select: True to keep one run per task, chosen by a list-wise selector (best of N);
      for backend "chat" only.
    facts: whether plans begin with the known and needed facts; for "chat".
    new_numbers: copies per question with other numbers, if they can be changed; for
      "gsm8k_programs" only.
    workers: runs at once.
    variant: the trajectories' dialect.
    prompt: the trajectories' prompt style; see `protocol.prompts`.
    tokenizer: the tokenizer's folder, for counting costs; None counts words, digits and
      punctuation marks.
    max_calls: tool calls per run; after the last one the team has to answer.
  """

  backend: str = choice("scripted", of=BACKENDS)
  samples: int = bounded(1, least=1)
  select: bool = False
  facts: bool = False
  new_numbers: int = bounded(0, least=0)
  workers: int = bounded(4, least=1)
  variant: str = "unified"
  prompt: str = choice("brief", of=STYLES)
  tokenizer: str | None = None
  max_calls: int = bounded(12, least=1)

  def __post_init__(self):
    check_fields(self)
    if self.backend != "chat" and (self.select or self.facts):
      raise ValueError(f"select and facts ask for backend 'chat', not {self.backend!r}")
    if self.new_numbers and self.backend != GSM8K_PROGRAMS:
      raise ValueError(
        f"new_numbers asks for backend {GSM8K_PROGRAMS!r}, not {self.backend!r}"
      )
    if self.select and self.samples < 2:
      raise ValueError("select chooses among samples: set samples to 2 or more")

  def limits(self, variant: Variant) -> TeamConfig:
    """Returns the run limits for trajectories in this variant."""
    return TeamConfig(
      max_calls=self.max_calls,
      review=review_style(variant),
      facts=self.facts,
      parallel=variant.parallel,
    )
