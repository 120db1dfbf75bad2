"""Figures of a report, as matplotlib Figure objects (no pyplot, no global state).

`to_svg` gives inline SVG that takes text colour and font from the page around it, so
one figure serves light and dark pages; `to_png` gives bytes for pages that cannot.
Colours are Okabe and Ito's, which colour-blind readers can tell apart.

budget: all figures of a report have one look.
"""

from __future__ import annotations

import array
import collections
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.report import timers
from coa_jax.report.cost import MULTI, SINGLE

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Stands for the page's own text colour until `to_svg` replaces it.
_INK = "#010203"
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_STYLE = {
  "svg.fonttype": "none",
  "svg.hashsalt": "coa_jax",  # equal figures are equal bytes
  "font.family": "sans-serif",
}


def curves(
  rows: Sequence[Mapping[str, Any]],
  panels: Mapping[str, Mapping[str, str]],
  xlabel: str = "step",
) -> Figure:
  """Draws metrics over steps, one panel per y label.

  Args:
    rows: `read_metrics`' rows; a metric may be missing (None or absent) in some.
    panels: y label -> {metric: line label}, e.g. {"loss": {"loss": "train"}}.
    xlabel: of every panel.

  Raises:
    ValueError: no row has a value of some metric; the message names it.
  """
  figure, axes = _figure(len(panels))
  for axis, (ylabel, lines) in zip(axes, panels.items(), strict=True):
    colors = itertools.cycle(COLORS)
    for metric, label in lines.items():
      _curve(axis, rows, metric, label, next(colors))
    _finish(axis, xlabel, ylabel, legend=len(lines) > 1)
  return figure


def _curve(
  axis: Axes, rows: Sequence[Mapping[str, Any]], metric: str, label: str, color: str
) -> None:
  """Few points are shown as they are, many as their moving mean before them."""
  points = [(r["step"], r[metric]) for r in rows if r.get(metric) is not None]
  if not points:
    raise ValueError(f"no row has metric {metric!r}")
  x, y = np.array(points, float).T
  if len(x) < 20:
    axis.plot(x, y, color=color, label=label, marker="o", markersize=3.5)
    return
  axis.plot(x, y, color=color, alpha=0.25, linewidth=1)
  axis.plot(x, _smooth(y), color=color, label=label)


def _smooth(y: np.ndarray) -> np.ndarray:
  """Centred moving mean over a twentieth of the points; windows shrink at the ends."""
  half = max(len(y) // 40, 1)
  sums = np.concatenate([[0.0], np.cumsum(y)])
  at = np.arange(len(y))
  low = np.maximum(at - half, 0)
  high = np.minimum(at + half + 1, len(y))
  return (sums[high] - sums[low]) / (high - low)


def phase_areas(rows: Sequence[Mapping[str, Any]], xlabel: str = "step") -> Figure:
  """Draws seconds of every step, its phases on top of each other.

  Args:
    rows: `read_metrics`' rows, with `seconds_PHASE` as `timers.StepTimer` gives them.
    xlabel: of the panel.

  Raises:
    ValueError: no row has phases.
  """
  seconds = timers.PhaseTotals(rows).seconds
  if not seconds:
    raise ValueError(f"no row has a value that begins with {timers.SECONDS!r}")
  by_row = [timers.seconds_of(row) for row in rows]
  names = [name for name in timers.PHASES if seconds.get(name)]
  figure, (axis,) = _figure(1, width=8.8)
  x = np.array([row["step"] for row in rows])
  bottom = np.zeros(len(rows))
  for i, name in enumerate(names):
    y = np.array([s.get(name, 0.0) for s in by_row])
    # More phases than colours: the second time around they are hatched.
    look = {"color": COLORS[i % len(COLORS)], "label": name, "linewidth": 0}
    if i >= len(COLORS):
      look |= {"hatch": "///", "alpha": 0.6}
    if len(x) < 60:
      axis.bar(x, y, 0.9, bottom, **look)
    else:
      y = _smooth(y)
      axis.fill_between(x, bottom, bottom + y, **look)
    bottom += y
  _finish(axis, xlabel, "seconds of a step", legend=True)
  return figure


def score_bars(
  summaries: Mapping[str, Mapping[str, Any]],
  figures: Mapping[str, str],
) -> Figure:
  """Draws grouped bars of several models' figures with their 95 % intervals.

  Args:
    summaries: model (teacher, sft, rl, tools_off) -> `scores.summary`'s result, or any
      mapping with these figures and `ci95`; a figure that is missing has no bar.
    figures: figure -> what the axis calls it, e.g. {"pass1_greedy": "pass@1"}.
  """
  figure, (axis,) = _figure(1, width=1.5 + 1.1 * len(figures) + 0.35 * len(summaries))
  width = 0.8 / len(summaries)
  for i, (model, summary) in enumerate(summaries.items()):
    color = COLORS[i % len(COLORS)]
    for j, name in enumerate(figures):
      value = summary.get(name)
      if value is None:
        continue
      x = j + (i - (len(summaries) - 1) / 2) * width
      low, high = summary["ci95"].get(name) or (value, value)
      axis.bar(x, value, width * 0.92, color=color)
      axis.errorbar(
        x, value, _error(value, low, high), color=_INK, capsize=2, linewidth=1
      )
      _number_above(axis, f"{value:.2f}", x, high)
    axis.bar(0, 0, color=color, label=model)  # for the legend, whatever is missing
  axis.set_xticks(range(len(figures)), list(figures.values()))
  axis.set_ylim(0, 1.12)
  _finish(axis, "", "share of tasks", legend=True)
  axis.grid(visible=False, axis="x")
  return figure


def seed_points(
  rows: Mapping[str, Mapping[str, Any]], figures: Mapping[str, str]
) -> Figure:
  """Draws recipes: the mean over seeds, its interval, and a point for each seed.

  Args:
    rows: recipe -> figure -> {"mean", "ci95" ([low, high] or None), "by_seed" (seed ->
      value)}; top to bottom. A mean of None has no point. The first row's mean is drawn
      through all.
    figures: figure -> what its panel calls it, left to right.
  """
  figure, axes = _figure(len(figures), width=2.4)
  figure.set_figwidth(2.2 + 2.6 * len(figures))
  figure.set_figheight(1.0 + 0.34 * len(rows))
  for axis, (name, label) in zip(axes, figures.items(), strict=True):
    for y, row in enumerate(rows.values()):
      mean = row[name]["mean"]
      if mean is None:
        continue
      if y == 0:
        axis.axvline(mean, color=COLORS[0], alpha=0.35, linewidth=1, linestyle="--")
      low, high = row[name]["ci95"] or (mean, mean)
      axis.errorbar(
        mean,
        y,
        xerr=_error(mean, low, high),
        color=COLORS[0],
        marker="o",
        markersize=5,
        capsize=2,
      )
      seeds = [v for v in row[name]["by_seed"].values() if v is not None]
      axis.plot(
        seeds, [y + 0.24] * len(seeds), "|", color=COLORS[1], markersize=6, alpha=0.9
      )
    names = list(rows) if axis is axes[0] else [""] * len(rows)
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlim(-0.03, 1.03)
    _finish(axis, label, "", legend=False)
  return figure


def cost_bars(table: Mapping[str, Any]) -> Figure:
  """Draws tokens of both systems, stacked: prompt, its cacheable part, completion.

  Args:
    table: `cost.cost`'s result.
  """
  figure, axes = _figure(2)
  panels = {"per_task": "tokens per task", "per_solved": "tokens per solved task"}
  systems = {MULTI: "multi-agent", SINGLE: "one model"}
  for axis, (per, label) in zip(axes, panels.items(), strict=True):
    for x, system in enumerate(systems):
      figures = table[system][per]
      if figures["total"] is None:
        axis.annotate("none solved", (x, 0), ha="center", va="bottom")
        continue
      fresh = figures["prompt_cached_credit"]
      parts = {
        "prompt": fresh,
        "prompt, cacheable": figures["prompt"] - fresh,
        "completion": figures["completion"],
      }
      bottom = 0.0
      for color, (part, size) in zip(COLORS, parts.items(), strict=False):
        axis.bar(x, size, 0.6, bottom, color=color, label=None if x else part)
        bottom += size
      _number_above(axis, f"{bottom:,.0f}", x, bottom)
    axis.set_xticks(range(len(systems)), list(systems.values()))
    axis.margins(y=0.12)
    _finish(axis, "", label, legend=axis is axes[0])
    axis.grid(visible=False, axis="x")
  return figure


class Statistics:
  """Counts lengths and roles of a set of trajectories, one by one."""

  def __init__(self, unit: str = "characters"):
    """Takes what lengths are counted in."""
    self.unit = unit
    self.lengths = array.array("q")
    self.roles: collections.Counter[str] = collections.Counter()

  def add(self, length: int, roles: Mapping[str, int], times: int = 1) -> None:
    """Counts a trajectory: its length, its spans of each role."""
    for _ in range(times):
      self.lengths.append(length)
      self.roles.update(roles)

  @classmethod
  def of(cls, trajectories: Sequence[Trajectory], tokens: bool) -> Statistics:
    """Counts trajectories, in tokens or in characters without the prompt."""
    out = cls("tokens" if tokens else "characters")
    for t in trajectories:
      out.add(t.num_tokens if tokens else len(t.text), _roles(t))
    return out

  def summary(self) -> dict[str, Any]:
    """Sums up: count, quantiles of the length, mean spans of each role."""
    points = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "max": 100}
    at = np.percentile(self.lengths, list(points.values())) if self.lengths else []
    return {
      "trajectories": len(self.lengths),
      self.unit: {k: float(v) for k, v in zip(points, at, strict=False)},
      "spans": self.means(),
    }

  def means(self) -> dict[str, float]:
    """Averages the spans of each role per trajectory, most frequent first."""
    n = len(self.lengths)
    return {r: count / n for r, count in self.roles.most_common()} if n else {}


def filter_statistics(before: Statistics, after: Statistics) -> Figure:
  """Draws trajectory lengths and spans per role, before and after filtering."""
  figure, (left, right) = _figure(2)
  sets = {"before": before, "after": after}
  edges = np.histogram_bin_edges([*before.lengths, *after.lengths] or [0], 24)
  for color, (name, one) in zip(COLORS, sets.items(), strict=False):
    label = f"{name} ({len(one.lengths)})"
    left.hist(one.lengths, edges, color=color, alpha=0.55, label=label)
  _finish(left, before.unit, "trajectories", legend=True)
  counts = {name: one.means() for name, one in sets.items()}
  roles = list(dict.fromkeys(r for c in counts.values() for r in c))
  for i, (name, count) in enumerate(counts.items()):
    y = np.arange(len(roles)) + (i - 0.5) * 0.38
    values = [count.get(r, 0.0) for r in roles]
    right.barh(y, values, 0.36, color=COLORS[i], label=name)
  right.set_yticks(range(len(roles)), roles)
  right.invert_yaxis()
  _finish(right, "spans per trajectory", "", legend=True)
  right.grid(visible=False, axis="y")
  return figure


def funnel_bars(stages: Mapping[str, tuple[int, Mapping[str, int]]]) -> Figure:
  """Draws what every stage of a funnel kept and dropped, by reason, top to bottom.

  Args:
    stages: stage -> (kept, {reason: dropped}), in order.
  """
  figure, (axis,) = _figure(1, width=7.2)
  figure.set_figheight(0.9 + 0.42 * len(stages))
  for y, (kept, dropped) in enumerate(stages.values()):
    lost = sum(dropped.values())
    axis.barh(y, kept, 0.7, color=COLORS[0], label=None if y else "kept")
    axis.barh(y, lost, 0.7, kept, color=COLORS[1], label=None if y else "dropped")
    worst = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{reason} {n:,}" for reason, n in worst[:3])
    more = f", {len(worst) - 3} more" if len(worst) > 3 else ""
    text = f" {kept:,} kept"
    if shown:
      text += f"; {shown}{more}"
    axis.annotate(text, (kept + lost, y), va="center", size=8)
  axis.set_yticks(range(len(stages)), list(stages))
  axis.invert_yaxis()
  totals = [kept + sum(dropped.values()) for kept, dropped in stages.values()]
  axis.set_xlim(0, 2.2 * max(totals, default=1))
  _finish(axis, "trajectories", "", legend=True)
  axis.grid(visible=False, axis="y")
  return figure


def _roles(trajectory: Trajectory) -> collections.Counter[str]:
  spans = (s for s in trajectory.segments if s.author != Author.PROMPT)
  return collections.Counter(s.role for s in spans if s.role)


def _error(value: float, low: float, high: float) -> list[list[float]]:
  """An error bar; a bootstrap interval need not hold the point that it belongs to."""
  return [[max(value - low, 0)], [max(high - value, 0)]]


def _number_above(axis: Axes, text: str, x: float, y: float) -> None:
  axis.annotate(text, (x, y), (0, 3), textcoords="offset points", ha="center", size=8)


def _figure(panels: int, width: float = 4.4) -> tuple[Figure, list[Axes]]:
  width = max(width, 4.4 if panels > 1 else 6.4)
  figure = Figure((width * panels, 3.1), layout="constrained")
  axes = figure.subplots(1, panels, squeeze=False)[0]
  return figure, list(axes)


def _finish(axis: Axes, xlabel: str, ylabel: str, legend: bool) -> None:
  axis.set_xlabel(xlabel)
  axis.set_ylabel(ylabel)
  axis.spines[["top", "right"]].set_visible(False)
  axis.grid(alpha=0.25, linewidth=0.6, color=_INK)
  axis.set_axisbelow(True)
  if legend:
    # Above the axes, where no bar and no line can be under it.
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4}
    axis.legend(frameon=False, labelcolor=_INK, columnspacing=1.2, **place)
  for spine in axis.spines.values():
    spine.set_color(_INK)
  axis.tick_params(colors=_INK)
  for text in (axis.xaxis.label, axis.yaxis.label, *axis.texts):
    text.set_color(_INK)


def to_svg(figure: Figure) -> str:
  """Writes the figure as an `<svg>` element to put into a page."""
  out = io.StringIO()
  with matplotlib.rc_context(_STYLE):
    figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
  text = out.getvalue()
  text = text[text.index("<svg") :].replace(_INK, "currentColor")
  # A page may set --figure-0 and so on, to lift the colours off a dark ground.
  for i, color in enumerate(COLORS):
    text = text.replace(color.lower(), f"var(--figure-{i}, {color})")
  return text


def to_png(figure: Figure, dpi: int = 150) -> bytes:
  """Renders the figure as PNG bytes, on white."""
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=dpi)
  return out.getvalue()


def write_png(path: str, figure: Figure) -> None:
  """Writes the figure, on white."""
  with open(path, "wb") as f:
    f.write(to_png(figure))
