"""Every config field is set by a shipped config, a program or a documented recipe.

What nobody sets is a constant beside its use.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import runpy

import option_settings as settings
import pytest
from option_settings import Path
from test_configs import CLASSES, FILES, ROOT

from coa_jax.learner.algorithms import PRESETS
from coa_jax.runtime.fields import section

PROGRAMS = (
  "coa_jax/cli/**/*.py",
  "experiments/**/*.py",
)
# A model's architecture, which its folder's config.json states: no options of a run.
ARCHITECTURE = ("ModelConfig", "Yarn", "Llama3Rope")
PAGES = (
  "README.md",
  "docs/*.md",
  "experiments/README.md",
  "experiments/colabs/*.ipynb",
  "tools_sandbox/README.md",
)
LISTS = ("config.md", "metrics.md")  # generated; they name fields and set none


@functools.cache
def set_somewhere() -> frozenset[Path]:
  """The paths of all settings outside tests."""
  out: set[Path] = set(settings.by_values(PRESETS))
  for file in FILES:
    get_config = runpy.run_path(str(file))["get_config"]
    for arg in ("", "web", "mhqa", "math"):
      try:
        out |= set(settings.by_values(get_config(arg).to_dict()))
      except ValueError:  # not an argument of this config
        assert arg
  for pattern in (*PROGRAMS, *PAGES):
    files = [f for f in sorted(ROOT.glob(pattern)) if f.name not in LISTS]
    assert files, pattern
    for file in files:
      out |= set(settings.by_file(file))
  return frozenset(out)


def test_every_field_is_set_somewhere():
  fields = list(itertools.chain(*map(settings.options, CLASSES.values())))
  assert len({(f.owner, f.path[-1]) for f in fields}) > 200
  fields = [field for field in fields if field.owner not in ARCHITECTURE]
  missing = settings.unset(fields, set_somewhere())
  assert not missing, f"make these constants, or document their use: {missing}"


@dataclasses.dataclass(frozen=True)
class PartConfig:
  """A section."""

  set_by_value: int = 0
  set_in_a_page: int = 0
  set_in_python: int = 0
  made_up_and_unused: int = 0


@dataclasses.dataclass(frozen=True)
class WholeConfig:
  """A config with sections by name."""

  part: PartConfig = section(PartConfig)
  parts: dict[str, PartConfig] = dataclasses.field(default_factory=dict)
  top: int = 0


def test_a_field_that_nothing_sets_is_found(tmp_path: pathlib.Path):
  page = tmp_path / "page.md"
  page.write_text(
    "Set `part.set_in_a_page`.\n```python\nconfig.parts = dict(a=dict(set_in_python=1))"
    "\nconfig.top = 1\n```\nmade_up_and_unused other.made_up_and_unused\n"
  )
  found = {*settings.by_values({"part": {"set_by_value": 1}}), *settings.by_file(page)}
  assert settings.unset(settings.options(WholeConfig), found) == [
    "PartConfig.made_up_and_unused"
  ]
  everywhere = {*found, *set_somewhere()}
  fields = settings.options(WholeConfig)
  assert settings.unset(fields, everywhere) == ["PartConfig.made_up_and_unused"]


@pytest.mark.parametrize(
  "code",
  [
    "config.algo.loss.clip = 1",
    "config['loss'].clip = 1",
    "config.algo.loss = dict(clip=1)",
    "run(config.algo, loss={'clip': 1})",
    "config.loss.update(clip=1)",
    "x = LossConfig(clip=1)",
    "flags = ['--config.algo.loss.clip=1']",
  ],
)
def test_the_ways_to_set_a_field(tmp_path: pathlib.Path, code: str):
  file = tmp_path / "x.py"
  file.write_text(code)
  field = settings.Option("LossConfig", ("algo", "loss", "clip"), "LossConfig")
  assert settings.unset([field], settings.by_file(file)) == []
  other = dataclasses.replace(field, owner="A", reader="A", path=("algo", "b", "clip"))
  assert settings.unset([other], settings.by_file(file)) == ["A.clip"]
