"""Synthesis without a model asks for a gap only if a single answer fills it."""

from __future__ import annotations

import pathlib

import pytest

from coa_jax.cli import synthesize
from coa_jax.data.tasks.sources import load_tasks
from coa_jax.data.teacher import cloze
from coa_jax.data.teacher.synthesis import Corpus, SynthesisConfig, Synthesizer
from coa_jax.protocol.trajectory import ToolCall
from coa_jax.tools.toolbox import Toolbox, ToolsConfig
from configs.synthesize_cloze import get_config

PASSAGES = pathlib.Path(__file__).parents[1] / "fixtures/passages.json"
PAGES = {
  "Tarn Hollow": "Tarn Hollow is a town and its mayor is Mira Quill, a pilot.",
  "Mira Quill": "Mira Quill was in all likelihood born in 1961 near the coast.",
  "Fell End": "Fell End lies on a river that is called Ure, far away.",
  "Bare": "Bare has nothing that could be asked for.",
}


def maker(pages: dict[str, str], **changes) -> Synthesizer:
  def search(name: str, arguments: str) -> ToolCall:
    return ToolCall(name, arguments, pages.get(arguments, "nothing found"))

  config = SynthesisConfig(backend="cloze", guesses=1, **changes)
  return Synthesizer(Corpus(pages), cloze.answer, search, config)


def test_a_gap_and_the_gap_that_names_its_page():
  grown = list(maker(PAGES).grow("Mira Quill"))
  assert [m.question for m in grown[:2]] == [
    'Which words fill the gap in "was in all likelihood born in ___ near the coast." '
    "on the page Mira Quill?",
    'Which words fill the gap in "was in all likelihood born in ___ near the coast." '
    'on the page that fills the gap in "is a town and its mayor is ___, a pilot." '
    "on the page Tarn Hollow?",
  ]
  assert all(m.answers == ("1961",) for m in grown[:2])
  assert grown[2] == "no_link"
  both = maker(PAGES).widen(grown[0], maker(PAGES).atomic("Fell End"))
  assert both.answers == ("1961 and Ure",)


@pytest.mark.parametrize(
  ("page", "reason"),
  [
    ("Bare has nothing that could be asked for.", "malformed"),
    ("Bare ___ was in all likelihood born in 1961 near.", "malformed"),
    ("It was born in 1961 or, it was born in 1961 or, it was born in 1962 or.", ""),
  ],
)
def test_a_gap_with_two_fillings_is_no_task(page, reason):
  reasons = {maker({"Bare": page}, seed=n).atomic("Bare") for n in range(9)}
  assert reasons == {reason or "does_not_follow"}


def test_a_title_is_asked_for_whole():
  pages = {"A B": "There is one who is Anna Mary Astor there, and that is all of it."}
  grown = maker(pages).atomic("A B")
  assert grown.answers == ("Anna Mary Astor",)


def test_the_program_over_passages(tmp_path):
  config = get_config()
  config.tools.corpus = str(PASSAGES)
  config.synthesis.width = 1.0
  results = synthesize.run(config, str(tmp_path))
  assert results["by_family"].keys() == {"atomic", "depth", "width"}, results
  tools = ToolsConfig(tools=("wiki_search",), corpus=str(PASSAGES), max_chars=4000)
  with Toolbox(tools) as toolbox:
    for task in load_tasks(tmp_path / "tasks.jsonl"):
      # The answers are on the named pages.
      pages = [toolbox.call("wiki_search", t).result for t in task.meta["titles"]]
      answers = task.answers[0].split(" and ")
      for answer in answers if task.family == "width" else task.answers:
        assert any(answer in page for page in pages)
