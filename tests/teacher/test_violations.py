"""Instruction violations: how a judge's replies are read, or counted as unread."""

from __future__ import annotations

import json

import pytest
from chat_server import ChatServer
from written import GOOD, PLAIN, UNIFIED, judge, make

from coa_jax.data.teacher.backend import InfrastructureError, RefusedError, Reply
from coa_jax.data.teacher.filters import FiltersConfig, filter_trajectories
from coa_jax.data.teacher.violations import (
  RULES,
  ViolationInspector,
  ViolationsConfig,
  read_violations,
)
from coa_jax.protocol.trajectory import Author, Segment

NONE = '{"violations": []}'
SECOND = '{"violations": [{"rule": 2, "quote": "in French"}]}'


@pytest.mark.parametrize(
  ("reply", "found"),
  [
    (NONE, ()),
    (SECOND, ((2, "in French"),)),
    (f"<think>{SECOND}</think>\nFine.\n```json\n{NONE}\n```\nThat is all.", ()),
    ('So: {"violations": [{"rule": "3", "quote": null}]}', ((3, ""),)),
    (f"{NONE} or rather {SECOND}", ((2, "in French"),)),
    ('{"violations": [{"rule": 99}]}', None),
    ('{"violations": [true]}', None),
    ('{"violations": [{"quote": "x"}]}', None),
    ('{"violations": "none"}', None),
    ("There is no violation.", None),
    ('{"violations": [{"rule": 1', None),
    ("{" * 5000, None),
    ("", None),
  ],
)
def test_violations_found_in_a_reply(reply, found):
  assert read_violations(reply) == found


def trajectory(number: int, thought: str = "t"):
  """A good trajectory, with `thought` as its first thought."""
  task, made = make([("think", thought), *GOOD[1:]], number)
  made.segments.insert(0, Segment(Author.PROMPT, "question", f"q{number}?"))
  return task, made


def by_thought(agent, messages):
  """A judge; rule 2 is broken if a thought says so, and some replies are unreadable."""
  data = json.loads(messages[1].content)
  if "mumble" in data["record"]:
    return Reply("Hm.")
  if "once" in data["record"] and len(messages) == 2:
    return Reply("Let me see ...")
  return Reply(SECOND if "in French" in data["record"] else NONE)


def config(server, **changes) -> ViolationsConfig:
  fields = dict(base_url=server.url, model="m", timeout_s=5.0)
  return ViolationsConfig(**{**fields, "retries": 1, **changes})


SAID = ("t", "in French", "mumble", "once, in French", "once")


def test_violations_go_and_what_cannot_be_read_stays(tmp_path):
  pairs = [trajectory(n, thought) for n, thought in enumerate(SAID)]
  pairs.append(make([*GOOD[:-1], ("answer", "y")], 9))  # wrong: not inspected
  pairs.append(make(PLAIN, 10))
  path = str(tmp_path / "violations.jsonl")
  outcomes = []
  with ChatServer(by_thought) as server:
    for _ in range(2):  # the second time, the journal has everything
      with ViolationInspector(config(server, workers=2), path) as inspector:
        filters = FiltersConfig()
        left, funnel = filter_trajectories(pairs, UNIFIED, judge, filters, inspector)
        outcomes.append((left, funnel, inspector.counts()))
      num_requests = len(server.requests)
    assert num_requests == 1 + 1 + 2 + 2 + 2
    body = server.requests[0].json
  assert body["temperature"] == 0.0
  assert all(rule in body["messages"][0]["content"] for rule in RULES)
  assert outcomes[0] == outcomes[1]
  left, funnel, counts = outcomes[0]
  assert [t.task_id for t in left] == ["t0", "t2", "t4"]
  assert [t.meta.get("uninspected") for t in left] == [None, True, None]
  dropped = funnel["quality"]["dropped"]
  assert dropped["instruction_violation"] == 2 and dropped["wrong_answer"] == 1
  assert counts["inspected"] == 5 and counts["violating"] == 2 and counts["unread"] == 1
  assert counts["rules"] == {"2": 2} and counts["calls"] == num_requests


@pytest.mark.parametrize(
  ("faults", "error"),
  [(["cut"] * 99, InfrastructureError), ([401] * 99, RefusedError)],
)  # fmt: skip
def test_a_judge_that_cannot_be_reached_gives_no_verdict(tmp_path, faults, error):
  pairs = [trajectory(n) for n in range(3)]
  path = str(tmp_path / "violations.jsonl")
  with ChatServer(by_thought) as server:
    server.faults = ["ok", *faults]
    with (
      ViolationInspector(config(server, workers=1), path) as inspector,
      pytest.raises(error),
    ):
      filter_trajectories(pairs, UNIFIED, judge, FiltersConfig(), inspector)
    paid = len((tmp_path / "violations.jsonl").read_bytes().splitlines())
    assert paid == 1
    server.faults, server.requests[:] = [], []
    with ViolationInspector(config(server), path) as inspector:
      left, _ = filter_trajectories(pairs, UNIFIED, judge, FiltersConfig(), inspector)
    assert len(left) == 3 and len(server.requests) == 2  # the journal has the first


def test_too_long_for_the_judge_is_no_verdict(tmp_path):
  with ChatServer(by_thought) as server:
    server.faults, server.error = [400], "maximum context length is 8"
    with ViolationInspector(config(server), str(tmp_path / "v.jsonl")) as inspector:
      (verdict,) = inspector([trajectory(0)[1]])
  assert verdict is None


def test_a_long_record_is_shown_without_its_middle(tmp_path, monkeypatch):
  monkeypatch.setattr("coa_jax.data.teacher.violations._MAX_CHARS", 1000)
  with ChatServer(by_thought) as server:
    long = trajectory(0, "x" * 5000)[1]
    with ViolationInspector(config(server), str(tmp_path / "v.jsonl")) as inspector:
      list(inspector([long]))
    shown = json.loads(server.requests[0].json["messages"][1]["content"])
  assert 1000 < len(shown["record"]) < 1100 and shown["task"] == "q0?"
  assert shown["record"].endswith(long.text[-100:])
