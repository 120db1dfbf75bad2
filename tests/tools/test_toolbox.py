"""Tool calls in the real sandbox, and the cause of each failure.

budget: all of one class, over one toolbox that its tests share.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time

import pytest

from coa_jax.protocol.tool_bodies import render_code
from coa_jax.protocol.trajectory import CallStatus, ToolCall
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from tests.backend import BACKEND, needs_jail
from tests.tools_sandbox.sandbox_server import soon
from tools_sandbox.jail import keeper

PAGES = [
  {"id": "1", "title": "Ur", "text": "Ur is a city. Its capital is Uruk."},
  {"id": "2", "title": "Uruk", "text": "A city of kings."},
  {"id": "3", "title": "Nile", "text": "Nile: a river in Egypt."},
]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ToolsConfig:
  corpus = tmp_path_factory.mktemp("corpus") / "pages.jsonl"
  corpus.write_text("".join(json.dumps(page) + "\n" for page in PAGES))
  return ToolsConfig(
    corpus=str(corpus),
    sandbox=BACKEND,
    timeout_s=30.0,
    memory_mb=256,
    max_chars=200,
  )


@pytest.fixture(scope="module")
def toolbox(config: ToolsConfig):
  with Toolbox(config) as box:
    yield box


OK, MODEL, TOOL = CallStatus.OK, CallStatus.MODEL, CallStatus.TOOL
DOWN = CallStatus.INFRASTRUCTURE
LOOP = render_code("print('on', flush=True)\nwhile True: pass")
# Tag, content, status (whose fault a failure is), result pattern.
CALLS = [
  ("code", render_code("print(6 * 7)"), OK, "^42$"),
  ("code", render_code("print(int(input()) + 1)", "5"), OK, "^6$"),
  ("code", render_code("x = 1"), OK, "^no output; print what you want to see$"),
  ("code", render_code("print('on')\n1 / 0"), MODEL, "on.error: .*ZeroDivision"),
  ("code", render_code("if"), MODEL, "error: .*SyntaxError"),
  ("code", LOOP, TOOL, "on.*after 2 s"),
  ("code", render_code("x = bytearray(10**9)"), TOOL, "error: more than 256 MB"),
  ("code", "print(1)", MODEL, "^error: a code call is one ```py block"),
  # The best first; a title is not repeated.
  ("wiki_search", " capital of Ur ", OK, r"^1\. Ur is a city. Its capital is Uruk.\n2"),
  ("wiki_search", "kings", OK, r"^1\. Uruk: A city of kings\.$"),
  ("wiki_search", "zzz", OK, "^no result$"),
  ("wiki_search", " \n", MODEL, "^error: <wiki_search> is empty"),
  ("telescope", "x", MODEL, "^error: no tool telescope"),
]


@pytest.mark.parametrize(("name", "arguments", "status", "words"), CALLS)
def test_a_call_says_what_happened_and_whose_fault_it_is(
  toolbox, name, arguments, status, words
):
  seconds = 2.0 if arguments == LOOP else 30.0
  call = toolbox.submit(name, arguments, seconds).result()
  assert (call.name, call.arguments, call.status) == (name, arguments, status), call
  assert re.search(words, call.result, re.DOTALL), call.result
  assert 0 <= call.seconds < 60


@needs_jail
def test_programs_run_in_the_jail_where_it_is_asked_for(config):
  program = "import os\nprint(os.getpid() < 5, os.path.exists('/root'))"
  jailed = dataclasses.replace(config, sandbox="jail", tools=("code",), timeout_s=30.0)
  with Toolbox(jailed) as box:
    call = box.call("code", render_code(program))
  assert outcome(call) == (OK, "True False")


def test_a_policy_that_runs_no_program_needs_no_jail(config, monkeypatch):
  monkeypatch.setattr(keeper, "check", lambda: ["no user namespaces"])
  Toolbox(dataclasses.replace(config, sandbox="jail", tools=("wiki_search",))).close()


def test_a_corpus_that_can_not_be_read_is_no_failure_of_the_jail(config, tmp_path):
  deep = tmp_path / "deep.jsonl"
  deep.write_text("[" * 100_000)
  with pytest.raises(ValueError, match=r"^.*deep\.jsonl:1: nested too deep") as e:
    Toolbox(dataclasses.replace(config, sandbox="jail", corpus=str(deep)))
  assert "sandbox" not in str(e.value)


def test_one_page_at_a_time_has_no_number(config):
  with Toolbox(dataclasses.replace(config, top_k=1, tools=("wiki_search",))) as box:
    assert box.call("wiki_search", "river").result == "Nile: a river in Egypt."
    assert box.call("code", "```py\nprint(1)\n```").result == "error: no tool code"


@pytest.mark.parametrize("size", [200, 201, 5000])
def test_long_results_keep_head_and_tail(toolbox, size: int):
  program = f"print('a' * 9 + 'b' * {size - 18} + 'c' * 9)"
  result = toolbox.call("code", render_code(program)).result
  assert result.startswith("a" * 9) and result.endswith("c" * 9)
  assert 195 <= len(result) <= 200
  assert ("characters cut" in result) == (size > 200)


def test_calls_at_once_get_their_own_results(toolbox):
  squares = [toolbox.submit("code", render_code(f"print({n} ** 2)")) for n in range(8)]
  rivers = [toolbox.submit("wiki_search", "river") for _ in range(4)]
  assert [f.result().result for f in squares] == [str(n * n) for n in range(8)]
  assert {f.result().result for f in rivers} == {"1. Nile: a river in Egypt."}


class Odd(Toolbox):
  """Hangs, crashes or returns nothing if a call says so, in the call's thread."""

  def __init__(self, config: ToolsConfig, **changes):
    super().__init__(dataclasses.replace(config, **changes))
    self.released = threading.Event()

  def close(self) -> None:
    self.released.set()
    super().close()

  def answer(self, name: str, arguments: str, seconds: float):
    if "hang" in arguments:
      self.released.wait()
      return OK, "too late"
    if "crash" in arguments:
      raise {"exit": SystemExit, "memory": MemoryError}.get(arguments[6:], ValueError)
    if "nothing" in arguments:
      return None
    return super().answer(name, arguments, seconds)


SOON = dict(timeout_s=0.3, grace_s=0.3)


def threads(since: set[threading.Thread]) -> set[str]:
  return {t.name for t in set(threading.enumerate()) - since}


def outcome(call: ToolCall) -> tuple[CallStatus, str]:
  return call.status, call.result


def test_a_hung_tool_is_answered_for_at_its_deadline(config):
  with Odd(config, **SOON) as box:
    began = time.monotonic()
    call = box.submit("wiki_search", "hang").result(timeout=60)
    assert 0.6 <= call.seconds <= time.monotonic() - began
    assert outcome(call) == (TOOL, "error: no answer after 0.3 s")
    assert box.hung == 1
    box.released.set()
    soon(lambda: box.hung == 0)
  assert call.result == "error: no answer after 0.3 s"  # a late answer changes nothing


def test_a_hung_tool_stalls_nobody(config):
  with Odd(config, timeout_s=600.0, workers=1) as box:
    hung = [box.submit("wiki_search", f"hang {n}") for n in range(40)]
    river = "1. Nile: a river in Egypt."
    assert box.submit("wiki_search", "river").result(timeout=60).result == river
    program = box.submit("code", render_code("print(1)"))
    assert program.result(timeout=60).result == "1"
    assert not any(f.done() for f in hung)


def test_a_hung_program_keeps_its_permit_until_its_deadline_only(config):
  with Odd(config, timeouts={"code": 2.0}, grace_s=1.0, workers=1) as box:
    soon(lambda: box.call("code", render_code("print(0)")).status == OK)
    began = time.monotonic()
    hung = box.submit("code", render_code("# hang"))
    after = [box.submit("code", render_code(f"print({n})")) for n in range(3)]
    calls = [f.result(timeout=60) for f in after]
    lasted = time.monotonic() - began
    assert hung.done() and box.hung == 1
    assert [outcome(c) for c in calls] == [(OK, str(n)) for n in range(3)]
    # They waited as long as a call may take; waiting does not count as their time.
    assert sum(c.seconds for c in calls) <= lasted - 3.0


def test_waiting_for_a_permit_is_not_on_the_clock(config):
  with Odd(config, timeouts={"code": 2.5}, grace_s=1.0, workers=1) as box:
    soon(lambda: box.call("code", render_code("print(0)")).status == OK)
    program = render_code("import time; time.sleep(0.8); print('done')")
    began = time.monotonic()
    futures = [box.submit("code", program) for _ in range(5)]
    calls = [f.result(timeout=60) for f in futures]
    assert [c.result for c in calls] == ["done"] * 5
    # They ran one by one; the last waited about as long as a call may take.
    assert 5 * 0.8 <= sum(c.seconds for c in calls) <= time.monotonic() - began


def test_as_many_programs_run_at_once_as_there_are_permits(config):
  nap = render_code("import time; time.sleep(0.4)")
  with Odd(config, workers=2) as box:
    for future in [box.submit("code", nap) for _ in range(2)]:
      future.result(timeout=60)  # both processes have started
    began = time.monotonic()
    for future in [box.submit("code", nap) for _ in range(4)]:
      assert future.result(timeout=60).status == OK
    assert time.monotonic() - began >= 0.8


def test_too_many_hung_calls_mean_that_the_tools_are_down(config, monkeypatch):
  monkeypatch.setattr("coa_jax.tools.toolbox.MAX_HUNG", 2)
  down = (DOWN, "error: the tools do not answer")
  with Odd(config, **SOON, workers=1) as box:
    calls = (("wiki_search", "hang 1"), ("code", render_code("#hang")))
    hung = [box.submit(*call) for call in calls]
    waits = box.submit("code", render_code("print(1)"))
    assert [f.result(timeout=60).status for f in hung] == [TOOL] * 2
    call = waits.result(timeout=60)
    assert outcome(call) == down
    call = box.submit("wiki_search", "river").result(timeout=60)
    assert (call.status, call.result, call.seconds) == (*down, 0.0)
    # Malformed calls are still the model's fault.
    assert box.call("code", "print(1)").status == MODEL
    box.released.set()
    soon(lambda: box.hung == 0)
    assert box.call("wiki_search", "river").status == OK


@pytest.mark.parametrize("what", ["crash", "crash exit", "crash memory", "nothing"])
def test_an_exception_of_a_tool_is_the_infrastructures_fault(config, what: str, caplog):
  with Odd(config) as box:
    call = box.submit("wiki_search", what).result(timeout=60)
    assert outcome(call) == (DOWN, "error: the tool failed")
    assert box.call("wiki_search", "river").status == OK
  assert what in caplog.text and "Traceback" in caplog.text


def test_a_call_gets_no_more_seconds_than_it_is_given(config):
  with Toolbox(dataclasses.replace(config, timeouts={"code": 1.0})) as box:
    box.call("code", render_code("print(0)"))
    nap = render_code("import time; time.sleep(600)")
    call = box.submit("code", nap, seconds=0.25).result(timeout=60)
    assert call.status == TOOL
    assert call.result == "error: stopped after 0.25 s"
    call = box.submit("code", nap, seconds=100.0).result(timeout=60)
    assert call.result == "error: stopped after 1 s"


@pytest.mark.parametrize(
  ("lasts", "seconds", "status"),
  [
    (0.2, 0.2, TOOL),  # less than the tool's own limit, and used up
    (0.0, 0.2, DOWN),  # less, but not used up
    (0.2, 600.0, DOWN),  # the tool's own limit
  ],
)
def test_a_service_that_runs_out_of_the_trajectorys_time_is_not_down(
  config, lasts: float, seconds: float, status: CallStatus
):
  class Slow(Toolbox):
    def answer(self, name: str, arguments: str, seconds: float):
      time.sleep(lasts)
      return DOWN, "error: the tool is unavailable"

  own = 0.2 if seconds > 1 else 30.0
  with Slow(dataclasses.replace(config, timeout_s=own)) as box:
    call = box.submit("wiki_search", "river", seconds).result(timeout=60)
  assert call.status == status
  if status == TOOL:
    assert call.result == "error: no answer after 0.2 s" and call.seconds >= seconds


def test_a_future_can_not_be_cancelled(config):
  with Odd(config) as box:
    future = box.submit("wiki_search", "river")
    assert not future.cancel() and future.result(timeout=60).status == OK


def test_a_closed_toolbox_waits_for_nobody_and_leaves_nothing_behind(config):
  class Deaf(Odd):
    close = Toolbox.close  # hung calls stay hung

  before = set(threading.enumerate())
  with Deaf(config, workers=1, timeout_s=600.0) as box:
    box.call("code", render_code("print(0)"))
    assert "tools" in threads(before)
    nap = render_code("import time; time.sleep(600)")
    futures = [box.submit("code", nap) for _ in range(2)]
    futures.append(box.submit("wiki_search", "hang"))
    time.sleep(0.1)
    began = time.monotonic()
  assert time.monotonic() - began < 300
  box.released.set()
  running, waiting, _ = (f.result(timeout=60) for f in futures)
  assert running.status == waiting.status == DOWN
  soon(lambda: not threads(before))
  late = box.submit("wiki_search", "river").result(timeout=60)
  assert late.status == DOWN
