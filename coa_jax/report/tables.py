"""Tables: one description, shown as markdown, on a terminal, or as HTML."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import rich.cells
import rich.console
import rich.table
import rich.text


@dataclasses.dataclass(frozen=True)
class Table:
  """A table's rows and columns; `rich.print` shows it.

  On a terminal cells wrap between words. Columns that still do not fit go into further
  tables below; each repeats the first column.

  `columns`: row key -> column heading, in order.
  """

  title: str
  rows: Sequence[Mapping[str, Any]]
  columns: Mapping[str, str]
  note: str = ""

  def __rich_console__(
    self, console: rich.console.Console, options: rich.console.ConsoleOptions
  ) -> rich.console.RenderResult:
    """Yields the title, the parts and the note, each at the console's width."""
    columns = []
    for key, heading in self.columns.items():
      columns.append([heading, *(cell(row.get(key)) for row in self.rows)])
    yield rich.text.Text(self.title, "bold")
    for part in _parts(columns, options.max_width):
      yield _fitted(part, options.max_width)
    if self.note:
      yield rich.text.Text(self.note, "italic dim")


def cell(value: Any) -> str:
  """Writes a value as people read it: 1,234; 0.873; -; [low, high] as `low to high`."""
  if value is None:
    return "-"
  if isinstance(value, bool | str):
    return str(value)
  if isinstance(value, list | tuple):
    known = any(one is not None for one in value)
    return " to ".join(map(cell, value)) if known else "-"
  # Three significant digits suffice to compare by eye.
  if isinstance(value, int) or abs(value) >= 1000:
    return f"{value:,.0f}"
  if abs(value) >= 10:
    return f"{value:.1f}"
  return f"{value:.3f}"


def markdown_table(
  rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> str:
  """Writes a GitHub table; the first column is left-aligned, others right-aligned."""
  # The rule under the headings sets the columns' alignment.
  rules = [":--"] + ["--:"] * (len(columns) - 1)
  lines = [list(columns.values()), rules]
  for row in rows:
    # A bar would end the cell.
    lines.append([cell(row.get(key)).replace("|", "\\|") for key in columns])
  out = ""
  for cells in lines:
    out += "| " + " | ".join(cells) + " |\n"
  return out


_WORD = re.compile(r"\([^)]{1,20}\)|\S+")
# A column's padding and its border to the right.
_BORDER = 3


def _parts(columns: list[list[str]], width: int) -> list[list[list[str]]]:
  """Splits columns evenly into as few tables as fit; each repeats the first column."""
  first, *others = columns
  for size in range(len(others), 1, -1):
    parts = [[first, *others[i : i + size]] for i in range(0, len(others), size)]
    if all(sum(map(_narrowest, part)) <= _room(part, width) for part in parts):
      return parts
  return [[first, one] for one in others] or [[first]]


def _room(columns: list[list[str]], width: int) -> int:
  """Returns the number of characters for cells in a table of this width."""
  return width - _BORDER * len(columns) - 1


def _narrowest(column: list[str]) -> int:
  """Returns a column's longest word length; an interval in parentheses is one word."""
  words = [word for text in column for word in _WORD.findall(text)]
  return max(map(rich.cells.cell_len, words), default=0)


def _fitted(columns: list[list[str]], width: int) -> rich.table.Table:
  """Makes one table; columns fit their longest words, then get spare room in order."""
  room = _room(columns, width)
  widths = [min(_narrowest(column), room) for column in columns]
  for i, column in enumerate(columns):
    whole = max(map(rich.cells.cell_len, column))
    widths[i] = max(1, min(whole, widths[i] + room - sum(widths)))
  out = rich.table.Table()
  for i, (heading, *_) in enumerate(columns):
    justify = "right" if i else "left"
    out.add_column(
      rich.text.Text(heading), justify=justify, width=widths[i], overflow="fold"
    )
  for row in list(zip(*columns, strict=True))[1:]:
    # Text objects, for rich reads [word] in a string as markup.
    out.add_row(*map(rich.text.Text, row))
  return out


def html_table(table: Table) -> str:
  """Writes the table as HTML, every cell escaped."""
  head = ""
  for heading in table.columns.values():
    head += f"<th>{html.escape(heading)}</th>"
  body = ""
  for row in table.rows:
    body += "<tr>"
    for key in table.columns:
      body += f"<td>{html.escape(cell(row.get(key)))}</td>"
    body += "</tr>"
  note = ""
  if table.note:
    note = f'<p class="note">{html.escape(table.note)}</p>'
  return (
    f"<figure><figcaption>{html.escape(table.title)}</figcaption>"
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
    f"<tbody>{body}</tbody></table></div>{note}</figure>"
  )
