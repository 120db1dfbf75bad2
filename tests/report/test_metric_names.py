"""The table of metrics is the source of the docs page and the dashboards' tags."""

from __future__ import annotations

import pathlib

from coa_jax.report import metric_names


def test_the_docs_page_is_the_table():
  page = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"
  assert page.read_text() == metric_names.markdown()


def test_names_have_one_row_and_a_known_section():
  names = [m.name for m in metric_names.METRICS]
  assert len(names) == len(set(names))
  assert {m.section for m in metric_names.METRICS} == set(metric_names.SECTIONS)


def test_tags():
  for name, section in {
    "loss": "policy",
    "entropy_think": "policy",
    "seconds_decode": "time",
    "step_tokens_per_second": "time",
    "failed_calls_tool": "health",
    "part_of_my_own": "reward",
  }.items():
    assert metric_names.tag(name) == f"{section}/{name}"
