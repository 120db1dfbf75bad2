"""Answer times format."""

from __future__ import annotations

import pytest

from coa_jax.protocol import parser, roles
from coa_jax.tasks.rewards import shaping


@pytest.mark.parametrize("answer", [0.0, 1.0])
@pytest.mark.parametrize("form", [0.0, 1.0])
def test_total_is_the_product(answer: float, form: float):
  assert shaping.total({"answer": answer, "format": form, "f1": 0.3}) == answer * form


def test_a_missing_part_is_an_error():
  with pytest.raises(ValueError, match="'format' is missing; there are answer"):
    shaping.total({"answer": 1.0})


def test_format_reward_is_the_verdict():
  mhqa = roles.get_variant("mhqa")
  good = "<think>a</think><plan>b</plan><think>c</think><answer>d</answer>"
  assert shaping.format_reward(parser.parse(good, mhqa)) == 1.0
  assert shaping.format_reward(parser.parse(good[:-3], mhqa)) == 0.0
