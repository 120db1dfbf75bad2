"""Task synthesis: questions that need the tools, made from documents, with proofs.

After TaskCraft (arXiv 2506.10055): an atomic task asks for one fact of a document that
a tool returns; it grows in depth when the thing it names is described by another
document instead, and in width when two tasks are asked together. A model writes the
words; what makes a task sound is checked here and not believed: the answer stands in
what the tool returned and not in the question, a description does not name what it
describes, a model that reads the documents answers right, and one that reads nothing
does not.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rewards import grade
from coa_jax.tasks.task import Task
from coa_jax.teacher.journal import CallTool
from coa_jax.teacher.llm import Brain, GaveUp, InfrastructureError, Message

ASKER, DESCRIBER, READER, GUESSER = "asker", "describer", "reader", "guesser"
PROMPTS = {
  ASKER: (
    "You write questions for a search exam. From the document, ask for one fact in one "
    "short question that names the document's title in full and can be understood on "
    "its own. The answer is a name, a number or a date that stands in the document, "
    "word for word, and nowhere in the question.\n"
    "Reply in two lines:\nQUESTION: <question>\nANSWER: <answer>"
  ),
  DESCRIBER: (
    "You write riddles for a search exam. The document mentions the thing that you are "
    "given. Describe that thing by this document alone, in a short noun phrase that "
    "fits only it, names the document's title in full and does not name the thing.\n"
    "Reply in one line:\nPHRASE: <phrase>"
  ),
  READER: (
    "Answer the question from the documents alone: a name, a number or a short phrase, "
    "with no explanation.\nReply in one line:\nANSWER: <answer>"
  ),
  GUESSER: (
    "Answer the question from what you know: a name, a number or a short phrase, with "
    "no explanation. Guess if you do not know.\nReply in one line:\nANSWER: <answer>"
  ),
}
SAMPLE = -2  # what calls of synthesis have in a journal for the number of a run


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
  """Config section `synthesis`.

  Attributes:
    brain: who writes and answers: "chat" (an endpoint, by section chat), or "cloze"
      (nobody: gaps in sentences, for any text and offline).
    seeds: documents to begin with, drawn from the corpus.
    depth: how often a task may be deepened; every stage that holds is a task.
    width: the share of tasks that are asked in pairs as well.
    guesses: attempts without documents, none of which may be right.
    workers: documents that are worked on at once.
    seed: of the draws.
  """

  brain: str = "chat"
  seeds: int = 100
  depth: int = 2
  width: float = 0.25
  guesses: int = 3
  workers: int = 8
  seed: int = 0

  def __post_init__(self):
    if self.brain not in ("chat", "cloze"):
      raise ValueError(f"brain is {self.brain!r}; accepted: chat, cloze")
    if min(self.seeds, self.guesses, self.workers) < 1 or self.depth < 0:
      raise ValueError("seeds, guesses, workers must be at least 1, depth at least 0")
    if not 0 <= self.width <= 1:
      raise ValueError("width is a share, from 0 to 1")


@dataclasses.dataclass(frozen=True)
class Made:
  """A task that holds, or why one does not.

  Attributes:
    task: the task; None where none came of it.
    reason: a short name that counts can be kept by; "" with a task.
  """

  task: Task | None
  reason: str = ""


class Corpus:
  """Titled documents, and which of them mention which."""

  def __init__(self, documents: Mapping[str, str]):
    """Takes title -> text. A title of one lower-case word is mentioned nowhere."""
    self.documents = dict(documents)
    longest = max((len(t.split()) for t in self.documents), default=0)
    self._mentions: dict[str, list[str]] = collections.defaultdict(list)
    for title, text in self.documents.items():
      words = re.findall(r"[\w'-]+", text)
      found = {
        " ".join(words[i : i + n])
        for i, word in enumerate(words)
        if word[:1].isupper() or word[:1].isdigit()
        for n in range(1, longest + 1)
      }
      for other in sorted(found & self.documents.keys() - {title}):
        self._mentions[other].append(title)

  def mentioning(self, title: str) -> Sequence[str]:
    """Titles of the other documents whose text names this one."""
    return self._mentions.get(title, ())


class Synthesizer:
  """Makes and checks tasks over one corpus, with one brain and one search tool."""

  def __init__(
    self,
    corpus: Corpus,
    brain: Brain,
    call: CallTool,
    config: SynthesisConfig,
    tool: str = "wiki_search",
  ):
    """Args: documents, who writes and answers, who runs the tool of that tag."""
    self._corpus, self._brain, self._call = corpus, brain, call
    self._config, self._tool = config, tool

  def grow(self, title: str) -> Iterator[Made]:
    """The atomic task of a document, then each deeper one, until one does not hold.

    Raises:
      InfrastructureError: the brain or the tool does not answer.
    """
    made = self.atomic(title)
    yield made
    for _ in range(self._config.depth):
      if made.task is None:
        return
      made = self.deepen(made.task)
      yield made

  def atomic(self, title: str) -> Made:
    """A task about one fact of the document, as the tool returns it."""
    seen = self._look_up(title)
    if seen is None:
      return Made(None, "not_found")
    fields = self._ask(ASKER, f"Title: {title}\nDocument:\n{seen}")
    question, answer = fields.get("QUESTION", ""), fields.get("ANSWER", "")
    if not question or not answer:
      return Made(None, "malformed")
    if title not in question:
      return Made(None, "no_title")
    if not _stands_in(answer, seen):
      return Made(None, "answer_not_in_document")
    if _stands_in(answer, question):
      return Made(None, "answer_in_question")
    return self._checked(question, answer, [title], "atomic")

  def deepen(self, task: Task) -> Made:
    """The task with what it names first described by another document instead."""
    known, named = list(task.meta["titles"]), task.meta["titles"][0]
    others = [t for t in self._corpus.mentioning(named) if t not in known]
    others = [t for t in others if not _stands_in(task.answers[0], t)]
    if not others or named not in task.question:
      return Made(None, "no_link")
    title = random.Random(f"{self._config.seed}/{task.id}").choice(others)
    seen = self._look_up(title)
    if seen is None or not _stands_in(named, seen):
      return Made(None, "not_found")
    told = f"Title: {title}\nDocument:\n{seen}\nDescribe: {named}"
    phrase = self._ask(DESCRIBER, told).get("PHRASE", "").rstrip(".")
    if not phrase:
      return Made(None, "malformed")
    if title not in phrase or _stands_in(named, phrase):
      return Made(None, "phrase")
    question = task.question.replace(named, phrase)
    if _stands_in(task.answers[0], question):
      return Made(None, "answer_in_question")
    return self._checked(question, task.answers[0], [title, *known], "depth")

  def widen(self, first: Task, second: Task) -> Made:
    """Both tasks at once; right only if both answers are, in order."""
    question = (
      "Answer both questions, in this order, joined by ' and '. "
      f"{first.question} {second.question}"
    )
    answer = f"{first.answers[0]} and {second.answers[0]}"
    if any(_stands_in(t.answers[0], question) for t in (first, second)):
      return Made(None, "answer_in_question")
    titles = [*first.meta["titles"], *second.meta["titles"]]
    return self._checked(question, answer, titles, "width")

  def _checked(
    self, question: str, answer: str, titles: Sequence[str], family: str
  ) -> Made:
    """The task, if a reader of its documents solves it and no guesser does."""
    meta = {"titles": list(titles), "hops": len(titles)}
    name = f"synth-{family}-{len(titles)}-{'-'.join(titles)}"
    task = Task(name, question, (answer,), source="synth", family=family, meta=meta)
    seen = [self._look_up(title) or "" for title in titles]
    told = "Documents:\n" + "\n".join(seen) + f"\nQuestion: {question}"
    if not grade(task, self._ask(READER, told).get("ANSWER")):
      return Made(None, "does_not_follow")
    for number in range(self._config.guesses):
      # Each guess is a question of its own, so that a journal keeps them apart.
      told = f"Question: {question}\n(attempt {number + 1})"
      if grade(task, self._ask(GUESSER, told).get("ANSWER")):
        return Made(None, "needs_no_tools")
    return Made(task)

  def _look_up(self, title: str) -> str | None:
    """What the tool returns for a title; None where the document is not in it."""
    result = self._call(self._tool, title)
    if result.status == CallStatus.INFRASTRUCTURE:
      raise InfrastructureError(f"tool {self._tool}: {result.result}")
    start = self._corpus.documents[title][:40]
    return result.result if start in result.result else None

  def _ask(self, agent: str, told: str) -> dict[str, str]:
    """NAME -> text of the reply's lines `NAME: text`."""
    messages = [Message("system", PROMPTS[agent]), Message("user", told)]
    try:
      reply = self._brain(agent, messages)
    except GaveUp:  # the documents are longer than its context
      return {}
    if reply.cut:
      return {}
    found = re.findall(r"^\s*([A-Z]+):[ \t]*(.*\S)", reply.text, re.MULTILINE)
    return dict(found)


_ARTICLES = frozenset({"a", "an", "the"})


def _stands_in(answer: str, text: str) -> bool:
  """Whether the words of the answer stand in the text, in order; case and articles
  apart. A possessive ("Quill's") names the same thing, so punctuation parts words.
  """
  words = _words(answer)
  return bool(words) and f" {' '.join(words)} " in f" {' '.join(_words(text))} "


def _words(text: str) -> list[str]:
  return [w for w in re.findall(r"\w+", text.lower()) if w not in _ARTICLES]
