"""Every config field is set by a shipped config, a program or a documented recipe.

A field that nobody sets should be a constant beside its use.
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

PROGRAMS = (
  "coa_jax/cli/**/*.py",
  "experiments/**/*.py",
)
# Model architecture, read from the model folder's config.json: not run options.
ARCHITECTURE = ("ModelConfig", "Yarn", "Llama3Rope", "DeltaNet")
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
  """Returns the paths of all settings outside tests."""
  out: set[Path] = set(settings.by_values(PRESETS))
  for file in FILES:
    get_config = runpy.run_path(str(file))["get_config"]
    for arg in ("", "web", "mhqa", "math"):
      try:
        out |= set(settings.by_values(get_config(arg).to_dict()))
      except ValueError:  # the config does not accept this argument
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


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("x.py", "config.algo.loss.clip = 1"),
    ("x.py", "config['loss'].clip = 1"),
    ("x.py", "config.algo.loss = dict(clip=1)"),
    ("x.py", "run(config.algo, loss={'clip': 1})"),
    ("x.py", "config.loss.update(clip=1)"),
    ("x.py", "x = LossConfig(clip=1)"),
    ("x.py", "flags = ['--config.algo.loss.clip=1']"),
    ("x.md", "Set `loss.clip`, not b or clip."),
    ("x.md", "```python\nconfig.algo = dict(loss=dict(clip=1))\n```"),
  ],
)
def test_the_ways_to_set_a_field(tmp_path: pathlib.Path, name: str, text: str):
  file = tmp_path / name
  file.write_text(text)
  field = settings.Option("LossConfig", ("algo", "loss", "clip"), "LossConfig")
  assert settings.unset([field], settings.by_file(file)) == []
  other = dataclasses.replace(field, owner="A", reader="A", path=("algo", "b", "clip"))
  assert settings.unset([other], settings.by_file(file)) == ["A.clip"]
