"""A fixture that writes task files."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def write(tmp_path):
  """Writes rows as JSON lines to the named file; returns its path."""

  def write_rows(name: str, rows: list) -> str:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

  return write_rows
