"""The notebook runs from its first cell to its last."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted(pathlib.Path("experiments/colabs").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: pathlib.Path):
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get("outputs") for cell in notebook.cells), "clear its outputs"
  done = nbclient.NotebookClient(notebook, timeout=600).execute(cwd=".")
  assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")
