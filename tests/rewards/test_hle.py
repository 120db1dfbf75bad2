"""The judge in the words of HLE and BrowseComp, and the calibration error."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import pytest
from chat_server import ChatServer

from coa_jax.data.tasks.task import Task
from coa_jax.protocol.trajectory import Status, Usage
from coa_jax.report.scores import Scored, summary
from coa_jax.report.set_figures import calibration_error
from coa_jax.rewards.graded import Ungradable
from coa_jax.rewards.hle import read_reply
from coa_jax.rewards.judge import Judge, JudgeConfig
from tools_sandbox.chat import ChatConfig

REPLY = (
  "extracted_final_answer: {answer}\n\n[correct_answer]: 42\n\nreasoning: They are "
  "{word}; correct: would be wrong here.\n\ncorrect: {verdict}\n\nconfidence: 80%"
)
YES = REPLY.format(answer="42", word="equal", verdict="yes")
NO = REPLY.format(answer="41", word="different", verdict="no")

# Reply, (is correct, confidence) or None, and why. The published readers: HLE asks for
# the fields yes or no and an integer; BrowseComp (simple-evals) takes the first
# "correct: yes" or "correct: no", and no without one. Where its verdict is another one,
# the last column begins with "ours:".
REPLIES = [
  (YES, (True, 0.8), "as asked"),
  (NO, (False, 0.8), "as asked"),
  ("correct: yes\nconfidence: 0%", (True, 0.0), "a right answer without confidence"),
  ("correct: no\nconfidence: 100%", (False, 1.0), "a wrong answer with confidence"),
  ("correct: no", (False, 1.0), "no confidence is 100, as the prompt says"),
  ("correct: yes\nconfidence: None", (True, 1.0), "no number, so no confidence"),
  ("correct: yes\nconfidence: 85", (True, 0.85), "without a percent sign"),
  ("correct: yes\nconfidence: 85.5%", (True, 0.85), "HLE takes whole percents"),
  ("correct: no\nconfidence: 250%", (False, 1.0), "not above 100"),
  ("confidence: 10%\ncorrect: yes\nconfidence: 70%", (True, 0.7), "the last one"),
  ("confidence: 40%\ncorrect: yes", (True, 0.4), "in any order"),
  ("correct: yes because it equals 42", (True, 1.0), "words after the verdict"),
  ("correct: yes.", (True, 1.0), "a full stop"),
  ("correct: no (41 is not 42)", (False, 1.0), "a remark"),
  ("reasoning: correct: no doubt\ncorrect: no", (False, 1.0), "both agree"),
  ("correct: yes\nand again\ncorrect: yes", (True, 1.0), "the same verdict twice"),
  ("extracted_final_answer: yes\ncorrect: no", (False, 1.0), "the answer yes"),
  ("[correct_answer]: yes\ncorrect: no", (False, 1.0), "the gold answer yes"),
  ("**correct:** Yes\n**confidence:** 95", (True, 0.95), "ours: bold, and a capital"),
  ("**correct**: yes", (True, 1.0), "ours: a bold label"),
  ("- correct: yes", (True, 1.0), "an item of a list"),
  ("## correct: yes", (True, 1.0), "a heading"),
  ("> correct: yes", (True, 1.0), "a quotation"),
  ("correct: 'no'", (False, 1.0), "quotation marks"),
  ('correct: "yes"', (True, 1.0), "ours: quotation marks"),
  ("Correct: YES", (True, 1.0), "ours: capitals"),
  ("correct : yes", (True, 1.0), "ours: a space before the colon"),
  ("correct:yes", (True, 1.0), "ours: no space"),
  ("correct:\n\nyes", (True, 1.0), "ours: the verdict in the next line"),
  ("  correct: yes", (True, 1.0), "an indented line"),
  ("<think>correct: yes</think>\ncorrect: no", (False, 1.0), "ours: thoughts aside"),
  ("<think>a</think><think>b</think>correct: yes", (True, 1.0), "several thoughts"),
  (
    "reasoning: correct: yes?\ncorrect: no",
    (False, 1.0),
    "ours: a label begins a line",
  ),
  # No verdict: asked again, and in the end ungraded, where BrowseComp says no.
  ("correct: yes\ncorrect: no", None, "ours: two verdicts are none"),
  ("correct: no\ncorrect: yes", None, "two verdicts are none"),
  ("It is correct.", None, "no label"),
  ("yes", None, "no label"),
  ("incorrect: yes", None, "ours: another label"),
  ("not correct: yes", None, "ours: another label"),
  ("is_correct: yes", None, "ours: another label"),
  ("correct_answer: yes", None, "another label"),
  ("correct: maybe", None, "neither yes nor no"),
  ("correct: yesterday", None, "ours: a longer word"),
  ("correct: none", None, "a longer word"),
  ("correct:", None, "nothing said"),
  ("correct: yes/no", None, "ours: the question, not an answer"),
  ("correct: yes or no", None, "ours: the question, not an answer"),
  ("correct: 'yes' or 'no'", None, "the question, not an answer"),
  ("<think>\ncorrect: yes", None, "ours: a thought that was cut off"),
  ("<think>correct: yes</think>", None, "ours: nothing after the thought"),
  ("correct: yes, within rounding\nconfidence: 40%", (True, 0.4), "a reason after it"),
  ("correct: no.\nconfidence: 0", (False, 0.0), "a full stop, no percent sign"),
  ("confidence: 70%\ncorrect: yes", (True, 0.7), "the other order"),
  ("correct: yes\nconfidence: high", (True, 1.0), "a confidence in words"),
  ("correct: yes\nconfidence: 250%", (True, 1.0), "more than all"),
  ("correct: yes\ncorrect: yes\nconfidence: 5", (True, 0.05), "a verdict twice"),
  ("correct is: yes", None, "a word before the colon"),
  ("correct\u00a0: no", (False, 1.0), "a space that breaks no line"),
  ('{"correct": "yes"}', None, "JSON was not asked for"),
  ("I can not judge this.", None, "a refusal"),
  ("", None, "nothing"),
]


@pytest.mark.parametrize(("reply", "read", "why"), REPLIES)
def test_a_reply(reply, read, why):
  assert read_reply(reply) == read
  published = re.search("correct: (yes|no)", reply)
  same = bool(published and published[1] == "yes") == bool(read and read[0])
  assert same != why.startswith("ours:")


class Server(ChatServer):
  """Says yes to answers with 42."""

  def answer(self, body: dict) -> str:
    text = body["messages"][-1]["content"]
    response = text.partition("[response]: ")[2].partition("\n\nYour judgement")[0]
    return YES if "42" in response else NO


@contextlib.contextmanager
def judge(server: Server, **changes) -> Iterator[Judge]:
  chat = ChatConfig(server.url, "judge-1")
  running = Judge(JudgeConfig(chat=chat, style="hle", **changes))
  yield running
  running.close()


TASK = Task("1", "What is 6 * 7?", ("42",))


def test_a_verdict_has_a_confidence_and_is_kept(tmp_path):
  cache = str(tmp_path / "verdicts.jsonl")
  with Server() as server:
    for _ in range(2):  # the second judge has the first one's file
      with judge(server, cache=cache) as running:
        right, wrong = running.grade(TASK, "42"), running.grade(TASK, "41 {x}")
        assert (right.answer, right.parts) == (1.0, {"confidence": 0.8})
        assert (wrong.answer, wrong.parts) == (0.0, {"confidence": 0.8})
        assert running.grade(TASK, " ").answer == 0.0
    assert len(server.requests) == 2
  rows = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").open()]
  assert [row["correct"] for row in rows] == [True, False]
  (message,) = server.requests[0].json["messages"]
  assert (
    message["role"] == "user" and "[question]: What is 6 * 7?" in message["content"]
  )


def test_no_verdict_is_no_wrong_answer():
  with Server() as server, judge(server) as running:
    server.faults.extend(["I can not say"] * 3)
    with pytest.raises(Ungradable, match="no verdict"):
      running.grade(TASK, "42")


def test_the_calibration_error_by_hand():
  # One bin: mean confidence 0.7, accuracy 0.5.
  assert calibration_error([(0.9, 1), (0.5, 0)]) == {
    "calibration_error": pytest.approx(0.2)
  }
  # Bins of two: errors 0.3 and 0.1; three of five attempts are in the last bin.
  pairs = [(0.2, 1), (0.2, 0), (0.5, 1), (0.8, 0), (1.0, 1)]
  expected = (2 / 5 * 0.3**2 + 3 / 5 * (2.3 / 3 - 2 / 3) ** 2) ** 0.5
  found = calibration_error(pairs, size=2)
  assert found["calibration_error"] == pytest.approx(expected)


def test_an_evaluation_has_the_figures_of_its_judge():
  def attempt(right: float, **parts: float) -> Scored:
    parts = {"answer": right, **parts}
    return Scored("1", 0, Status.ENDED, parts, Usage(), "", 0, 0, None, 0.0)

  assert summary([attempt(1.0, confidence=0.9)], [])["calibration_error"] == (
    pytest.approx(0.1)
  )
  assert summary([attempt(0.0, attempted=0.0)], [])["attempted"] == 0
  assert not {"calibration_error", "attempted"} & set(summary([attempt(1.0)], []))
