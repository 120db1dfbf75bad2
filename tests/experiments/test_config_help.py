"""--config.help and docs/config.md match the dataclasses."""

from __future__ import annotations

import forked
import pytest
from forked import ROOT

from coa_jax.cli.config_help import (
  CONFIGS,
  explain,
  list_fields,
  read_class,
  reference,
)
from coa_jax.plan.rl import RLConfig
from coa_jax.runtime.config import ConfigError


def test_the_page_is_that_of_the_dataclasses():
  page = (ROOT / "docs" / "config.md").read_text()
  assert page == reference() + "\n", (
    "run: coa rl --config.help=markdown > docs/config.md"
  )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_has_a_meaning(name: str):
  fields = list_fields(read_class(name))
  assert [field.path for field in fields if not field.meaning] == []


def test_a_field_is_explained_with_the_value_of_the_file():
  text = explain(RLConfig, "algo.batch", {"algo": {"batch": {"rows": 3}}})
  assert "algo.batch.rows: int, at least 1 = 3 (default 16)\n      rows per" in text
  assert "algo.batch.epochs: int, at least 1 = 1\n" in text
  assert "algo.loss" not in text
  assert "algo.steps: int, at least 1 (required)" in explain(RLConfig, "", {})


def test_a_section_by_a_name_of_ones_own_is_explained():
  text = explain(RLConfig, "tools.functions", {})
  assert "tools.functions.NAME.description: str" in text


def test_a_misspelt_field_is_refused_with_the_nearest():
  with pytest.raises(ConfigError, match=r"did you mean 'algo.loss.clip_low'\?"):
    explain(RLConfig, "algo.loss.clp_low", {})


@pytest.mark.slow
def test_a_launcher_explains_its_config_without_a_workdir():
  flags = ("--config.help=algo.sampling", "--config=configs/rl_world.py:tiny")
  done = forked.run("experiments.rl", *flags)
  assert done.returncode == 0, done.stderr
  assert "algo.sampling.prompts: int, at least 1 = " in done.stdout
