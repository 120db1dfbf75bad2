"""The prompt, rendered from a variant and its tools.

The text is this project's own and explains the protocol from arXiv 2508.13167, appendix
D (functions, layout, order rules, scores).
"""

from __future__ import annotations

from collections.abc import Iterable

from coa_jax.protocol import roles
from coa_jax.protocol.roles import Variant
from coa_jax.protocol.tools import FUNCTION_TAG, SPECS
from coa_jax.protocol.trajectory import Author, Segment

STYLES = ("full", "brief")

_ROLE_TEXT = {
  roles.THINK: "decide what to do next and why, before you do it",
  roles.PLAN: "split the task into steps; plan again when the facts ask for it",
  roles.REFLECTION: "judge what the last observation is worth",
  roles.SUGGESTED_ANSWER: "propose an answer that is yet to be verified",
  roles.DOUBLE_CHECK: "score the proposed answer: 1 wrong, 2 mostly wrong, 3 minor "
  "defects, 4 fully correct; write the number only",
  roles.ANSWER: "the final answer and nothing else; it ends the work",
}


def instructions(variant: Variant, style: str = "full") -> str:
  """Returns the text before the question.

  budget: the whole protocol, in the order in which a model reads it.

  Args:
    variant: the dialect, reduced to this run's tools.
    style: "full" explains every function and rule; "brief" is empty, for models trained
      from scratch on one protocol, which cannot read instructions.

  Raises:
    ValueError: an unknown style.
  """
  if style not in STYLES:
    raise ValueError(f"prompt style {style!r}; accepted: {', '.join(STYLES)}")
  if style == "brief":
    return ""

  # --- The allowed spans: roles, tools with a tag, functions by name.
  lines = ["Solve the task by writing spans, one function at a time.", "", "Functions:"]
  for role in variant.roles:
    lines.append(f"- {roles.wrap(role, '...')}: {_ROLE_TEXT[role]}.")
  for tool in variant.tools:
    text = variant.tool_descriptions.get(tool) or SPECS[tool].description
    lines.append(f"- {roles.wrap(tool, '...')}: {text}.")
  if variant.functions:
    lines += ["", "Tools that are called by name:"]
    lines += [f"- {name}: {text}." for name, text in variant.functions.items()]
    lines.append("")

  if variant.parallel > 1:
    lines.append(
      f"Up to {variant.parallel} calls are made at once by a JSON list of them in one "
      f"{roles.open_tag(FUNCTION_TAG)}; another tool's name there takes the argument "
      "input. The results come in the same order."
    )

  # --- Observations and scores.
  lines.append(
    f"After each tool call its result appears in {roles.wrap(roles.OBSERVATION, '...')}"
    "; never write one yourself."
  )
  if variant.graded:
    lines.append(
      f"Every reflection grades {', '.join(roles.CRITERIA)} as Good, Average or Poor, "
      "one `criterion : Grade` each; any Poor asks for a new plan."
    )

  # --- The order rules, from the parser's table.
  lines += ["", "What may follow what:"]
  for last, following in variant.follows.items():
    if not following:
      continue
    where = "first" if last == roles.START else f"after {last}"
    lines.append(f"- {where}: {', '.join(sorted(following))}")
  lines.append(
    f"- a think comes directly before each {', '.join(sorted(variant.think_required))}"
  )
  if roles.DOUBLE_CHECK in variant.roles:
    lines.append(
      f"- a score of {roles.PASS_SCORE} or more is followed by the answer; a lower "
      "one by more work"
    )
  if variant.max_plans is not None:
    lines.append(f"- at most {variant.max_plans} plan")
  lines.append(
    f"Join several answers by {roles.ANSWER_SEPARATOR}. Write no text outside spans "
    "and no tag inside one."
  )
  return "\n".join(lines) + "\n\nTask: "


def prompt_segments(variant: Variant, question: str, style: str) -> list[Segment]:
  """Returns the prompt's segments: instructions (if any), then the question.

  Only the instructions are trusted, so they are a separate segment: a question comes
  from a data set, and its text must never become a control token.
  """
  out = []
  head = instructions(variant, style)
  if head:
    out.append(Segment(Author.PROMPT, "instructions", head))
  out.append(Segment(Author.PROMPT, "question", question))
  return out


def conversation_text(turns: Iterable[tuple[str, str]]) -> str:
  """Joins a conversation's turns into one question, each after its speaker's name.

  Args:
    turns: (role of a chat message, text); the question comes last.
  """
  return "\n\n".join(f"{role.capitalize()}: {text}" for role, text in turns)
