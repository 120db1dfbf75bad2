"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted(pathlib.Path("experiments/colabs").glob("*.ipynb"))


def read(path: pathlib.Path) -> nbformat.NotebookNode:
  """Reads a notebook."""
  return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: pathlib.Path):
  notebook = read(path)
  assert not any(cell.get("outputs") for cell in notebook.cells), "clear its outputs"
  for cell in notebook.cells:
    cell.source = cell.source.replace("\nTINY = False\n", "\nTINY = True\n")
  # As Jupyter begins it: in the notebook's folder.
  done = nbclient.NotebookClient(notebook, timeout=900).execute(cwd=path.parent)
  assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")


def test_notebooks_install_the_package_in_the_same_way():
  first = set()
  for path in NOTEBOOKS:
    first.add(next(c.source for c in read(path).cells if c.cell_type == "code"))
  assert len(first) == 1
