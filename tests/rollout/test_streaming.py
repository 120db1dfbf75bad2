"""Concurrent questions to an inference server, without a network."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import queue
import threading
import types

import pytest
import toy
from playing import threads
from test_contexts import LongPages
from toy import eventually

from coa_jax.protocol.contexts import ContextConfig
from coa_jax.protocol.trajectory import Author, Status, Trajectory
from coa_jax.rollout.episode import EpisodeConfig
from coa_jax.rollout.setup import make_worker
from coa_jax.rollout.streaming import (
  Busy,
  InferenceRequest,
  InferenceServer,
  Spans,
  Stopped,
  TextDelta,
)
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.worker import RolloutWorker

CONFIG = RolloutConfig(
  style="brief", slots=3, window=4, max_len=toy.MAX_LEN, prefill_rows=3
)


@pytest.fixture(scope="module")
def worker() -> RolloutWorker:
  return make_worker(toy.MODEL, toy.tokenizer(), CONFIG, toy.TOOLS)


@pytest.fixture
def open_server(worker, actor):
  """Starts servers on one worker; closes them after the test."""
  servers = []

  def start(toolbox=None, **options) -> InferenceServer:
    servers.append(
      InferenceServer(worker, actor.params, toolbox or toy.TableToolbox(), **options)
    )
    return servers[-1]

  yield start
  for server in servers:
    server.close()


def events_of(
  server: InferenceServer, ask: InferenceRequest
) -> tuple[list[TextDelta], Trajectory | None]:
  """Sends a question; returns its text deltas and its trajectory."""
  out: queue.SimpleQueue = queue.SimpleQueue()
  server.submit(ask, out.put)
  deltas = []
  while isinstance(event := out.get(timeout=120), TextDelta):
    deltas.append(event)
  return deltas, event


TEXT = (
  "<think> caf\u00e9 \u4e2d</think> <b> 1 < 2 </<answer> \U0001f600 </thin</answer>x<"
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_pieces_are_whole_however_the_bytes_come(size: int):
  spans, data = Spans(("think", "answer")), TEXT.encode()
  deltas = []
  for i in range(0, len(data), size):
    deltas += spans.read(data[i : i + size], final=i + size >= len(data))
  assert "".join(p.text for p in deltas) == TEXT
  assert [p.text for p in deltas if p.is_tag] == list(TAGS)
  assert not any(tag in p.text for p in deltas if not p.is_tag for tag in TAGS)
  by_role: dict[str, str] = {}
  for p in deltas:
    if not p.is_tag:
      by_role[p.role] = by_role.get(p.role, "") + p.text
  assert by_role == {
    "think": " caf\u00e9 \u4e2d",
    "": " <b> 1 < 2 </x<",
    "answer": " \U0001f600 </thin",
  }


def test_nothing_is_held_back_that_is_certain():
  spans = Spans(("think",))
  assert [p.text for p in spans.read(b"<think> a <b")] == ["<think>", " a <b"]
  assert [p.text for p in spans.read(b" </thi")] == [" "]
  assert [p.text for p in spans.read(b"s \xe4\xb8")] == ["</this "]
  assert [p.text for p in spans.read(b"", final=True)] == ["\ufffd"]


class ScriptedEngine:
  """Plays a script's turns, and a summary where one is forced."""

  config = types.SimpleNamespace(seed=3, max_len=300)
  capacity = 1

  def __init__(self, turns):
    self.turns = list(turns)
    self.begun = 0  # contexts

  def set_policy(self, params, version):
    pass

  def submit(self, episode, group=None, first=False):
    assert first == bool(self.begun)
    self.begun += 1
    length = len(episode.start())
    ids: list[int] | None = []
    while ids is not None:
      length += len(ids)
      room = episode._max_sampled - episode.trajectory.usage.generated
      assert episode.limit == length + len(episode.forced()) + room
      text = " so far</context_summary>" if episode.forced() else self.turns.pop(0)
      ids = [*episode.forced(), *toy.tokenizer().encode(text)]
      length += len(ids)
      tag = f"</{text.rpartition('</')[2]}"
      call = episode.sampled(ids, [0.0] * len(ids), tag)
      ids = call and episode.observed(call.result())
    done = concurrent.futures.Future()
    done.set_result(episode)
    return done


@pytest.mark.parametrize(
  ("keep", "leave_at", "contexts"), [(1, 130, 2), (0, 60, 3), (3, 250, 1)]
)
def test_every_context_is_streamed(keep, leave_at, contexts):
  task = toy.TASKS[1]
  context = ContextConfig(count=4, keep=keep, leave_at=leave_at)
  variant = dataclasses.replace(toy.VARIANT, summaries=context.summarises)
  engine = ScriptedEngine(toy.SCRIPTS[task.id][::2])
  config = EpisodeConfig(variant, "brief", 8, 60.0, context=context)
  worker = RolloutWorker(engine, toy.tokenizer(), config)
  with InferenceServer(worker, None, LongPages()) as server:
    deltas, t = events_of(server, InferenceRequest(task.question, 0.0, max_tokens=200))
    assert server.counts == (0, 0)
  assert "".join(p.text for p in deltas) == t.text
  assert (t.status, len(t.split()), engine.begun) == (Status.ENDED, contexts, contexts)
  assert t.text.count("<context_summary>") == (contexts - 1) * (not keep)


def test_a_window_is_told_before_the_next_one(open_server, worker):
  first = worker.engine.counters.sampled_tokens
  seen = []

  def on_event(event) -> None:
    seen.append(worker.engine.counters.sampled_tokens - first)

  server = open_server()
  server.submit(InferenceRequest("2 + 3", 0.0), on_event)
  eventually(lambda: seen and server.counts == (0, 0))
  assert seen[0] <= CONFIG.window and len(set(seen)) > 4


def test_max_tokens_counts_what_the_policy_writes(open_server):
  server = open_server()
  _, whole = events_of(server, InferenceRequest("2 + 3", 0.0))
  ids, total = toy.sampled_ids(whole), whole.usage.generated
  calls = []
  for most in range(1, total + 2):
    deltas, t = events_of(server, InferenceRequest("2 + 3", 0.0, max_tokens=most))
    assert toy.sampled_ids(t) == ids[:most] and t.usage.generated == min(most, total)
    assert t.status == (Status.ENDED if most >= total else Status.TRUNCATED)
    assert "".join(p.text for p in deltas) == t.text
    assert t.segments[-1].author == Author.POLICY
    assert t.reward is None and not t.reward_parts  # a question is not graded
    calls.append(len(t.calls))
  # The call is made only if a token is left for the text after it.
  turn = len(ids) - len(toy.tokenizer().encode(toy.SCRIPTS["2 + 3"][2]))
  assert calls == [0] * turn + [1] * (total + 1 - turn)


def test_an_observation_without_room_is_not_told(open_server):
  toolbox = toy.TableToolbox(lambda name, body: "qx" * 200)
  deltas, t = events_of(open_server(toolbox), InferenceRequest("2 + 3", 0.0))
  assert t.status == Status.TRUNCATED and len(t.calls) == 1
  assert "".join(p.text for p in deltas) == t.text == toy.SCRIPTS["2 + 3"][0]


def test_seed_and_sample_alone_say_what_is_drawn(open_server):
  asks = [
    InferenceRequest("mixed", 2.0, seed, k) for seed in range(3) for k in range(3)
  ]
  assert len({a.sequence for a in asks}) == 9
  server = open_server(toy.TableToolbox(latency=toy.shuffled_latency(1)))
  alone = [events_of(server, a)[1] for a in asks]
  assert len({t.text for t in alone}) > 6
  out: queue.SimpleQueue = queue.SimpleQueue()
  for i in (*range(9), *reversed(range(9))):  # each one twice, concurrently
    server.submit(asks[i], lambda event, i=i: out.put((i, event)))
  ended = 0
  while ended < 18:
    i, event = out.get(timeout=120)
    if not isinstance(event, TextDelta):
      assert [s.ids for s in event.segments] == [s.ids for s in alone[i].segments]
      ended += 1


class Gate:
  """A tool whose call for Ur waits for `open`."""

  def __init__(self):
    self.open = threading.Event()
    self.toolbox = toy.TableToolbox(self._reply)

  def _reply(self, name: str, body: str) -> str:
    assert body != "Ur" or self.open.wait(600)
    return "Ur: its capital is Uruk." if body == "Ur" else "5"


@pytest.fixture
def gate(open_server):
  """A gate that opens before the test's servers are closed."""
  gate = Gate()
  yield gate
  gate.open.set()


def test_a_tool_that_takes_its_time_holds_up_nobody_else(open_server, gate):
  server = open_server(gate.toolbox)
  slow: queue.SimpleQueue = queue.SimpleQueue()
  server.submit(InferenceRequest("capital of Ur", 0.0), slow.put)
  eventually(lambda: gate.toolbox.calls)
  _, t = events_of(server, InferenceRequest("2 + 3", 0.0))
  assert t.status == Status.ENDED and server.counts == (1, 0)
  gate.open.set()
  while isinstance(t := slow.get(timeout=120), TextDelta):
    pass
  assert t.status == Status.ENDED


def test_the_queue_is_bounded(open_server, gate):
  server = open_server(gate.toolbox, max_waiting=2)
  ends: queue.SimpleQueue = queue.SimpleQueue()

  def ask():
    return server.submit(InferenceRequest("capital of Ur", 0.0), ends.put)

  for _ in range(CONFIG.slots):
    ask()
    eventually(lambda: server.counts[1] == 0)
  waiting = [ask(), ask()]
  assert server.counts == (CONFIG.slots, 2)
  with pytest.raises(Busy, match="2 questions wait"):
    ask()
  server.cancel(waiting[0])  # makes room at once
  ask()
  gate.open.set()
  eventually(lambda: server.counts == (0, 0))


def test_a_cancelled_question_ends_its_code_session(open_server):
  closed = []

  class Sessions(toy.TableToolbox):
    def code_session(self):
      return types.SimpleNamespace(close=lambda: closed.append(True))

  server = open_server(Sessions())
  # Kept: its end is not left to the garbage collector.
  episode = server.submit(InferenceRequest("2 + 3"), lambda event: None)
  server.cancel(episode)
  toy.eventually(lambda: closed)
  assert all(closed)


def test_closing_calls_off_all_and_ends_the_thread(open_server, gate):
  server = open_server(gate.toolbox, max_waiting=9)
  ends: queue.SimpleQueue = queue.SimpleQueue()
  for _ in range(5):
    server.submit(InferenceRequest("capital of Ur", 0.0), ends.put)
  eventually(lambda: len(gate.toolbox.calls) == 3)
  server.close()  # while the tools still run
  assert not server.alive and server.counts == (0, 0)
  eventually(lambda: not threads())
  events = [ends.get_nowait() for _ in range(ends.qsize())]
  assert events.count(None) == 5 and not any(
    isinstance(event, Trajectory) for event in events
  )
  with pytest.raises(Stopped):
    server.submit(InferenceRequest("2 + 3"), ends.put)


def test_a_failure_reaches_all_and_stops_the_server(open_server, capsys):
  class Broken(toy.TableToolbox):
    def start(self, request):
      raise MemoryError("the device")

  server = open_server(Broken())
  server.warm_up()  # it calls no tool
  assert events_of(server, InferenceRequest("2 + 3", 0.0))[1] is None
  eventually(lambda: not server.alive)
  assert "MemoryError: the device" in capsys.readouterr().err
  with pytest.raises(Stopped):
    server.warm_up()


def test_a_question_that_can_not_fit_is_refused_unread(
  open_server, worker, monkeypatch
):
  def encode(self, prompt) -> None:
    raise AssertionError("it was encoded")

  server = open_server()
  monkeypatch.setattr(type(worker.tokenizer), "encode_prompt", encode)
  with pytest.raises(ValueError, match="a question of 1000000 characters leaves no"):
    server.submit(InferenceRequest("x" * 1_000_000), print)


def test_an_unplayable_request_is_refused(open_server):
  server = open_server()
  with pytest.raises(ValueError, match=r"a prompt of \d+ tokens leaves no room in"):
    server.submit(InferenceRequest("x" * 400), print)
  with pytest.raises(ValueError, match="max_waiting must be at least 1"):
    open_server(max_waiting=0)
