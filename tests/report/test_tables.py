"""One table, three renderings."""

from __future__ import annotations

import io

import pytest
import rich.console

from coa_jax.report.tables import Table, cell, html_table, markdown_table, rich_table

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
  ],
)
def test_cell(value, text):
  assert cell(value) == text


def test_renderings_escape_what_would_be_markup():
  assert markdown_table(TABLE.rows, TABLE.columns) == (
    "| model | pass@1 |\n| :-- | --: |\n| a\\|b [red] | 0.500 |\n| <script> | - |\n"
  )
  console = rich.console.Console(width=60, record=True, file=io.StringIO())
  console.print(rich_table(TABLE))
  text = console.export_text()
  assert "a|b [red]" in text and "a note" in text
  text = html_table(TABLE)
  assert "&lt;script&gt;" in text and "Models &lt;b&gt;" in text
  assert "<script" not in text and "a note" in text
