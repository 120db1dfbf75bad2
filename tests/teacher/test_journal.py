"""The journal: no request is repeated, and no paid reply is lost."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json

import pytest
from chat_server import ChatServer
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.data.teacher.agents import TeamConfig, solve
from coa_jax.data.teacher.backend import (
  InfrastructureError,
  Message,
  RefusedError,
  Reply,
)
from coa_jax.data.teacher.journal import Journal
from coa_jax.data.teacher.llm import ChatBackend, TeacherChatConfig
from coa_jax.data.teacher.prompts import PROMPTS
from coa_jax.data.teacher.scripted import Rates, ScriptedBackend, ScriptedConfig
from coa_jax.protocol.trajectory import CallStatus, Status, ToolCall

TOOLS = ("wiki_search", "code")
ASK = [Message("system", "s"), Message("user", "u")]


def lines(path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


class Counted:
  """A backend and a tool that count calls, and answer differently each time."""

  def __init__(self):
    self.calls = 0

  def backend(self, agent, messages):
    self.calls += 1
    return Reply(f"reply {self.calls}", 100, 60, 5, 0.5, 1, ("status 500: ''",), "m")

  def tool(self, name, arguments):
    self.calls += 1
    return ToolCall(name, arguments, f"result {self.calls}", CallStatus.MODEL, 0.25)


def test_an_answered_request_is_not_sent_again(tmp_path):
  path = tmp_path / "calls.jsonl"
  counted = Counted()

  def ask(journal, run):
    backend = journal.backend(counted.backend, run)
    tool = journal.tools(counted.tool, run)
    return [
      backend("planner", ASK),
      backend("search", ASK),
      tool("code", "x"),
      tool("code", "x"),  # a repeated request is a second call
      backend("planner", ASK[:1]),
    ]

  journal = Journal(str(path))
  first = ask(journal, ("a", 0))
  other = ask(journal, ("a", 1)) + ask(journal, ("b", 0))
  bill = journal.bill()
  assert counted.calls == 15 == len(lines(path))
  journal = Journal(str(path))
  assert ask(journal, ("a", 0)) == first
  assert ask(journal, ("b", 0)) + ask(journal, ("a", 1)) == other[5:] + other[:5]
  assert journal.bill() == bill
  assert counted.calls == 15
  assert (bill["calls"], bill["tool_calls"], bill["prompt"]) == (9, 6, 900)
  assert (bill["cached"], bill["completion"], bill["retries"]) == (540, 45, 9)
  assert bill["by_agent"] == {"planner": 6, "search": 3} and bill["models"] == {"m": 9}
  assert bill["usd"] is None


def test_the_bill_in_money(tmp_path):
  prices = TeacherChatConfig(
    base_url="http://x", model="m", prices=(10.0, 1.0, 100.0)
  ).usd
  journal = Journal(str(tmp_path / "c"), usd=prices)
  journal.backend(Counted().backend, ("a", 0))("planner", ASK)
  assert journal.values()["usd"] == pytest.approx((40 * 10 + 60 + 500) / 1e6)
  assert journal.spent() == "1 calls  105 tokens  $0.00"


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_keeps_every_whole_line(tmp_path_factory, cut):
  path = tmp_path_factory.mktemp("cut") / "calls.jsonl"
  counted = Counted()
  journal = Journal(str(path))
  backend = journal.backend(counted.backend, ("a", 0))
  replies = [backend("planner", [Message("user", str(i))]) for i in range(8)]
  data = path.read_bytes()
  path.write_bytes(data[: cut % (len(data) + 1)])
  whole = path.read_bytes().count(b"\n")
  counted.calls = 100
  journal = Journal(str(path))
  backend = journal.backend(counted.backend, ("a", 0))
  again = [backend("planner", [Message("user", str(i))]) for i in range(8)]
  assert again[:whole] == replies[:whole] and counted.calls == 100 + 8 - whole
  assert len(lines(path)) == 8


def test_failures_of_infrastructure_are_not_kept(tmp_path):
  path = tmp_path / "calls.jsonl"

  def gone(agent, messages):
    raise InfrastructureError("gone")

  def down(name, arguments):
    return ToolCall(name, arguments, "down", CallStatus.INFRASTRUCTURE)

  journal = Journal(str(path))
  with pytest.raises(InfrastructureError, match="gone"):
    journal.backend(gone, ("a", 0))("planner", ASK)
  journal.tools(down, ("a", 0))("code", "x")
  assert not path.exists()
  counted = Counted()
  assert journal.tools(counted.tool, ("a", 0))("code", "x").result == "result 1"


@pytest.mark.parametrize("refused", [False, True])
def test_a_call_that_was_charged_for_and_failed_is_on_the_bill(tmp_path, refused):
  path = tmp_path / "calls.jsonl"
  empty = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 3}}
  ask = [Message("system", PROMPTS["planner"])]
  with ChatServer() as server, ChatBackend(server.config(retries=1)) as chat:
    for _ in range(2):  # the second time after a restart
      server.faults = [empty, 401 if refused else empty]
      journal = Journal(str(path))
      with pytest.raises(RefusedError if refused else InfrastructureError):
        journal.backend(chat, ("a", 0))("planner", ask)
    journal = Journal(str(path))
    journal.backend(chat, ("a", 0))("planner", ask)  # asked again
    bill = journal.bill()
  assert (bill["failed"], bill["calls"]) == (2, 1)
  paid = 2 if refused else 4
  assert (bill["prompt"], bill["completion"]) == (paid * 40 + 100, paid * 3 + 7)


def test_a_journal_that_stops_answers_only_what_it_knows(tmp_path):
  counted = Counted()
  journal = Journal(str(tmp_path / "c"))
  known = journal.backend(counted.backend, ("a", 0))("planner", ASK)
  journal.stop()
  assert journal.backend(counted.backend, ("a", 0))("planner", ASK) == known
  with pytest.raises(InfrastructureError, match="being stopped"):
    journal.backend(counted.backend, ("b", 0))("planner", ASK)
  assert counted.calls == 1


def test_finished_runs_are_forgotten_and_stay_on_the_bill(tmp_path):
  path = str(tmp_path / "c")
  counted = Counted()
  journal = Journal(path)
  journal.backend(counted.backend, ("a", 0))("planner", ASK)
  journal.forget(("a", 0))
  journal.backend(counted.backend, ("a", 0))("planner", ASK)
  assert counted.calls == 2
  journal = Journal(path, done=lambda run: run == ("a", 0))
  journal.backend(counted.backend, ("a", 0))("planner", ASK)
  assert journal.bill()["calls"] == 3 == counted.calls


def test_a_file_that_is_no_journal_is_refused(tmp_path):
  path = tmp_path / "calls.jsonl"
  path.write_text('{"task_id": "a"}\n')
  with pytest.raises(ValueError, match=r"calls.jsonl:1: not a line of a journal"):
    Journal(str(path))


def test_many_threads_share_it(tmp_path):
  path = tmp_path / "c"

  def backend(agent, messages):
    return Reply(messages[0].content * 50)

  journal = Journal(str(path))
  with concurrent.futures.ThreadPoolExecutor(8) as pool:

    def work(i):
      ask = journal.backend(backend, (str(i), 0))
      return [ask("planner", [Message("user", f"{i} {k}")]).text for k in range(20)]

    first = list(pool.map(work, range(16)))
  journal = Journal(str(path))
  for i in range(16):
    ask = journal.backend(Counted().backend, (str(i), 0))
    texts = [ask("planner", [Message("user", f"{i} {k}")]).text for k in range(20)]
    assert texts == first[i] and texts[3] == f"{i} 3" * 50


def timeless(run):
  usage = dataclasses.replace(run.usage, seconds=0.0)
  calls = [dataclasses.replace(c, seconds=0.0) for c in run.calls]
  events = [dataclasses.replace(e, seconds=0.0, retries=0) for e in run.events]
  return dataclasses.replace(run, usage=usage, calls=calls, events=events)


def test_a_run_stopped_after_any_call_goes_on_and_comes_out_the_same(
  tasks, toolbox, tmp_path
):
  """Over HTTP, with a stop after every two replies: each request is sent once."""
  task = next(t for t in tasks if t.family == "two_hop")
  scripted = ScriptedBackend(
    [task], ScriptedConfig(), rates=Rates(wrong_query=1.0, recall=0)
  )

  def work(backend, call):
    return solve(task, backend, call, TOOLS, TeamConfig(), str.split)

  expected = timeless(work(scripted, toolbox.call))
  with ChatServer(scripted) as server, ChatBackend(server.config(retries=0)) as remote:
    stops = 0
    while True:
      journal = Journal(str(tmp_path / "c"))
      left = [2]  # replies until the next failure

      def backend(agent, messages, left=left):
        if not left[0]:
          raise InfrastructureError("stopped")
        left[0] -= 1
        return remote(agent, messages)

      key = (task.id, 0)
      run = work(journal.backend(backend, key), journal.tools(toolbox.call, key))
      if run.status != Status.INFRASTRUCTURE:
        break
      stops += 1
    bodies = [json.dumps(r.json) for r in server.requests]
  assert stops >= 5 and len(bodies) == len(set(bodies)) == run.usage.model_calls
  for event in run.events:
    event.reported = ()
  assert timeless(run) == expected
