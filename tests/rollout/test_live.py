"""A team that is asked while it works, without a network between."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import toy

from coa_jax.protocol import roles
from coa_jax.protocol.trajectory import Author, Status, Trajectory
from coa_jax.rollout.streaming import Ask, Busy, Piece, Spans, Stopped, Team
from coa_jax.rollout.types import RolloutConfig
from coa_jax.rollout.worker import RolloutWorker

CONFIG = RolloutConfig(
  style="brief", slots=3, window=4, max_len=toy.MAX_LEN, inject_rows=3
)


@pytest.fixture(scope="module")
def player() -> RolloutWorker:
  return RolloutWorker(toy.MODEL, toy.tokenizer(), CONFIG, toy.TOOLS)


@pytest.fixture
def open_team(player, actor):
  """Teams on one player, one after the other; each is closed after the test."""
  teams = []

  def start(toolbox=None, **options) -> Team:
    teams.append(Team(player, actor.params, toolbox or toy.TableToolbox(), **options))
    return teams[-1]

  yield start
  for team in teams:
    team.close()


def told(team: Team, ask: Ask) -> tuple[list[Piece], Trajectory | None]:
  """Everything that whoever asks is told."""
  out: queue.SimpleQueue = queue.SimpleQueue()
  team.ask(ask, out.put)
  pieces = []
  while isinstance(what := out.get(timeout=120), Piece):
    pieces.append(what)
  return pieces, what


def eventually(true, seconds: float = 120.0) -> None:
  end = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < end, "it never came to be"
    time.sleep(0.005)


TEXT = (
  "<think> caf\u00e9 \u4e2d</think> <b> 1 < 2 </<answer> \U0001f600 </thin</answer>x<"
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_pieces_are_whole_however_the_bytes_come(size: int):
  spans, data = Spans(("think", "answer")), TEXT.encode()
  pieces = []
  for i in range(0, len(data), size):
    pieces += spans.read(data[i : i + size], final=i + size >= len(data))
  assert "".join(p.text for p in pieces) == TEXT
  assert [p.text for p in pieces if p.is_tag] == list(TAGS)
  assert not any(tag in p.text for p in pieces if not p.is_tag for tag in TAGS)
  by_role: dict[str, str] = {}
  for p in pieces:
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


@pytest.mark.parametrize("question", toy.SCRIPTS)
def test_pieces_are_the_trajectory_and_it_is_not_graded(open_team, question: str):
  pieces, t = told(open_team(), Ask(question, 0.0))
  script = toy.SCRIPTS[question]
  said = [roles.wrap(roles.OBSERVATION, x) for x in script[1::2]]
  expected = [*script]
  expected[1::2] = said
  assert "".join(p.text for p in pieces) == t.text == "".join(expected)
  tags = [p.text for p in pieces if p.is_tag and p.role == roles.OBSERVATION]
  assert tags == ["<observation>", "</observation>"] * len(said)
  assert t.status == Status.ENDED and t.reward is None and not t.reward_parts


def test_a_window_is_told_before_the_next_one(open_team, player):
  first = player.engine.counters.sampled_tokens
  seen = []

  def tell(what) -> None:
    seen.append(player.engine.counters.sampled_tokens - first)

  team = open_team()
  team.ask(Ask("2 + 3", 0.0), tell)
  eventually(lambda: seen and team.counts == (0, 0))
  assert seen[0] <= CONFIG.window and len(set(seen)) > 4


def test_max_tokens_counts_what_the_policy_writes(open_team):
  team = open_team()
  _, whole = told(team, Ask("2 + 3", 0.0))
  ids, total = toy.sampled_ids(whole), whole.usage.generated
  calls = []
  for most in range(1, total + 2):
    pieces, t = told(team, Ask("2 + 3", 0.0, max_tokens=most))
    assert toy.sampled_ids(t) == ids[:most] and t.usage.generated == min(most, total)
    assert t.status == (Status.ENDED if most >= total else Status.TRUNCATED)
    assert "".join(p.text for p in pieces) == t.text
    assert t.segments[-1].author == Author.POLICY
    calls.append(len(t.calls))
  # The call is made only if there is a token left for what comes after it.
  turn = len(ids) - len(toy.tokenizer().encode(toy.SCRIPTS["2 + 3"][2]))
  assert calls == [0] * turn + [1] * (total + 1 - turn)


def test_an_observation_without_room_is_not_told(open_team):
  toolbox = toy.TableToolbox(lambda name, body: "qx" * 200)
  pieces, t = told(open_team(toolbox), Ask("2 + 3", 0.0))
  assert t.status == Status.TRUNCATED and len(t.calls) == 1
  assert "".join(p.text for p in pieces) == t.text == toy.SCRIPTS["2 + 3"][0]


def test_seed_and_sample_alone_say_what_is_drawn(open_team):
  asks = [Ask("mixed", 2.0, seed, k) for seed in range(3) for k in range(3)]
  assert len({a.sequence for a in asks}) == 9
  team = open_team(toy.TableToolbox(latency=toy.shuffled_latency(1)))
  alone = [told(team, a)[1] for a in asks]
  assert len({t.text for t in alone}) > 6
  out: queue.SimpleQueue = queue.SimpleQueue()
  for i in (*range(9), *reversed(range(9))):  # each twice at a time
    team.ask(asks[i], lambda what, i=i: out.put((i, what)))
  ended = 0
  while ended < 18:
    i, what = out.get(timeout=120)
    if not isinstance(what, Piece):
      assert [s.ids for s in what.segments] == [s.ids for s in alone[i].segments]
      ended += 1


class Gate:
  """A tool that waits until it is opened."""

  def __init__(self):
    self.open = threading.Event()
    self.toolbox = toy.TableToolbox(self._reply)

  def _reply(self, name: str, body: str) -> str:
    assert body != "Ur" or self.open.wait(600)
    return "Ur: its capital is Uruk." if body == "Ur" else "5"


@pytest.fixture
def gate(open_team):
  """Is opened before the test's teams are closed."""
  gate = Gate()
  yield gate
  gate.open.set()


def test_a_tool_that_takes_its_time_holds_up_nobody_else(open_team, gate):
  team = open_team(gate.toolbox)
  slow: queue.SimpleQueue = queue.SimpleQueue()
  team.ask(Ask("capital of Ur", 0.0), slow.put)
  eventually(lambda: gate.toolbox.calls)
  _, t = told(team, Ask("2 + 3", 0.0))
  assert t.status == Status.ENDED and team.counts == (1, 0)
  gate.open.set()
  while isinstance(t := slow.get(timeout=120), Piece):
    pass
  assert t.status == Status.ENDED


def test_so_many_wait_and_no_more(open_team, gate):
  team = open_team(gate.toolbox, max_waiting=2)
  ends: queue.SimpleQueue = queue.SimpleQueue()

  def ask():
    return team.ask(Ask("capital of Ur", 0.0), ends.put)

  for _ in range(CONFIG.slots):
    ask()
    eventually(lambda: team.counts[1] == 0)
  waiting = [ask(), ask()]
  assert team.counts == (CONFIG.slots, 2)
  with pytest.raises(Busy, match="2 questions wait"):
    ask()
  team.cancel(waiting[0])  # makes room at once
  ask()
  gate.open.set()
  eventually(lambda: team.counts == (0, 0))


def test_what_is_called_off_frees_its_slot_at_the_next_token(open_team, player):
  # The thread is held up in `tell`, so that what comes after is counted exactly.
  team, engine = open_team(), player.engine
  begun, go_on = threading.Event(), threading.Event()
  end = []

  def tell(what) -> None:
    if not begun.is_set():
      begun.set()
      go_on.wait(600)
    end.append(what)

  episode = team.ask(Ask("4 * 4 + 1", 0.0), tell)
  assert begun.wait(120)
  before = engine.counters.sampled_tokens
  team.cancel(episode)
  go_on.set()
  eventually(lambda: team.counts == (0, 0))
  assert engine.counters.sampled_tokens == before + 1
  assert end[-1] is None and not episode.trajectory.calls


def test_closing_calls_off_all_and_ends_the_thread(open_team, gate):
  team = open_team(gate.toolbox, max_waiting=9)
  ends: queue.SimpleQueue = queue.SimpleQueue()
  for _ in range(5):
    team.ask(Ask("capital of Ur", 0.0), ends.put)
  eventually(lambda: len(gate.toolbox.calls) == 3)
  closing = threading.Thread(target=team.close)
  closing.start()
  # All are called off, and the lock is free again, while the tools still run.
  eventually(lambda: not team.alive and team.counts)
  gate.open.set()
  closing.join()
  assert not team.alive and "team" not in {t.name for t in threading.enumerate()}
  told = [ends.get_nowait() for _ in range(ends.qsize())]
  assert told.count(None) == 5 and not any(isinstance(t, Trajectory) for t in told)
  with pytest.raises(Stopped):
    team.ask(Ask("2 + 3"), ends.put)


def test_a_failure_is_told_to_all_and_stops_the_team(open_team, monkeypatch):
  failures = []
  monkeypatch.setattr(threading, "excepthook", failures.append)
  team = open_team()

  def broken(*unused):
    raise MemoryError("the device")

  monkeypatch.setattr(team._toolbox, "submit", broken)
  team.warm_up()  # which calls no tool
  assert told(team, Ask("2 + 3", 0.0))[1] is None
  eventually(lambda: not team.alive)
  assert failures[0].exc_type is MemoryError
  with pytest.raises(Stopped):
    team.warm_up()


def test_a_question_that_can_not_fit_is_refused_unread(open_team, player, monkeypatch):
  def encode(self, prompt) -> None:
    raise AssertionError("it was encoded")

  team = open_team()
  monkeypatch.setattr(type(player.tokenizer), "encode_prompt", encode)
  with pytest.raises(ValueError, match="a question of 1000000 characters leaves no"):
    team.ask(Ask("x" * 1_000_000), print)


def test_what_can_not_be_played_is_refused(open_team):
  team = open_team()
  with pytest.raises(ValueError, match=r"a prompt of \d+ tokens leaves no room in"):
    team.ask(Ask("x" * 400), print)
  with pytest.raises(ValueError, match="max_waiting must be at least 1"):
    open_team(max_waiting=0)
