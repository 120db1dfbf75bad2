"""Figures draw, are reproducible, and leave pyplot alone."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree

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


# One of each kind.
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


def test_pyplot_is_never_imported():
  program = (
    "import sys, coa_jax.report.viewer; print('matplotlib.pyplot' in sys.modules)"
  )
  out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert out.stdout.strip() == "False", out.stderr


def test_seed_points_have_a_mark_for_each_seed_an_interval_and_the_first_mean():
  row = {"mean": 0.5, "ci95": [0.4, 0.7], "by_seed": {0: 0.4, 1: 0.6, 2: None}}
  none = {"mean": None, "ci95": None, "by_seed": {0: None}}
  figure = plots.seed_points(
    {"full": {"a": row, "b": row}, "none": {"a": none, "b": row}}, {"a": "A", "b": "B"}
  )
  left, right = figure.axes
  assert [t.get_text() for t in left.get_yticklabels()] == ["full", "none"]
  assert (left.get_xlabel(), right.get_xlabel()) == ("A", "B")
  seeds = [list(x.get_xdata()) for x in left.lines if x.get_marker() == "|"]
  assert [0.4, 0.6] in seeds
  for axis, rows in ((left, [0]), (right, [0, 1])):  # without a mean, no point
    assert [x.get_ydata()[0] for x in axis.lines if x.get_marker() == "o"] == rows
  dashed = [x for x in left.lines if x.get_linestyle() == "--"]
  assert len(dashed) == 1 and set(dashed[0].get_xdata()) == {0.5}
  (bar,) = [c for c in left.collections]
  assert [list(p) for p in bar.get_segments()[0]] == [[0.4, 0.0], [0.7, 0.0]]


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
