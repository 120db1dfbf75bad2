"""Every config builds, and its program reads all its fields."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import runpy

import pytest

from coa_jax.cli.select_tasks import SelectTasksConfig
from coa_jax.cli.synthesize import SynthesizeConfig
from coa_jax.distill import DistillConfig
from coa_jax.evaluate import EvaluateConfig
from coa_jax.plan.rl import RLConfig
from coa_jax.plan.sft import SFTConfig
from coa_jax.runtime.config import as_json, fill_defaults, read_config

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("[!_]*.py"))
EACH = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)


# Stage -> the dataclass for its config.
CLASSES = {
  "distill": DistillConfig,
  "sft": SFTConfig,
  "rl": RLConfig,
  "evaluate": EvaluateConfig,
  "tasks": SelectTasksConfig,
  "synthesize": SynthesizeConfig,
}


def journey_of(path: pathlib.Path) -> str:
  """Returns the stage in the first command of the config's docstring."""
  doc = ast.get_docstring(ast.parse(path.read_text())) or ""
  commands = re.findall(
    rf"python -m experiments\.([\w.]+)\s+(?:\\\n\s*)?--config=configs/{path.stem}\.py",
    doc,
  )
  assert commands, f"{path.name} does not open with its command"
  return commands[0]


@EACH
@pytest.mark.parametrize("arg", ["", "tiny"])
def test_a_config_is_read_and_its_defaults_can_be_written_out(path, arg: str):
  check_read(path, arg)


@pytest.mark.parametrize("path", [p for p in FILES if '"cpu"' in p.read_text()])
def test_a_form_for_a_cpu_is_read(path: pathlib.Path):
  check_read(path, "cpu")


def check_read(path: pathlib.Path, arg: str) -> None:
  config = runpy.run_path(str(path))["get_config"](arg)
  cls = CLASSES[journey_of(path)]
  settings = read_config(config, cls)
  fill_defaults(config, cls)
  assert read_config(config, cls) == settings
  again = json.loads(json.dumps(as_json(settings)))
  assert read_config(again, cls) == settings


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
  assert journeys == set(CLASSES)


def test_an_algorithm_has_a_tiny_form_too():
  get_config = runpy.run_path(str(ROOT / "configs" / "rl_world.py"))["get_config"]
  whole, tiny = get_config("gspo"), get_config("gspo:tiny")
  assert tiny.algo.steps == get_config("tiny").algo.steps < whole.algo.steps
  small = get_config("tiny")
  assert tiny.algo.loss == whole.algo.loss != small.algo.loss
  for wrong in ("gspo:", "gspotiny", "tiny:gspo", ":tiny", "gspo:huge"):
    with pytest.raises(ValueError, match="rl_world answers"):
      get_config(wrong)
