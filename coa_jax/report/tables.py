"""Tables: one description, shown as markdown, on a terminal, or as HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table
import rich.text


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows and what to show of them.

  Attributes:
    title: what the table says.
    rows: one mapping per row.
    columns: key of a row -> column heading, in order.
    note: what a reader must know beside it.
  """

  title: str
  rows: Sequence[Mapping[str, Any]]
  columns: Mapping[str, str]
  note: str = ""


def cell(value: Any) -> str:
  """Writes a value as people read it: 1,234; 0.873; -; [low, high] as `low to high`."""
  if value is None:
    return "-"
  if isinstance(value, bool | str):
    return str(value)
  if isinstance(value, list | tuple):
    return " to ".join(map(cell, value))
  # Three digits that matter are enough to compare by eye.
  if isinstance(value, int) or abs(value) >= 1000:
    return f"{value:,.0f}"
  if abs(value) >= 10:
    return f"{value:.1f}"
  return f"{value:.3f}"


def markdown_table(
  rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> str:
  """Writes a GitHub table; the first column is left-aligned, others right-aligned."""
  # The rule under the headings says how columns are aligned.
  rules = [":--"] + ["--:"] * (len(columns) - 1)
  lines = [list(columns.values()), rules]
  for row in rows:
    # A bar would end the cell.
    lines.append([cell(row.get(key)).replace("|", "\\|") for key in columns])
  out = ""
  for cells in lines:
    out += "| " + " | ".join(cells) + " |\n"
  return out


def rich_table(table: Table) -> rich.table.Table:
  """Makes a table for a terminal; print it with `rich.print`."""
  out = rich.table.Table(title=table.title, caption=table.note or None)
  first, *others = table.columns.values()
  out.add_column(first, justify="left", overflow="fold")  # a name is never cut
  for heading in others:
    out.add_column(heading, justify="right")
  for row in table.rows:
    # Text objects, for rich reads [word] in a string as markup.
    out.add_row(*(rich.text.Text(cell(row.get(key))) for key in table.columns))
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
