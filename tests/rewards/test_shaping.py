"""Reward terms: each one by hand, and their sum."""

from __future__ import annotations

import itertools

import pytest

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Author, Segment, ToolCall, Trajectory, Usage
from coa_jax.rewards import shaping
from coa_jax.rewards.shaping import (
  OverlongConfig,
  RepetitionConfig,
  ShapingConfig,
  ToolCostConfig,
)

MHQA = roles.get_variant("mhqa")
GOOD = "<think>a</think><plan>b</plan><think>c</think><answer>d</answer>"
BROKEN = GOOD.replace("<think>c</think>", "")


def trajectory_of(text: str = GOOD, tokens: int = 0, calls=(), spans=()) -> Trajectory:
  segments = [Segment(Author.POLICY, "", text)]
  segments += [Segment(Author.POLICY, role, span, ids) for role, span, ids in spans]
  usage = Usage(prompt=999, generated=tokens - tokens // 3, observation=tokens // 3)
  return Trajectory("t", segments, [ToolCall("code", c) for c in calls], usage=usage)


@pytest.mark.parametrize(
  ("config", "by_hand"),
  [
    (ShapingConfig(), lambda answer, form: answer * form),
    (ShapingConfig("none"), lambda answer, form: answer),
    (ShapingConfig("weighted", 0.1), lambda answer, form: 0.9 * answer + 0.1 * form),
  ],
)
@pytest.mark.parametrize("answer", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("text", [GOOD, BROKEN])
def test_the_base_joins_answer_and_format(config, by_hand, answer, text):
  reward, parts = shaping.shape(config, answer, trajectory_of(text), MHQA)
  assert parts == {"answer": answer, "format": float(text == GOOD)}
  assert reward == pytest.approx(by_hand(answer, parts["format"]))


@pytest.mark.parametrize(
  ("tokens", "penalty"),
  [(0, 0), (7168, 0), (7169, -1 / 1024), (7680, -0.5), (8192, -1), (9999, -1)],
)
def test_overlong_is_daps_soft_punishment_in_tokens(tokens, penalty):
  """Points from afm.md 4.4 (M = 8192, buffer M / 8); the prompt does not count."""
  config = OverlongConfig(limit=8192, buffer=1024)
  term = shaping.overlong(config, trajectory_of(tokens=tokens))
  assert term == pytest.approx(penalty)


def test_repetition_of_whole_spans():
  config = RepetitionConfig(0.5)

  def term(calls=(), spans=()):
    return shaping.repetition(config, trajectory_of(calls=calls, spans=spans))

  assert term() == term(("a", "b")) == 0
  assert term(("a b", "c", "a\n b")) == -0.5
  think = ("think", "<think> x </think>", [])
  assert term(spans=[think, ("plan", "<plan> x </plan>", [])]) == 0
  assert term(spans=[think, think]) == -0.5
  check = ("double_check", "<double_check> 4 </double_check>", [])
  assert term(spans=[check, check]) == 0  # the same score twice is not a repetition


def test_tool_cost():
  config = ToolCostConfig(0.2)
  costs = [shaping.tool_cost(config, trajectory_of(calls=["x"] * n)) for n in range(5)]
  assert costs == pytest.approx([0, -0.2, -0.4, -0.5, -0.5])
  # Two calls at once and one after them: a chain of two.
  t = trajectory_of(calls=["x"] * 3)
  t.usage.tool_turns = 2
  assert shaping.tool_cost(ToolCostConfig(0.1, by_turn=True), t) == -0.2


def test_any_terms_together_are_the_sum_of_their_parts():
  terms = {
    "overlong": OverlongConfig(10, 5),
    "repetition": RepetitionConfig(0.25),
    "tool_cost": ToolCostConfig(0.125),
  }
  trajectory = trajectory_of(tokens=8, calls=("a", "a"))
  alone = {"overlong": -0.6, "repetition": -0.25, "tool_cost": -0.25}
  for n in range(len(terms) + 1):
    for names in itertools.combinations(terms, n):
      config = ShapingConfig(**{name: terms[name] for name in names})
      reward, parts = shaping.shape(config, 1.0, trajectory, MHQA)
      expected = {name: alone[name] for name in names}
      assert parts == pytest.approx({"answer": 1.0, "format": 1.0, **expected})
      assert reward == pytest.approx(1.0 + sum(expected.values()))


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: ShapingConfig(format_weight=0.1), "would count twice or not at all"),
    (lambda: ShapingConfig("weighted"), "needs a format_weight between 0 and 1"),
    (lambda: OverlongConfig(8, 9), "buffer=9 must be from 1 to limit=8"),
    (lambda: RepetitionConfig(-0.5), "weight is -0.5; it must be above 0"),
    (lambda: ToolCostConfig(0.0), "per_call is 0.0; it must be above 0"),
    (
      lambda: ToolCostConfig(0.6),
      "per_call is 0.6; it must be .* at most 0.5",
    ),
  ],
)
def test_sums_that_cannot_be_meant_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()
