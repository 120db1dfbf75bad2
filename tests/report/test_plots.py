"""Figures draw, are reproducible, and leave pyplot alone."""

from __future__ import annotations

import xml.etree.ElementTree

import forked
import pytest
import samples
from matplotlib.figure import Figure
from samples import MULTI, SINGLE

from coa_jax.report import cost, plots, scores

ROWS = [
  {"step": i, "loss": 2 / i, "accuracy": None if i % 2 else 0.5} for i in range(1, 60)
]


BEFORE = [samples.trajectory(str(i), right=i % 2 == 0) for i in range(6)]
PANELS = {"loss": {"loss": "train"}, "accuracy": {"accuracy": "a", "loss": "b"}}


def bars() -> Figure:
  summary = scores.summary(BEFORE, [])
  return plots.score_bars({"rl": summary, "sft": summary}, {"pass1_greedy": "p"})


def lengths(after: int) -> Figure:
  before = plots.Statistics.of(BEFORE, tokens=False)
  left = plots.Statistics.of(BEFORE[:after], tokens=False)
  return plots.filter_statistics(before, left)


# One figure of each kind.
FIGURES = {
  "curves": lambda: plots.curves(ROWS, PANELS),
  "bars": bars,
  "cost": lambda: plots.cost_bars(cost.cost(MULTI, SINGLE)),
  "unsolved": lambda: plots.cost_bars(cost.cost(MULTI, SINGLE[1:])),
  "filter": lambda: lengths(2),
  "empty": lambda: lengths(0),
  "funnel": lambda: plots.funnel_bars({"a": (3, {"wrong": 2}), "reflection": (3, {})}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_svg_is_inline_reproducible_and_takes_the_pages_colours(name):
  text = plots.to_svg(FIGURES[name]())
  again = FIGURES[name]()
  assert text == plots.to_svg(again)
  assert plots.to_png(again, dpi=40).startswith(b"\x89PNG")
  assert text.startswith("<svg")
  xml.etree.ElementTree.fromstring(text)
  assert "currentColor" in text
  assert "var(--figure-0, #0072B2)" in text
  assert "<metadata" not in text


def test_a_missing_metric_is_named():
  with pytest.raises(ValueError, match="no row has metric 'reward'"):
    plots.curves(ROWS, {"reward": {"reward": "r"}})


def test_statistics_leave_the_prompt_out():
  two = [samples.trajectory(), samples.trajectory()]
  one = plots.Statistics.of(two, tokens=False)
  means = one.means()
  assert means["think"] == 4
  assert means["observation"] == 1
  assert "question" not in means
  assert one.summary()["characters"]["p50"] == len(two[0].text)
  assert plots.Statistics().means() == {}
  assert plots.Statistics().summary()["trajectories"] == 0


def test_a_funnel_tells_its_counts_and_most_frequent_reasons():
  reasons = {"wrong_answer": 2, "b": 1, "a": 1, "c": 1}
  text = plots.to_svg(plots.funnel_bars({"quality": (3, reasons), "all": (3, {})}))
  assert "3 kept; wrong_answer 2, a 1, b 1, 1 more" in text


def test_pyplot_is_never_imported(tmp_path):
  """Not by the interpreter of `forked`, which imports every stage and report."""
  program = tmp_path / "program.py"
  program.write_text("import sys; print('matplotlib.pyplot' in sys.modules)")
  assert forked.run(str(program)).stdout.strip() == "False"


def test_a_smoothed_line_begins_and_ends_where_the_points_do():
  rows = [{"step": i, "loss": 7.0 / (i + 1)} for i in range(400)]
  figure = plots.curves(rows, {"nats": {"loss": "loss"}}, logarithmic=("nats",))
  (axis,) = figure.axes
  raw, mean = (line.get_ydata() for line in axis.lines)
  assert mean[0] == raw[0] and mean[-1] == pytest.approx(raw[-1])
  assert axis.get_yscale() == "log"


def test_an_axis_with_zeros_is_not_logarithmic():
  rows = [{"step": i, "loss": float(i)} for i in range(3)]
  figure = plots.curves(rows, {"nats": {"loss": "loss"}}, logarithmic=("nats",))
  assert figure.axes[0].get_yscale() == "linear"
