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
  if isinstance(value, int) or abs(value) >= 1000:
    return f"{value:,.0f}"
  return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def markdown_table(
  rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> str:
  """Writes a GitHub table; the first column is left-aligned, others right-aligned."""
  lines = [
    "| " + " | ".join(columns.values()) + " |",
    "|" + "|".join(" :-- " if i == 0 else " --: " for i in range(len(columns))) + "|",
  ]
  for row in rows:
    cells = (cell(row.get(key)).replace("|", "\\|") for key in columns)
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"


def rich_table(table: Table) -> rich.table.Table:
  """Makes a table for a terminal; print it with `rich.print`."""
  out = rich.table.Table(title=table.title, caption=table.note or None)
  for i, heading in enumerate(table.columns.values()):
    out.add_column(heading, justify="left" if i == 0 else "right")
  for row in table.rows:
    # Text objects, for rich reads [word] in a string as markup.
    out.add_row(*(rich.text.Text(cell(row.get(key))) for key in table.columns))
  return out


def html_table(table: Table) -> str:
  """Writes the table as HTML, every cell escaped."""
  head = "".join(f"<th>{html.escape(h)}</th>" for h in table.columns.values())
  body = "".join(
    "<tr>"
    + "".join(f"<td>{html.escape(cell(row.get(key)))}</td>" for key in table.columns)
    + "</tr>"
    for row in table.rows
  )
  note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
  return (
    f"<figure><figcaption>{html.escape(table.title)}</figcaption>"
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
    f"<tbody>{body}</tbody></table></div>{note}</figure>"
  )
