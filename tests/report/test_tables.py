"""One table, three renderings."""

from __future__ import annotations

import io

import pytest
import rich.console

from coa_jax.report.tables import Table, cell, html_table, markdown_table

TABLE = Table(
  "Models <b>",
  [{"m": "a|b [red]", "x": 0.5}, {"m": "<script>", "x": None, "unused": 1}],
  {"m": "model", "x": "pass@1"},
  "a note",
)


@pytest.mark.parametrize(
  ("value", "text"),
  [
    (None, "-"),
    (1234567, "1,234,567"),
    (1234.6, "1,235"),
    (0.12345, "0.123"),
    (88.06, "88.1"),
    (-0.5, "-0.500"),
    (True, "True"),
    ([0.1, None], "0.100 to -"),
    ([None, None], "-"),
  ],
)
def test_cell(value, text):
  assert cell(value) == text


def test_renderings_escape_what_would_be_markup():
  assert markdown_table(TABLE.rows, TABLE.columns) == (
    "| model | pass@1 |\n| :-- | --: |\n| a\\|b [red] | 0.500 |\n| <script> | - |\n"
  )
  console = rich.console.Console(width=60, record=True, file=io.StringIO())
  console.print(TABLE)
  text = console.export_text()
  assert "a|b [red]" in text and "a note" in text
  text = html_table(TABLE)
  assert "&lt;script&gt;" in text and "Models &lt;b&gt;" in text
  assert "<script" not in text and "a note" in text


def printed(table: Table, width: int) -> str:
  """The table in a terminal of this width."""
  console = rich.console.Console(width=width, record=True, file=io.StringIO())
  console.print(table)
  return console.export_text()


WIDE = Table(
  "A title of several words",
  [{"name": "RL, tools off", **{f"f{i}": "0.500 (0.400-0.600)" for i in range(9)}}],
  {"name": "", **{f"f{i}": f"heading-{i} completion" for i in range(9)}},
  "A note.",
)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 400])
def test_no_word_is_broken_at_any_width(width):
  text = printed(WIDE, width)
  assert max(map(len, text.splitlines())) <= width
  for i in range(9):
    assert f"heading-{i}" in text
  assert text.count("completion") == text.count("(0.400-0.600)") == 9
  assert "\u2026" not in text


def test_columns_that_do_not_fit_go_below_with_the_first_column_again():
  assert printed(WIDE, 400).count("RL, tools off") == 1
  assert printed(WIDE, 80).count("RL, tools") == 3


def test_a_word_longer_than_the_terminal_is_folded_and_whole():
  path = "x" * 50
  text = printed(Table("t", [{"a": path, "b": 1}], {"a": "path", "b": "n"}), 30)
  assert text.count("x") == 50 and max(map(len, text.splitlines())) <= 30
