"""Every config builds, and every field of it is read."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import runpy

import ml_collections
import pytest

from coa_jax.config import section
from coa_jax.model.hf.io import LoadConfig

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("[!_]*.py"))
EACH = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)


# Programs with configs of their own, and where the sections of those are read.
PROGRAMS = {
  "studies.tool_formats": ["coa_jax.evaluate", "experiments.studies.tool_formats"],
  "select_tasks": ["coa_jax.evaluate", "experiments.select_tasks"],
  "synthesize": ["experiments.synthesize"],
}


def journey_of(path: pathlib.Path) -> str:
  """The journey that the config's docstring runs it with, by its first command."""
  doc = ast.get_docstring(ast.parse(path.read_text())) or ""
  commands = re.findall(
    rf"python -m experiments\.([\w.]+)\s+(?:\\\n\s*)?--config=configs/{path.stem}\.py",
    doc,
  )
  assert commands, f"{path.name} does not open with its command"
  return commands[0]


def readers(journey: str) -> dict[str, list[type]]:
  """Section -> the dataclasses that the journey's source reads it into."""
  names = [f"coa_jax.{journey}"]
  if journey in PROGRAMS:
    names = PROGRAMS[journey]
  out: dict[str, list[type]] = {}
  for module in map(importlib.import_module, names):
    for node in ast.walk(ast.parse(pathlib.Path(module.__file__).read_text())):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == "section":
        name, cls = ast.literal_eval(node.args[1]), ast.unparse(node.args[2])
        found = out.setdefault(name, [])
        if getattr(module, cls) not in found:
          found.append(getattr(module, cls))
  return out


@EACH
@pytest.mark.parametrize("arg", ["", "tiny"])
def test_every_field_of_a_config_is_read(path: pathlib.Path, arg: str):
  config = runpy.run_path(str(path))["get_config"](arg)
  assert isinstance(config, ml_collections.ConfigDict)
  journey = journey_of(path)
  read = readers(journey)
  for name, value in config.items():
    if name not in read:  # a model folder, or "" for none
      assert name == "init" and isinstance(value, str)
      continue
    classes = read[name]
    if len(classes) > 1:  # a folder's model, or an architecture of its own
      own = not config.get("init")
      (cls,) = [c for c in classes if (c is not LoadConfig) == own]
    else:
      (cls,) = classes
    given = {"vocab_size": 1} if cls.__name__ == "ModelConfig" else {}
    whole = ml_collections.ConfigDict({name: {**given, **value}})
    assert section(whole, name, cls) is not None


@EACH
def test_tiny_is_smaller_and_other_arguments_are_refused(path: pathlib.Path):
  get_config = runpy.run_path(str(path))["get_config"]
  assert get_config("tiny").to_dict() != get_config("").to_dict()
  with pytest.raises(ValueError, match=rf"{path.stem}.*'huge'"):
    get_config("huge")


@EACH
def test_a_config_opens_with_what_to_expect(path: pathlib.Path):
  doc = ast.get_docstring(ast.parse(path.read_text()))
  assert "Expect" in doc


def test_there_are_configs_for_every_journey():
  journeys = {journey_of(path) for path in FILES}
  assert journeys == {"distill", "sft", "rl", "evaluate", *PROGRAMS}


def test_an_algorithm_has_a_tiny_form_too():
  get_config = runpy.run_path(str(ROOT / "configs" / "rl_world.py"))["get_config"]
  whole, tiny = get_config("gspo"), get_config("gspo:tiny")
  assert tiny.algo.steps == get_config("tiny").algo.steps < whole.algo.steps
  small = get_config("tiny")
  assert tiny.algo.loss == whole.algo.loss != small.algo.loss
  for wrong in ("gspo:", "gspotiny", "tiny:gspo", ":tiny", "gspo:huge"):
    with pytest.raises(ValueError, match="rl_world answers"):
      get_config(wrong)
