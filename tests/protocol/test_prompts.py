"""The prompt explains the whole protocol."""

from __future__ import annotations

import pytest

from coa_jax.protocol import prompts, roles
from coa_jax.protocol.trajectory import Author

VARIANTS = pytest.mark.parametrize(
  "variant", roles.VARIANTS.values(), ids=lambda v: v.name
)


@VARIANTS
def test_every_span_is_explained_and_no_other(variant: roles.Variant):
  text = prompts.instructions(variant)
  for name in (*roles.ROLES, *roles.TOOLS):
    mine = name in (*variant.roles, *variant.tools)
    assert (roles.wrap(name, "...") in text) == mine
  assert roles.wrap(roles.OBSERVATION, "...") in text


@VARIANTS
def test_every_rule_is_told(variant: roles.Variant):
  lines = prompts.instructions(variant).splitlines()
  for last, following in variant.follows.items():
    first = "- first: " if last == roles.START else f"- after {last}: "
    told = [line.removeprefix(first) for line in lines if line.startswith(first)]
    assert [set(t.split(", ")) for t in told] == ([set(following)] if following else [])
  rule = "- a think comes directly before each "
  (told,) = [line.removeprefix(rule) for line in lines if line.startswith(rule)]
  assert set(told.split(", ")) == variant.think_required
  text = "\n".join(lines)
  assert all((c in text) == variant.graded for c in roles.CRITERIA)
  assert ("a score of 3 or more" in text) == (roles.DOUBLE_CHECK in variant.roles)
  assert ("at most 1 plan" in text) == (variant.max_plans == 1)
  assert "Join several answers by |" in text


def test_only_the_instructions_are_trusted():
  variant = roles.get_variant("mhqa")
  head, question = prompts.prompt_segments(variant, "Who?", "full")
  assert (head.role, question.role) == ("instructions", "question")
  assert head.author == question.author == Author.PROMPT
  assert question.text == "Who?" and head.text.endswith("Task: ")
  (only,) = prompts.prompt_segments(variant, "Who?", "brief")
  assert (only.role, only.text) == ("question", "Who?")


def test_an_unknown_style_is_refused():
  with pytest.raises(ValueError, match=r"prompt style 'terse'; accepted: full, brief"):
    prompts.instructions(roles.get_variant("web"), "terse")
