"""Tool calls in the real sandbox, and whose fault a failure is."""

from __future__ import annotations

import dataclasses
import json

import pytest

from coa_jax.protocol.roles import render_code
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rollout.toolbox import Toolbox, ToolsConfig
from tools_sandbox.wire import Result, Verdict

PAGES = [
  {"id": "1", "title": "Ur", "text": "Ur is a city. Its capital is Uruk."},
  {"id": "2", "title": "Uruk", "text": "A city of kings."},
  {"id": "3", "title": "Nile", "text": "Nile: a river in Egypt."},
]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ToolsConfig:
  corpus = tmp_path_factory.mktemp("corpus") / "pages.jsonl"
  corpus.write_text("".join(json.dumps(page) + "\n" for page in PAGES))
  return ToolsConfig(corpus=str(corpus), timeout_s=1.0, memory_mb=256, max_chars=200)


@pytest.fixture(scope="module")
def toolbox(config: ToolsConfig):
  with Toolbox(config) as box:
    yield box


@pytest.mark.parametrize(
  ("program", "stdin", "status", "result"),
  [
    ("print(6 * 7)", "", CallStatus.OK, "42"),
    ("print(sum(map(int, input().split())))", "1 2 3", CallStatus.OK, "6"),
    ("x = 1", "", CallStatus.OK, "no output; print what you want to see"),
  ],
)
def test_programs_that_end_well(toolbox, program, stdin, status, result):
  arguments = render_code(program, stdin)
  call = toolbox.call("code", arguments)
  assert (call.name, call.arguments) == ("code", arguments)
  assert (call.status, call.result) == (status, result)
  assert 0 < call.seconds < 10


@pytest.mark.parametrize(
  ("program", "status", "words"),
  [
    ("print('so far')\n1 / 0", CallStatus.MODEL, ["so far", "error: ", "ZeroDivision"]),
    ("if", CallStatus.MODEL, ["error: ", "SyntaxError"]),
    (
      "print('on', flush=True)\nwhile True: pass",
      CallStatus.TOOL,
      ["on", "after 1 s"],
    ),
    ("x = bytearray(10**9)", CallStatus.TOOL, ["error: more than 256 MB"]),
  ],
)
def test_programs_that_fail_say_whose_fault_it_is(toolbox, program, status, words):
  call = toolbox.call("code", render_code(program))
  assert call.status == status, call
  assert all(word in call.result for word in words), call.result


@pytest.mark.parametrize(
  ("name", "arguments", "result"),
  [
    ("code", "print(1)", "error: a code call is one ```py block"),
    ("code", "```py\nprint(1)\n```\n```py\nprint(2)\n```", "error: a code call is"),
    ("code", "", "error: <code> is empty"),
    ("wiki_search", " \n", "error: <wiki_search> is empty"),
    ("crawl_page", "http://x", "error: no tool crawl_page"),
    ("telescope", "x", "error: no tool telescope"),
  ],
)
def test_malformed_and_unknown_calls_are_the_models_fault(
  toolbox, name, arguments, result
):
  call = toolbox.call(name, arguments)
  assert call.status == CallStatus.MODEL and call.result.startswith(result)


def test_search_lists_pages_best_first(toolbox):
  call = toolbox.call("wiki_search", " capital of Ur ")
  assert call.status == CallStatus.OK
  first, *_ = call.result.split("\n")
  # A title is not said twice.
  assert first == "1. Ur is a city. Its capital is Uruk."
  assert toolbox.call("wiki_search", "kings").result == "1. Uruk: A city of kings."
  assert toolbox.call("wiki_search", "zzz").result == "no result"


def test_one_page_at_a_time_has_no_number(config):
  with Toolbox(dataclasses.replace(config, top_k=1, tools=("wiki_search",))) as box:
    assert box.call("wiki_search", "river").result == "Nile: a river in Egypt."
    assert box.call("code", "```py\nprint(1)\n```").result == "error: no tool code"


def test_tools_that_are_off_say_so(config):
  with Toolbox(dataclasses.replace(config, enabled=False)) as box:
    for name in ("code", "wiki_search"):
      call = box.call(name, "x")
      assert (call.status, call.result) == (CallStatus.TOOL, "tools are off")


def test_a_failure_of_the_service_is_nobodys_wrong_answer(toolbox, monkeypatch):
  down = Result("", "", None, Verdict.INFRASTRUCTURE, 0.0)
  monkeypatch.setattr(toolbox._sandbox, "run", lambda *_, **__: down)
  call = toolbox.call("code", "```py\nprint(1)\n```")
  assert call.status == CallStatus.INFRASTRUCTURE


@pytest.mark.parametrize("size", [200, 201, 5000])
def test_long_results_keep_head_and_tail(toolbox, size: int):
  program = f"print('a' * 9 + 'b' * {size - 18} + 'c' * 9)"
  result = toolbox.call("code", render_code(program)).result
  assert result.startswith("a" * 9) and result.endswith("c" * 9)
  assert len(result) == 200
  assert ("characters cut" in result) == (size > 200)


def test_calls_at_once_get_their_own_results(toolbox):
  futures = [
    toolbox.submit("code", render_code(f"print({n} ** 2)"))
    if n % 3
    else toolbox.submit("wiki_search", "river")
    for n in range(12)
  ]
  for n, future in enumerate(futures):
    expected = f"{n * n}" if n % 3 else "1. Nile: a river in Egypt."
    assert future.result().result == expected


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"tools": ("code", "telescope")}, "no tool 'telescope'; there are wiki_search"),
    ({"corpus": None}, "wiki_search needs the path"),
    ({"top_k": 0}, "top_k and workers must be at least 1"),
    ({"max_chars": 10}, "max_chars at least 64"),
  ],
)
def test_impossible_configs_are_refused(config, changes, message: str):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(config, **changes)


def test_a_corpus_that_is_not_there_is_named(config):
  with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
    Toolbox(dataclasses.replace(config, corpus="nowhere.jsonl"))
