"""The notebooks run from their first cell to their last, and have stored outputs."""

from __future__ import annotations

import json
import pathlib
import re

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted(pathlib.Path("experiments/colabs").glob("*.ipynb"))
# The full notebook takes ten minutes; the tiny one teaches the model nothing.
NOT_STORED = "sft_and_rl"


def read(path: pathlib.Path) -> nbformat.NotebookNode:
  """Reads a notebook."""
  return nbformat.read(path, as_version=4)


def run(path: pathlib.Path, changes: dict[str, str]) -> nbformat.NotebookNode:
  """Runs a notebook with changed text, in its own folder like Jupyter."""
  notebook = read(path)
  for cell in notebook.cells:
    for old, new in changes.items():
      cell.source = cell.source.replace(old, new)
  return nbclient.NotebookClient(notebook, timeout=900).execute(cwd=path.parent)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[pathlib.Path, nbformat.NotebookNode]:
  """A folder with tiny runs, and the executed notebook that made them."""
  folder = tmp_path_factory.mktemp("trained")
  changes = {
    "\nTINY = False\n": "\nTINY = True\n",
    "tempfile.mkdtemp()": repr(str(folder)),
  }
  (path,) = [path for path in NOTEBOOKS if path.stem == NOT_STORED]
  return folder, run(path, changes)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: pathlib.Path, trained):
  folder, done = trained
  if path.stem != NOT_STORED:
    done = run(path, {'"runs/quickstart/rl"': repr(f"{folder}/rl")})
  assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")
  # The first output is not a library's warning.
  (first, *_) = [cell for cell in done.cells if cell.get("outputs")]
  assert [out for out in first.outputs if out.get("name") == "stderr"] == []
  if path.stem != NOT_STORED:
    assert pictures_of(done) == pictures_of(read(path))


def pictures_of(notebook: nbformat.NotebookNode) -> list[tuple[int, set[str]]]:
  """(cell number, MIME types) for each cell with rich output."""
  out = []
  for number, cell in enumerate(notebook.cells):
    types = {t for o in cell.get("outputs", ()) if "data" in o for t in o.data}
    if types:
      out.append((number, types))
  return out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stored(path: pathlib.Path):
  """Sites that render notebooks can show results, because the outputs are stored.

  After a change: jupyter execute --inplace experiments/colabs/NAME.ipynb
  """
  cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
  if path.stem == NOT_STORED:
    assert not any(cell.outputs for cell in cells)
    return
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  outputs = [out for cell in cells for out in cell.outputs]
  assert any("image/png" in out.get("data", ()) for out in outputs)
  assert not any(out.output_type == "error" for out in outputs)
  assert path.stat().st_size < 320_000
  text = json.dumps(outputs)
  assert not re.search(r"/(tmp|home|root|work|Users)/", text), "a path of a machine"


def test_notebooks_install_the_package_in_the_same_way():
  first = set()
  for path in NOTEBOOKS:
    first.add(next(c.source for c in read(path).cells if c.cell_type == "code"))
  assert len(first) == 1
