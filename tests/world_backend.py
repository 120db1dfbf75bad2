"""A mock model for synthesis: questions and answers about the generated world."""

from __future__ import annotations

import re

from coa_jax.data.tasks.world.pages import LINKS, read_pages
from coa_jax.data.teacher import synthesis
from coa_jax.data.teacher.backend import Reply


class WorldBackend:
  """Writes and answers questions from the pages in its messages."""

  def __call__(self, agent, messages):
    """Returns a reply; see `backend.ModelBackend`."""
    told = messages[1].content
    title = re.search(r"^Title: (.*)$", told, re.MULTILINE)
    pages = read_pages(told)
    if agent == synthesis.ASKER:
      facts = {k: v for k, v in pages[title[1]].items() if k != "kind"}
      # Prefer a value that is not capitalised, such as a number.
      relation = sorted(facts, key=lambda r: not facts[r].istitle())[-1]
      return Reply(
        f"QUESTION: What is the {relation} of {title[1]}?\nANSWER: {facts[relation]}"
      )
    if agent == synthesis.DESCRIBER:
      named = re.search(r"^Describe: (.*)$", told, re.MULTILINE)[1]
      facts = pages[title[1]]
      links = LINKS[facts["kind"]]
      relation = next(r for r in links if facts[r] == named)
      return Reply(f"PHRASE: the {relation} of {title[1]}")
    if agent == synthesis.GUESSER:
      return Reply("ANSWER: unknown")
    questions = re.findall(r"What is .*?\?", told.rpartition("Question: ")[2])
    answers = [self.resolve(question, pages) for question in questions]
    return Reply(f"ANSWER: {' and '.join(answers)}")

  def resolve(self, question, pages) -> str:
    """Resolves a chain of relations with the facts in `pages`."""
    chain = re.findall(r"the (\w+) of", question)
    value = re.search(r"of ([A-Z][\w ]*)\?", question)[1]
    for relation in reversed(chain):
      value = pages[value][relation]
    return value
