"""Task synthesis with real tools: answers follow from pages, and need the tools."""

from __future__ import annotations

import re

import pytest
from chat_server import ChatServer
from world_backend import WorldBackend

from coa_jax.data.tasks.task import Task
from coa_jax.data.tasks.world.pages import read_pages
from coa_jax.data.teacher.backend import InfrastructureError, Reply, Unsolvable
from coa_jax.data.teacher.llm import ChatBackend
from coa_jax.data.teacher.synthesis import (
  Corpus,
  SynthesisConfig,
  Synthesizer,
)
from coa_jax.protocol.trajectory import CallStatus, ToolCall, read_jsonl

PAGES = {
  "Tarn Hollow": "Tarn Hollow is a town. Its mayor is Mira Quill, a former pilot.",
  "Mira Quill": "Mira Quill was born in 1961 in Fell End.",
  "Grey Gate": "Grey Gate is a film that was shot in Tarn Hollow in 1999.",
}
GOOD = {
  "asker": "QUESTION: Who is the mayor of Tarn Hollow?\nANSWER: Mira Quill",
  "describer": "PHRASE: the town where Grey Gate was shot",
  "reader": "ANSWER: Mira Quill",
  "guesser": "ANSWER: nobody",
}


def search(name: str, arguments: str) -> ToolCall:
  return ToolCall(name, arguments, PAGES.get(arguments, "nothing found"))


def saying(**lines: str):
  def backend(agent, messages):
    backend.seen.append((agent, messages[1].content))
    return Reply((GOOD | lines)[agent])

  backend.seen = []
  return backend


def maker(backend, call=search, **changes) -> Synthesizer:
  return Synthesizer(Corpus(PAGES), backend, call, SynthesisConfig(**changes))


def test_a_task_by_hand_and_the_deeper_one():
  backend = saying()
  atomic, deep, end = maker(backend).grow("Tarn Hollow")
  assert atomic.question == "Who is the mayor of Tarn Hollow?"
  assert atomic.meta == {"titles": ["Tarn Hollow"], "hops": 1}
  assert deep.question == "Who is the mayor of the town where Grey Gate was shot?"
  assert deep.answers == ("Mira Quill",)
  assert deep.meta == {"titles": ["Grey Gate", "Tarn Hollow"], "hops": 2}
  assert end == "no_link"
  # The guesser sees no document; the reader sees all of the task's.
  for agent, request in backend.seen:
    if agent == "guesser":
      assert not any(text in request for text in PAGES.values())
  reader = [request for agent, request in backend.seen if agent == "reader"][-1]
  assert PAGES["Grey Gate"] in reader and PAGES["Tarn Hollow"] in reader
  assert sum(agent == "guesser" for agent, _ in backend.seen) == 6


@pytest.mark.parametrize(
  "lines, reason",
  [
    (dict(asker="no idea"), "malformed"),
    (dict(asker="QUESTION: Who is mayor there?\nANSWER: Mira Quill"), "no_title"),
    (
      dict(asker="QUESTION: Who is in Tarn Hollow?\nANSWER: Mira Quilliam"),
      "answer_not_in_document",
    ),
    (
      dict(asker="QUESTION: What is Tarn Hollow, the town?\nANSWER: a town"),
      "answer_in_question",
    ),
    (dict(reader="ANSWER: Tom"), "does_not_follow"),
    (dict(reader=""), "does_not_follow"),
    (dict(guesser="ANSWER: mira quill."), "needs_no_tools"),
  ],
)
def test_a_failing_candidate_is_left_out_for_its_reason(lines, reason):
  assert maker(saying(**lines)).atomic("Tarn Hollow") == reason


@pytest.mark.parametrize(
  "lines, reason",
  [
    (dict(describer="PHRASE: Tarn Hollow of Grey Gate"), "phrase"),
    (dict(describer="PHRASE: the place of a film"), "phrase"),
    (dict(describer="a town"), "malformed"),
    (dict(describer="PHRASE: Mira Quill's town in Grey Gate"), "answer_in_question"),
  ],
)
def test_a_description_describes_and_does_not_name(lines, reason):
  atomic = maker(saying()).atomic("Tarn Hollow")
  assert maker(saying(**lines)).deepen(atomic) == reason


def test_two_at_once_need_both_answers():
  first = maker(saying()).atomic("Tarn Hollow")
  second = Task(
    "b", "When was Mira Q. born?", ("1961",), meta={"titles": ["Mira Quill"]}
  )
  results = maker(saying(reader="ANSWER: Mira Quill and 1961")).widen(first, second)
  assert results.answers == ("Mira Quill and 1961",) and results.meta["hops"] == 2
  assert first.question in results.question and second.question in results.question
  assert maker(saying()).widen(first, second) == "does_not_follow"
  telling = Task("c", "Is Mira Quill 60?", ("yes",), meta={"titles": ["Mira Quill"]})
  assert maker(saying()).widen(first, telling) == "answer_in_question"


def test_an_answer_the_tool_lacks_is_no_task_and_a_failed_tool_no_verdict():
  def nothing(name, arguments):
    return ToolCall(name, arguments, "nothing found")

  assert maker(saying(), nothing).atomic("Tarn Hollow") == "not_found"

  def down(name, arguments):
    return ToolCall(name, arguments, "down", CallStatus.INFRASTRUCTURE)

  with pytest.raises(InfrastructureError, match="tool wiki_search: down"):
    maker(saying(), down).atomic("Tarn Hollow")

  def full(agent, messages):
    raise Unsolvable("context_too_long")

  assert maker(full).atomic("Tarn Hollow") == "malformed"


def test_mentions_are_whole_titles():
  corpus = Corpus(
    {"Ur": "Uruk is near Ur.", "Uruk": "A city.", "Ur Uruk": "Ur-Uruk Ur"}
  )
  assert corpus.mentioning("Uruk") == ["Ur"]
  assert corpus.mentioning("Ur") == ["Ur Uruk"]
  assert corpus.mentioning("none") == ()


def test_over_the_world_through_http_and_real_tools(world_files, toolbox):
  rows = [row for _, row in read_jsonl(world_files["corpus"])]
  corpus = Corpus({row["title"]: row["text"] for row in rows})
  facts = {row["title"]: read_pages(row["text"])[row["title"]] for row in rows}
  config = SynthesisConfig(depth=2, guesses=1)
  with ChatServer(WorldBackend()) as server, ChatBackend(server.config()) as backend:
    synth = Synthesizer(corpus, backend, toolbox.call, config)
    results = [m for row in rows[:60] for m in synth.grow(row["title"])]
  tasks = [m for m in results if isinstance(m, Task)]
  hops = [t.meta["hops"] for t in tasks]
  assert hops.count(1) > 50 and hops.count(2) > 10 and hops.count(3) > 3
  for task in tasks:  # checked against the facts, not the page texts
    assert WorldBackend().resolve(task.question, facts) == task.answers[0]
    assert len(re.findall(r" of ", task.question)) == task.meta["hops"]
    assert task.meta["titles"][0] in task.question
  assert len({t.id for t in tasks}) == len(tasks)
