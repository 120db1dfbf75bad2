"""Stored tool results are returned again, without a second call."""

from __future__ import annotations

import json
import threading

import pytest
import toy

from coa_jax.protocol.trajectory import CallStatus, ToolCall
from coa_jax.tools.journal import ToolJournal

WHO = (False, 7, 0, 3)  # evaluation, seed, task index, sample


def answers(*replies: str) -> toy.TableToolbox:
  """Tools that give these replies, one per call."""
  left = iter(replies)
  return toy.TableToolbox(lambda *_: next(left))


def play(
  journal: ToolJournal, tools, calls, step: int = 4, trajectory=WHO, within: int = 0
) -> list[ToolCall]:
  """Makes a trajectory's calls; returns their results."""
  mine = journal.tools(tools, step, trajectory, within)
  return [mine.submit(name, text).result() for name, text in calls]


CALLS = [("code", "a"), ("code", "b"), ("code", "a")]


def test_the_same_calls_have_the_same_answers_and_no_tool_is_asked(tmp_path):
  first = answers("1", "2", "3")
  results = play(ToolJournal(str(tmp_path)), first, CALLS)
  assert [c.result for c in results] == ["1", "2", "3"]
  again = answers()
  journal = ToolJournal(str(tmp_path))
  assert play(journal, again, CALLS) == results
  assert again.calls == []
  # New calls: one more, another at its place, another trajectory, another step.
  more = answers("4", "5", "6", "7")
  assert play(journal, more, [*CALLS, ("code", "c")])[3].result == "4"
  assert play(journal, more, [("code", "z")])[0].result == "5"
  assert play(journal, more, CALLS[:1], trajectory=(False, 7, 0, 2))[0].result == "6"
  assert play(journal, more, CALLS[:1], step=5)[0].result == "7"
  assert more.calls == [("code", "c"), ("code", "z"), ("code", "a"), ("code", "a")]


def test_an_answer_keeps_its_status_and_its_seconds(tmp_path):
  calls = [
    ToolCall("code", "a", "so \u2028 \ud800 <answer>", CallStatus.MODEL, 0.1 + 0.2),
    ToolCall("code", "b", "error: stopped", CallStatus.TOOL, 7.0),
  ]
  left = iter(calls)
  tools = toy.TableToolbox(lambda *_: next(left))
  assert play(ToolJournal(str(tmp_path)), tools, CALLS[:2]) == calls
  assert play(ToolJournal(str(tmp_path)), answers(), CALLS[:2]) == calls


def test_a_failure_of_infrastructure_is_tried_again(tmp_path):
  down = ToolCall("code", "a", "error: down", CallStatus.INFRASTRUCTURE)
  journal = ToolJournal(str(tmp_path))
  play(journal, toy.TableToolbox(lambda *_: down), CALLS[:1])
  (call,) = play(ToolJournal(str(tmp_path)), answers("up"), CALLS[:1])
  assert (call.result, call.status) == ("up", CallStatus.OK)


def test_a_line_that_is_no_answer_is_named(tmp_path):
  play(ToolJournal(str(tmp_path)), answers("1"), CALLS[:1])
  (file,) = tmp_path.iterdir()
  file.write_text(json.dumps({"key": "k"}) + "\n" + file.read_text())
  with pytest.raises(ValueError, match=r"step_000004\.jsonl:1: .* delete the file"):
    play(ToolJournal(str(tmp_path)), answers(), CALLS[:1])


def test_steps_that_are_never_made_again_are_forgotten(tmp_path):
  journal = ToolJournal(str(tmp_path / "later"))
  journal.forget(9)  # nothing is stored yet
  for step in (3, 4, 5):
    play(journal, answers("1"), CALLS[:1], step=step)
  journal.forget(5)
  names = [p.name for p in (tmp_path / "later").iterdir()]
  assert names == ["step_000005.jsonl"]


@pytest.mark.parametrize("before", [2, 3, 5, 6])
def test_a_trajectory_is_known_again_some_steps_from_where_it_began(tmp_path, before):
  """As in asynchronous rollouts: it began under another policy version."""
  first = play(ToolJournal(str(tmp_path)), answers("1", "2", "3"), CALLS, step=before)
  again, journal = answers("4"), ToolJournal(str(tmp_path))
  results = play(journal, again, [*CALLS, ("code", "c")], within=2)
  assert results[:3] == first and again.calls == [("code", "c")]
  # New results are found next time too, but only within the given number of steps.
  assert play(ToolJournal(str(tmp_path)), answers(), CALLS, within=2) == first
  far = ToolJournal(str(tmp_path))
  assert play(far, answers("5"), CALLS[:1], within=1, step=before + 2)[0].result == "5"


def test_threads_share_a_journal(tmp_path):
  journal, tools = ToolJournal(str(tmp_path)), toy.TableToolbox(lambda _, x: x * 2)
  calls = [("code", f"{n}") for n in range(20)]

  def work(i: int) -> None:
    play(journal, tools, calls, step=i % 2, trajectory=(i,))

  threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  again = ToolJournal(str(tmp_path))
  for i in range(8):
    results = play(again, answers(), calls, step=i % 2, trajectory=(i,))
    assert [c.result for c in results] == [f"{n}{n}" for n in range(20)]


def test_an_exception_of_a_tool_reaches_the_trajectory(tmp_path):
  def broken(*_):
    raise RuntimeError("the tool is broken")

  with pytest.raises(RuntimeError, match="the tool is broken"):
    play(ToolJournal(str(tmp_path)), toy.TableToolbox(broken), CALLS[:1])
  play(ToolJournal(str(tmp_path)), answers("1"), CALLS[:1])


def test_another_process_finds_what_was_answered_before_it_started(tmp_path):
  """If the number of processes changes, another one repeats the trajectory."""
  mine, other = str(tmp_path), str(tmp_path / "process_1" / "tool_calls")
  before = play(ToolJournal(other), answers("1", "2"), CALLS[:2])
  path = tmp_path / "process_1" / "tool_calls" / "step_000004.jsonl"
  with open(path, "a", encoding="utf-8") as f:
    f.write('{"key": "half a li')  # killed, or being written
  text = path.read_text()
  journal = ToolJournal(mine, [other, str(tmp_path / "none")])
  assert play(journal, answers(), CALLS[:2]) == before
  assert path.read_text() == text
  # It is deleted with the step; the second process finds it deleted.
  second = ToolJournal(str(tmp_path / "process_2"), [other])
  journal.forget(4)
  assert path.exists()
  for each in (journal, second):
    each.forget(5)
    assert not path.exists()
