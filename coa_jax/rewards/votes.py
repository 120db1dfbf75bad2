"""Keys that group equal answers for voting, without a known right one."""

from __future__ import annotations

import re

from coa_jax.rewards import math, notation, qa

# In a formula punctuation means something: -3 is not 3, 1/2 is not 12.
_FORMULA = re.compile(r"[\\^_=+*/<>{}|]|^\s*-")


def vote_key(answer: str) -> str:
  """Returns an answer's vote: the value of a number, else normalised text."""
  answer = math.final_answer(answer)
  value = notation.number(answer)
  if value is not None:
    return str(value)
  # Formulas that differ only in blanks or case are one vote.
  if _FORMULA.search(answer):
    return "".join(answer.lower().split())
  return qa.match_key(answer)
