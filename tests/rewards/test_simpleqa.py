"""The judge with SimpleQA's three grades, and their figures."""

from __future__ import annotations

import json
import re

import pytest
from chat_server import ChatServer

from coa_jax.data.tasks.task import Task
from coa_jax.report.set_figures import given_attempted
from coa_jax.rewards.graded import Ungradable
from coa_jax.rewards.judge import Judge, JudgeConfig
from coa_jax.rewards.simpleqa import read_reply
from tools_sandbox.chat import ChatConfig

RIGHT, WRONG, NONE = "correct", "incorrect", "not_attempted"
# Reply, grade or None, and why. The published reader (simple-evals) takes the first A,
# B or C anywhere, else C. Where ours differs, the last column begins with "ours:".
REPLIES = [
  ("A", RIGHT, "as asked"),
  ("B", WRONG, "as asked"),
  ("C", NONE, "as asked"),
  ("A.", RIGHT, "a full stop"),
  (" B\n", WRONG, "space around it"),
  ("**A**", RIGHT, "bold"),
  ("`C`", NONE, "code"),
  ('"B"', WRONG, "quotation marks"),
  ("(A)", RIGHT, "in brackets"),
  ("A: CORRECT", RIGHT, "letter and word"),
  ("B: INCORRECT", WRONG, "letter and word"),
  ("C: NOT_ATTEMPTED", NONE, "letter and word"),
  ("C) NOT ATTEMPTED", NONE, "a space in the word"),
  ("CORRECT", RIGHT, "ours: the word alone; its first letter is C"),
  ("INCORRECT", WRONG, "ours: the word alone; its first letter is C"),
  ("NOT_ATTEMPTED", NONE, "ours: the word alone; its first letter is A"),
  ("<think>A or B?</think>B", WRONG, "ours: thoughts aside"),
  ("<think>A</think>\n\nA", RIGHT, "thoughts aside"),
  ("<think>B</think><think>C</think>A.", RIGHT, "ours: several thoughts"),
  # No grade: asked again, and in the end ungraded.
  ("A or B", None, "ours: two letters"),
  ("A: INCORRECT", None, "ours: letter and word differ"),
  ("B: NOT_ATTEMPTED", None, "ours: letter and word differ"),
  ("a", None, "ours: a small letter is an article, too"),
  ("D", None, "ours: no such grade"),
  ("AB", None, "ours: no such grade"),
  ("The answer is A", None, "ours: a sentence"),
  ("A, since both say 1969.", None, "ours: a reason was not asked for"),
  ("Both name Ada.", None, "ours: letters in words"),
  ("<think>A", None, "ours: a thought that was cut off"),
  ("<think>A</think>", None, "ours: nothing after the thought"),
  ("I do not know.", None, "ours: a refusal"),
  # Marks around the letter.
  ("[B]", WRONG, "square brackets"),
  ("{C}", NONE, "braces"),
  ("<A>", RIGHT, "angle brackets"),
  ("$B$", WRONG, "mathematics"),
  ("```\nC\n```", NONE, "a fence"),
  ("# B", WRONG, "a heading"),
  ("- A", RIGHT, "a list of one"),
  ("> C", NONE, "a quotation"),
  ("\u201cA\u201d", RIGHT, "curly quotation marks"),
  ("\u3010B\u3011", WRONG, "brackets of Chinese text"),
  ("\ufeffC", NONE, "a byte order mark"),
  ("A!", RIGHT, "an exclamation mark"),
  ("B...", WRONG, "dots"),
  ("\n\nC\n\n", NONE, "empty lines"),
  # Letter and word.
  ("A - CORRECT", RIGHT, "a dash between"),
  ("**B**: INCORRECT.", WRONG, "bold letter, full stop"),
  ("C (NOT_ATTEMPTED)", NONE, "the word in brackets"),
  ("A\nCORRECT", RIGHT, "on two lines"),
  ("B INCORRECT", WRONG, "a space between"),
  ("**CORRECT**", RIGHT, "ours: a bold word alone"),
  ("NOT ATTEMPTED.", NONE, "ours: a word alone, with a space"),
  ("C: CORRECT", None, "ours: letter and word differ"),
  # More than a grade.
  ("A A", None, "ours: a letter twice"),
  ("A, B, C", None, "ours: the three letters repeated"),
  ("A/B", None, "ours: two letters"),
  ("Grade: A", None, "ours: a label was not asked for"),
  ('{"grade": "B"}', None, "ours: JSON was not asked for"),
  ("\\boxed{A}", None, "ours: a box was not asked for"),
  ("Not A", None, "ours: a denial"),
  ("A?", RIGHT, "a question mark is a mark"),
  ("Correct", None, "ours: a word in other letters"),
  ("\u0410", None, "ours: the Cyrillic letter"),
  ("\uff21", None, "ours: the full-width letter"),
  ("", None, "ours: an empty reply"),
]


@pytest.mark.parametrize(("reply", "grade", "why"), REPLIES)
def test_a_reply(reply, grade, why):
  assert read_reply(reply) == grade
  found = re.search("[ABC]", reply)
  published = {"A": RIGHT, "B": WRONG, "C": NONE}[found[0] if found else "C"]
  assert (published == grade) != why.startswith("ours:")


TASK = Task("1", "Who wrote Solaris?", ("Stanislaw Lem",))


class Server(ChatServer):
  """Grades the predictions "Lem", which is right, and "not sure", which is none."""

  def answer(self, body: dict) -> str:
    data = json.loads(
      re.search(r"\n(\{.*\})\n", body["messages"][-1]["content"], re.S)[1]
    )
    assert data["question"] == TASK.question
    return {"Lem": "A", "not sure": "C"}.get(data["predicted_answer"], "B: INCORRECT")


def test_three_grades_are_asked_for_once(tmp_path):
  cache = str(tmp_path / "verdicts.jsonl")
  with Server() as server:
    for _ in range(2):  # the second judge has the first one's file
      judge = Judge(
        JudgeConfig(ChatConfig(server.url, "j"), style="simpleqa", cache=cache)
      )
      grades = [
        judge.grade(TASK, text)
        for text in ("Lem", "Tarkovsky {x}", "not sure", "", None, "stanislaw lem")
      ]
      judge.close()
      assert [g.answer for g in grades] == [1, 0, 0, 0, 0, 1]
      assert [g.parts["attempted"] for g in grades] == [1, 1, 0, 0, 0, 1]
    assert len(server.requests) == 3  # none for an empty answer or an exact match
    assert [m["role"] for m in server.requests[0].json["messages"]] == ["user"]


def test_no_grade_is_no_wrong_answer():
  with Server() as server:
    server.faults.extend(["A or B"] * 3)
    judge = Judge(JudgeConfig(ChatConfig(server.url, "j"), style="simpleqa"))
    with pytest.raises(Ungradable, match="no verdict"):
      judge.grade(TASK, "Lem")
    judge.close()


def test_the_figures_by_hand():
  # Of ten answers six are attempted and three of these right.
  pairs = [(1, 1)] * 3 + [(1, 0)] * 3 + [(0, 0)] * 4
  assert given_attempted(pairs) == pytest.approx(
    {"attempted": 0.6, "accuracy_given_attempted": 0.5, "f1_given_attempted": 0.375}
  )
  assert given_attempted([(0, 0)])["f1_given_attempted"] == 0
