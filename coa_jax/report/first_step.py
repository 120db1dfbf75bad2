"""Warns of config faults shown by a run's first attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Status, Trajectory
from coa_jax.rewards import answer_of
from coa_jax.rewards.grader import Grader

# A text with at least this many words and a full stop is a sentence: names and titles
# seldom have both.
_WORDS = 5
_MANY_WORDS = 12  # likewise, without a full stop


def warnings(
  attempts: Sequence[Trajectory],
  tasks: Sequence[Task],
  tools: Collection[str],
  grader: Grader,
) -> list[str]:
  """Returns a line for each fault shown by the first step's attempts."""
  played = [t for t in attempts if t.status != Status.INFRASTRUCTURE]
  out = []
  if tools and played and not any(t.calls for t in played):
    out.append(
      f"none of {len(played)} attempts called a tool ({', '.join(tools)}). Begin from "
      "a model that was trained on such calls (coa sft), or describe the "
      "tools in the prompt (rollout.style='full'); where no task needs tools, leave "
      "them out of tools.tools"
    )

  # --- Whole sentences, in the accepted or the written answers.
  by_id = {task.id: task for task in tasks}
  exact = [t for t in played if grader.is_exact(by_id[t.task_id])]
  sentences = []
  for t in exact:
    accepted = by_id[t.task_id].answers
    answer = answer_of(t) or ""
    wrong = t.reward_parts.get("answer", 0.0) == 0
    if all(map(_is_sentence, accepted)) or (wrong and _is_sentence(answer)):
      sentences.append(f"task {t.task_id!r}: {answer!r:.60} for {accepted[0]!r:.60}")
  if 2 * len(sentences) > len(exact):
    out.append(
      f"exact match compares whole sentences in {len(sentences)} of {len(exact)} "
      f"attempts ({sentences[0]}). Have a model judge them "
      "(reward.graders={'qa': 'judge'} and reward.judge), train on reward.match='f1', "
      "or ask for short answers in the questions"
    )
  return out


def _is_sentence(text: str) -> bool:
  words = len(text.split())
  stopped = text.rstrip().endswith((".", "!", "?"))
  return words >= _MANY_WORDS or (words >= _WORDS and stopped)
