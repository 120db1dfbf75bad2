"""The published judge of HLE and BrowseComp: its prompt and its reply.

Both benchmarks ask the judge in the same words (HLE, arXiv 2501.14249; BrowseComp,
arXiv 2504.12516), so that scores compare: an extracted answer, a verdict, and the
response's confidence.
"""

from __future__ import annotations

import re

from coa_jax.rewards.graded import after_thoughts

PROMPT = """Judge whether the following [response] to [question] is correct or not \
based on the precise and unambiguous [correct_answer] below.

[question]: {question}

[response]: {response}

Your judgement must be in the format and criteria specified below:

extracted_final_answer: The final exact answer extracted from the [response]. Put the \
extracted answer as 'None' if there is no exact, final answer to extract from the \
response.

[correct_answer]: {correct_answer}

reasoning: Explain why the extracted_final_answer is correct or incorrect based on \
[correct_answer], focusing only on if there are meaningful differences between \
[correct_answer] and the extracted_final_answer. Do not comment on any background to \
the problem, do not attempt to solve the problem, do not argue for any answer \
different than [correct_answer], focus only on whether the answers match.

correct: Answer 'yes' if extracted_final_answer matches the [correct_answer] given \
above, or is within a small margin of error for numerical problems. Answer 'no' \
otherwise, i.e. if there is any inconsistency, ambiguity, non-equivalency, or if the \
extracted answer is incorrect.

confidence: The extracted confidence score between 0% and 100% from [response]. Put \
100 if there is no confidence score available."""

# A label at the start of a line, perhaps in bold; "yes or no" repeats the question.
_CORRECT = re.compile(
  r"^[\s#>*_-]*correct[*_]*\s*:[\s*_'\"]*(yes|no)\b(?![ *_'\"]*(?:or\b|[/|]))",
  re.I | re.M,
)
_CONFIDENCE = re.compile(
  r"^[\s#>*_-]*confidence[*_]*\s*:[\s*_'\"]*(\d{1,3})", re.I | re.M
)


def read_reply(reply: str) -> tuple[bool, float] | None:
  """Reads (is correct, confidence from 0 to 1); None without a clear verdict.

  Thoughts before the reply are ignored, also a quoted verdict in them. Two different
  verdicts are none; a missing confidence is 1, as the prompt says.
  """
  reply = after_thoughts(reply)
  verdicts = {word.lower() for word in _CORRECT.findall(reply)}
  if len(verdicts) != 1:
    return None
  stated = _CONFIDENCE.findall(reply)
  confidence = min(int(stated[-1]), 100) / 100 if stated else 1.0
  return verdicts == {"yes"}, confidence
