"""Task synthesis: questions that need the tools, made from documents and verified.

After TaskCraft (arXiv 2506.10055): an atomic task asks for one fact in a document
returned by a tool. The task grows in depth if another document's description replaces
the name in its question, and in width if two tasks are combined. A model writes the
text; code verifies the task: the answer is in the tool's result and not in the
question, a description does not name its subject, and a model answers right with the
documents but not without them.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from coa_jax.data.tasks.task import Task
from coa_jax.data.teacher.backend import (
  CallTool,
  InfrastructureError,
  Message,
  ModelBackend,
  Unsolvable,
)
from coa_jax.protocol.trajectory import CallStatus
from coa_jax.rewards import grade
from coa_jax.runtime.fields import bounded, check_fields, choice

ASKER = "asker"
DESCRIBER = "describer"
READER = "reader"
GUESSER = "guesser"
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
SAMPLE = -2  # synthesis's run number in a journal
TOOL = "wiki_search"  # the search tool


@dataclasses.dataclass(frozen=True)
class SynthesisConfig:
  """Config section `synthesis`.

  Attributes:
    backend: the writer and answerer: "chat" (an endpoint, section chat), or "cloze" (no
      model: gaps in sentences, for any text and offline).
    seeds: documents to begin with, drawn from the corpus.
    depth: the maximum number of deepening steps; every valid step gives a task.
    width: the share of tasks also combined in pairs.
    guesses: attempts without documents; a right one rejects the task.
    workers: documents processed at once.
    seed: the seed for random draws.
  """

  backend: str = choice("chat", of=("chat", "cloze"))
  seeds: int = bounded(100, least=1)
  depth: int = bounded(2, least=0)
  width: float = bounded(0.25, least=0, most=1)
  guesses: int = bounded(3, least=1)
  workers: int = bounded(8, least=1)
  seed: int = 0

  def __post_init__(self):
    check_fields(self)


# A valid task, or the reason for a rejection, short enough to count.
SynthesisResult = Task | str


class Corpus:
  """Titled documents, and the mentions between them."""

  def __init__(self, documents: Mapping[str, str]):
    """Takes title -> text. Mentions of titles starting in lower case are not found."""
    self.documents = dict(documents)
    longest = max((len(t.split()) for t in self.documents), default=0)
    self._mentions: dict[str, list[str]] = collections.defaultdict(list)
    for title, text in self.documents.items():
      # Look up every possible title: the time is linear in the text, for any number
      # of titles.
      words = re.findall(r"[\w'-]+", text)
      phrases = set()
      for i, word in enumerate(words):
        if word[:1].isupper() or word[:1].isdigit():
          for end in range(i + 1, i + longest + 1):
            phrases.add(" ".join(words[i:end]))
      for other in sorted(phrases & self.documents.keys() - {title}):
        self._mentions[other].append(title)

  def mentioning(self, title: str) -> Sequence[str]:
    """Lists the titles of other documents that name this one."""
    return self._mentions.get(title, ())


class Synthesizer:
  """Makes and checks tasks over one corpus, with one backend and one search tool."""

  def __init__(
    self, corpus: Corpus, backend: ModelBackend, call: CallTool, config: SynthesisConfig
  ):
    """Takes the documents, the backend (writer and answerer), and the tool runner."""
    self._corpus = corpus
    self._backend = backend
    self._call = call
    self._config = config

  def grow(self, title: str) -> Iterator[SynthesisResult]:
    """Yields a document's atomic task, then deeper tasks, up to the first rejection.

    Raises:
      InfrastructureError: the backend or the tool does not answer.
    """
    result = self.atomic(title)
    yield result
    for _ in range(self._config.depth):
      if isinstance(result, str):
        return
      result = self.deepen(result)
      yield result

  def atomic(self, title: str) -> SynthesisResult:
    """Makes a task about one fact of the document, as the tool returns it."""
    # --- Ask about the tool's result, which a solver will see.
    page = self._look_up(title)
    if page is None:
      return "not_found"
    fields = self._ask(ASKER, f"Title: {title}\nDocument:\n{page}")
    question = fields.get("QUESTION", "")
    answer = fields.get("ANSWER", "")
    if not question or not answer:
      return "malformed"

    # --- A solver can find the document, needs it, and reads the answer there.
    if title not in question:
      return "no_title"
    if not _stands_in(answer, page):
      return "answer_not_in_document"
    if _stands_in(answer, question):
      return "answer_in_question"
    return self._checked(question, answer, [title], "atomic")

  def deepen(self, task: Task) -> SynthesisResult:
    """Replaces a task's first title by another document's description."""
    # --- Another document mentioning the subject, without the answer in its title.
    titles = list(task.meta["titles"])
    subject = titles[0]
    answer = task.answers[0]
    others = [t for t in self._corpus.mentioning(subject) if t not in titles]
    others = [t for t in others if not _stands_in(answer, t)]
    if not others or subject not in task.question:
      return "no_link"
    title = random.Random(f"{self._config.seed}/{task.id}").choice(others)
    page = self._look_up(title)
    if page is None or not _stands_in(subject, page):
      return "not_found"

    # --- A phrase describing the subject, from this document only.
    request = f"Title: {title}\nDocument:\n{page}\nDescribe: {subject}"
    phrase = self._ask(DESCRIBER, request).get("PHRASE", "").rstrip(".")
    if not phrase:
      return "malformed"
    if title not in phrase or _stands_in(subject, phrase):
      return "phrase"

    # --- The deeper question.
    question = task.question.replace(subject, phrase)
    if _stands_in(answer, question):
      return "answer_in_question"
    return self._checked(question, answer, [title, *titles], "depth")

  def widen(self, first: Task, second: Task) -> SynthesisResult:
    """Asks both questions at once; right only if both answers are, in order."""
    question = (
      "Answer both questions, in this order, joined by ' and '. "
      f"{first.question} {second.question}"
    )
    answer = f"{first.answers[0]} and {second.answers[0]}"
    # One question may tell the other's answer.
    if any(_stands_in(t.answers[0], question) for t in (first, second)):
      return "answer_in_question"
    titles = [*first.meta["titles"], *second.meta["titles"]]
    return self._checked(question, answer, titles, "width")

  def _checked(
    self, question: str, answer: str, titles: Sequence[str], family: str
  ) -> SynthesisResult:
    """Returns the task if a reader solves it from its documents and no guesser does."""
    meta = {"titles": list(titles), "hops": len(titles)}
    name = f"synth-{family}-{len(titles)}-{'-'.join(titles)}"
    task = Task(name, question, (answer,), source="synth", family=family, meta=meta)

    # --- The answer follows from the documents, as the tool returns them.
    pages = [self._look_up(title) or "" for title in titles]
    request = "Documents:\n" + "\n".join(pages) + f"\nQuestion: {question}"
    if not grade(task, self._ask(READER, request).get("ANSWER")):
      return "does_not_follow"

    # --- Nobody knows the answer by heart.
    for number in range(self._config.guesses):
      # Each guess is a separate question, so that a journal distinguishes them.
      request = f"Question: {question}\n(attempt {number + 1})"
      if grade(task, self._ask(GUESSER, request).get("ANSWER")):
        return "needs_no_tools"
    return task

  def _look_up(self, title: str) -> str | None:
    """Returns the tool's result for a title; None if it lacks the document."""
    result = self._call(TOOL, title)
    if result.status == CallStatus.INFRASTRUCTURE:
      raise InfrastructureError(f"tool {TOOL}: {result.result}")
    # A search may return something else, or cut the document's end.
    start = self._corpus.documents[title][:40]
    if start not in result.result:
      return None
    return result.result

  def _ask(self, agent: str, request: str) -> dict[str, str]:
    """Returns NAME -> text, from the reply's lines `NAME: text`."""
    messages = [Message("system", PROMPTS[agent]), Message("user", request)]
    try:
      reply = self._backend(agent, messages)
    except Unsolvable:  # the documents exceed the model's context
      return {}
    if reply.cut:
      return {}
    return dict(re.findall(r"^\s*([A-Z]+):[ \t]*(.*\S)", reply.text, re.MULTILINE))


_ARTICLES = frozenset({"a", "an", "the"})


def _stands_in(answer: str, text: str) -> bool:
  """Whether the answer's words occur in the text, in order.

  Case and articles do not count. A possessive ("Quill's") names the same thing, so
  punctuation separates words.
  """
  words = _words(answer)
  return bool(words) and f" {' '.join(words)} " in f" {' '.join(_words(text))} "


def _words(text: str) -> list[str]:
  return [w for w in re.findall(r"\w+", text.lower()) if w not in _ARTICLES]
