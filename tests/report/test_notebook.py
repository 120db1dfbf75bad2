"""Notebook output: trajectories in inert frames, and figures as pictures."""

from __future__ import annotations

import html
import re

from coa_jax.protocol.tokenizer_training import train_tokenizer
from coa_jax.protocol.trajectory import Author, Segment, Trajectory
from coa_jax.report import notebook, plots


def made(text: str) -> tuple[Trajectory, object]:
  """A trajectory (question, thought, observation) and its tokenizer."""
  segments = [
    Segment(Author.PROMPT, "question", "What is 6 * 7?"),
    Segment(Author.POLICY, "think", text),
    Segment(Author.TOOL, "observation", "42"),
  ]
  tokenizer = train_tokenizer([s.text for s in segments] * 4, 512)
  trajectory = Trajectory("1", segments)
  tokenizer.encode_trajectories([trajectory])
  segments[1].logps = [-1.0] * len(segments[1].ids)
  return trajectory, tokenizer


def page_of(shown: notebook.Shown) -> str:
  """The page inside the frame."""
  markup = shown._repr_html_()
  assert markup.count("<iframe") == 1 and 'sandbox="allow-scripts"' in markup
  return html.unescape(re.search(r'srcdoc="([^"]*)"', markup)[1])


def test_every_token_is_shown_once_with_what_is_known_of_it():
  trajectory, tokenizer = made("six times seven, \u00e9")
  page = page_of(notebook.stream(trajectory, tokenizer))
  tokens = re.findall(r'<i title="id (\d+)(, probability 0\.368)?">', page)
  ids = [(str(i), bool(s.logps)) for s in trajectory.segments for i in s.ids]
  assert [(i, bool(known)) for i, known in tokens] == ids
  # Tokens given to the model have no background.
  assert page.count(' given"') == 2
  assert re.search(r'<p class="r-think">', page)


def test_text_of_a_model_is_inert():
  trajectory, tokenizer = made("<script>alert(1)</script><img src=x>")
  for shown in (
    notebook.stream(trajectory, tokenizer),
    notebook.viewer({"a": [trajectory]}, tokenizer=tokenizer),
  ):
    page = page_of(shown)
    assert "<img" not in page and "alert(1)</script>" not in page
    assert "Content-Security-Policy" in page


def test_a_figure_is_a_picture_and_what_is_stored_of_a_page_is_stored_once():
  rows = [{"step": i, "loss": 1.0 / (i + 1)} for i in range(3)]
  shown = notebook.figure(plots.curves(rows, {"loss": {"loss": "x"}}))
  assert shown._repr_png_().startswith(b"\x89PNG") and len(repr(shown)) < 80
  trajectory, tokenizer = made("thought")
  assert len(repr(notebook.stream(trajectory, tokenizer))) < 80
