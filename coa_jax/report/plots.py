"""Report figures as matplotlib Figure objects (no pyplot, no global state).

`to_svg` returns inline SVG, which takes text colour and font from the surrounding page,
so one figure serves light and dark pages; `to_png` returns bytes for uses without SVG.
Colours are Okabe and Ito's, distinguishable for colour-blind readers.

budget: all figures of a report have one look.
"""

from __future__ import annotations

import array
import collections
import io
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from coa_jax.protocol.trajectory import Author, Trajectory
from coa_jax.report import timers

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# A placeholder for the page's text colour; `to_svg` replaces it.
_INK = "#010203"
# A curve with at least this many points shows its moving mean.
_MANY = 20
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_STYLE = {
  "svg.fonttype": "none",
  "svg.hashsalt": "coa_jax",  # equal figures are equal bytes
  "font.family": "sans-serif",
}


def curves(
  rows: Sequence[Mapping[str, Any]],
  panels: Mapping[str, Mapping[str, str]],
  shares: Collection[str] = (),
  logarithmic: Collection[str] = (),
) -> Figure:
  """Draws metrics over steps, one panel per y label.

  Args:
    rows: rows from `read_metrics`; a metric may be None or absent in some.
    panels: y label -> {metric: line label}, e.g. {"loss": {"loss": "train"}}.
    shares: y labels of panels with a fixed axis from 0 to 1.
    logarithmic: y labels of panels with a logarithmic axis, if all values are above 0.

  Raises:
    ValueError: no row has a value of some metric; the message names it.
  """
  figure, axes = _figure(len(panels))
  # Each panel begins with the same colour: lines are compared within a panel.
  for axis, (ylabel, lines) in zip(axes, panels.items(), strict=True):
    colors = itertools.cycle(COLORS)
    for metric, label in lines.items():
      _curve(axis, rows, metric, label, next(colors))
    if ylabel in shares:
      axis.set_ylim(0, 1.02)
    if ylabel in logarithmic:
      _log_scale(axis)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _finish(axis, "step", ylabel, legend=len(lines) > 1)
  return figure


def _log_scale(axis: Axes) -> None:
  """Makes the y axis logarithmic, with plain numbers, if all values are above 0."""
  values = np.concatenate([line.get_ydata() for line in axis.lines] or [np.zeros(1)])
  if values.min() <= 0:
    return
  axis.set_yscale("log")
  numbers = FuncFormatter(lambda value, _: f"{value:g}")
  axis.yaxis.set_major_formatter(numbers)
  # Fewer than two powers of ten would leave an axis with one number or none.
  if values.max() < 100 * values.min():
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
  axis.yaxis.set_minor_formatter(NullFormatter())


def seed_curves(
  runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
  metric: str,
  logarithmic: bool = False,
) -> Figure:
  """Draws one metric over steps, one line per setting.

  Args:
    runs: setting -> rows from `read_metrics` for each seed. A line is the mean over
      seeds (its moving mean, for many steps), with a band from the lowest to the
      highest seed.
    metric: the metric; settings without it have no line.
    logarithmic: whether the axis is logarithmic, if all values are above 0.
  """
  figure, (axis,) = _figure(1, width=9)
  colors = itertools.cycle(COLORS)
  for name, logs in runs.items():
    by_step: dict[int, list[float]] = collections.defaultdict(list)
    for row in itertools.chain.from_iterable(logs):
      if row.get(metric) is not None:
        by_step[row["step"]].append(row[metric])
    if not by_step:
      continue
    # A step not yet reached by every seed would shift the mean.
    seeds = max(map(len, by_step.values()))
    steps = [step for step in sorted(by_step) if len(by_step[step]) == seeds]
    values = np.array([by_step[step] for step in steps], float)
    mean = values.mean(1)
    if len(steps) >= _MANY:
      mean = _smooth(mean)
    color = next(colors)
    axis.plot(steps, mean, color=color, label=name)
    if seeds > 1:
      axis.fill_between(
        steps, values.min(1), values.max(1), color=color, alpha=0.2, linewidth=0
      )
  if logarithmic:
    _log_scale(axis)
  _finish(axis, "step", metric, legend=False)
  # Setting names are long: put them next to the axes.
  axis.legend(
    frameon=False, labelcolor=_INK, loc="center left", bbox_to_anchor=(1, 0.5)
  )
  return figure


def _curve(
  axis: Axes, rows: Sequence[Mapping[str, Any]], metric: str, label: str, color: str
) -> None:
  """Draws few points as they are, many faintly behind their moving mean."""
  points = [(r["step"], r[metric]) for r in rows if r.get(metric) is not None]
  if not points:
    raise ValueError(f"no row has metric {metric!r}")
  x, y = np.array(points, float).T
  if len(x) < _MANY:  # too few for a moving mean
    axis.plot(x, y, color=color, label=label, marker="o", markersize=3.5)
    return
  # The points themselves stay, faintly: a mean alone would hide their scatter.
  axis.plot(x, y, color=color, alpha=0.25, linewidth=1)
  axis.plot(x, _smooth(y), color=color, label=label)


def _smooth(y: np.ndarray) -> np.ndarray:
  """Returns a centred moving mean over a twentieth of the points, fewer at the ends."""
  at = np.arange(len(y))
  half = np.minimum(max(len(y) // 40, 1), np.minimum(at, len(y) - 1 - at))
  # Each window's sum is the difference of two sums from the beginning.
  sums = np.concatenate([[0.0], np.cumsum(y)])
  low = at - half
  high = at + half + 1
  return (sums[high] - sums[low]) / (high - low)


def phase_areas(rows: Sequence[Mapping[str, Any]]) -> Figure:
  """Draws each step's seconds, stacked by phase.

  Raises:
    ValueError: no row has phases.
  """
  seconds = timers.PhaseTotals(rows).seconds
  if not seconds:
    raise ValueError(f"no row has a value that begins with {timers.SECONDS!r}")
  names = [name for name in timers.PHASES if seconds.get(name)]
  # --- One layer per phase, on top of the earlier layers.
  figure, (axis,) = _figure(1, width=8.8)
  x = np.array([row["step"] for row in rows])
  bottom = np.zeros(len(rows))
  for i, name in enumerate(names):
    # An older run's row may lack the phase.
    y = np.array([row.get(timers.SECONDS + name) or 0.0 for row in rows])
    # With more phases than colours, reused colours are hatched.
    look = {"color": COLORS[i % len(COLORS)], "label": name, "linewidth": 0}
    if i >= len(COLORS):
      look |= {"hatch": "///", "alpha": 0.6}
    if len(x) < 60:  # bars, while each is wide enough to be seen
      axis.bar(x, y, 0.9, bottom, **look)
    else:
      y = _smooth(y)
      axis.fill_between(x, bottom, bottom + y, **look)
    bottom += y
  # The first step, with compilation, would flatten the others.
  others = bottom[1:].max(initial=0.0)
  if bottom[0] > 3 * others > 0:
    axis.set_ylim(0, 1.25 * others)
    text = f"step {x[0]}: {bottom[0]:.0f} s, with what it compiles"
    axis.annotate(
      text, (x[0], 1.2 * others), (14, 0), textcoords="offset points", va="top", size=8
    )
  axis.xaxis.set_major_locator(MaxNLocator(integer=True))
  _finish(axis, "step", "seconds of a step", legend=True)
  return figure


def score_bars(
  summaries: Mapping[str, Mapping[str, Any]],
  figures: Mapping[str, str],
) -> Figure:
  """Draws grouped bars of several models' figures with their 95 % intervals.

  Args:
    summaries: model (teacher, sft, rl, tools_off) -> `scores.summary`'s result, or any
      mapping with these figures and `ci95`; a missing figure has no bar.
    figures: figure -> its label on the axis, e.g. {"pass1_greedy": "pass@1"}.
  """
  figure, (axis,) = _figure(1, width=1.5 + 1.1 * len(figures) + 0.35 * len(summaries))
  width = 0.8 / len(summaries)  # bar width: a figure's bars share 0.8 of its place
  for i, (model, summary) in enumerate(summaries.items()):
    color = COLORS[i % len(COLORS)]
    for j, name in enumerate(figures):
      value = summary.get(name)
      if value is None:
        continue
      # A figure's bars are centred on its tick.
      x = j + (i - (len(summaries) - 1) / 2) * width
      low, high = summary["ci95"].get(name) or (value, value)
      axis.bar(x, value, width * 0.92, color=color)
      axis.errorbar(
        x, value, _error(value, low, high), color=_INK, capsize=2, linewidth=1
      )
      _number_above(axis, f"{value:.2f}", x, high)
    axis.bar(0, 0, color=color, label=model)  # for the legend, even without figures
  axis.set_xticks(range(len(figures)), list(figures.values()))
  axis.set_ylim(0, 1.12)  # room for the numbers above the bars
  _finish(axis, "", "share of tasks", legend=True)
  axis.grid(visible=False, axis="x")
  return figure


def cost_bars(table: Mapping[str, Any]) -> Figure:
  """Draws both systems' tokens, stacked: prompt, its cacheable part, completion."""
  figure, axes = _figure(2)
  panels = {"per_task": "tokens per task", "per_solved": "tokens per solved task"}
  systems = {"multi_agent": "multi-agent", "single": "one model"}  # `cost`'s keys
  for axis, (per, label) in zip(axes, panels.items(), strict=True):
    for x, system in enumerate(systems):
      figures = table[system][per]
      if figures["total"] is None:
        axis.annotate("none solved", (x, 0), ha="center", va="bottom")
        continue
      # The prompt in two parts: uncacheable and cacheable.
      fresh = figures["prompt_cached_credit"]
      parts = {
        "prompt": fresh,
        "prompt, cacheable": figures["prompt"] - fresh,
        "completion": figures["completion"],
      }
      bottom = 0.0
      for color, (part, size) in zip(COLORS, parts.items(), strict=False):
        bar = axis.bar(x, size, 0.6, bottom, color=color)
        if x == 0:  # one legend entry for both systems
          bar.set_label(part)
        bottom += size
      _number_above(axis, f"{bottom:,.0f}", x, bottom)
    axis.set_xticks(range(len(systems)), list(systems.values()))
    axis.margins(y=0.12)  # room for the sums above the bars
    _finish(axis, "", label, legend=axis is axes[0])
    axis.grid(visible=False, axis="x")
  return figure


class Statistics:
  """Collects trajectory lengths and span counts by role, one trajectory at a time."""

  def __init__(self, unit: str = "characters"):
    """Begins empty; `unit` names the unit of lengths."""
    self.unit = unit
    self.lengths = array.array("q")
    self.roles: collections.Counter[str] = collections.Counter()

  def add(self, length: int, roles: Mapping[str, int], times: int = 1) -> None:
    """Counts a trajectory `times` times: its length, and its spans by role."""
    for _ in range(times):
      self.lengths.append(length)
      self.roles.update(roles)

  @classmethod
  def of(cls, trajectories: Sequence[Trajectory], tokens: bool) -> Statistics:
    """Counts trajectories: all tokens, or the characters after the prompt."""
    out = cls("tokens" if tokens else "characters")
    for t in trajectories:
      length = t.num_tokens if tokens else len(t.text)
      spans = [s for s in t.segments if s.author != Author.PROMPT]
      out.add(length, collections.Counter(s.role for s in spans if s.role))
    return out

  def summary(self) -> dict[str, Any]:
    """Returns the trajectory count, length quantiles, and mean spans by role."""
    quantiles = {}
    if self.lengths:
      points = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "max": 100}
      for name, percent in points.items():
        quantiles[name] = float(np.percentile(self.lengths, percent))
    return {
      "trajectories": len(self.lengths),
      self.unit: quantiles,
      "spans": self.means(),
    }

  def means(self) -> dict[str, float]:
    """Returns each role's mean span count per trajectory, most frequent first."""
    # Without trajectories there are no roles either.
    n = len(self.lengths)
    return {role: count / n for role, count in self.roles.most_common()}


def filter_statistics(before: Statistics, after: Statistics) -> Figure:
  """Draws trajectory lengths and spans per role, before and after filtering."""
  # --- Left: lengths, in the same bins before and after.
  figure, (left, right) = _figure(2)
  sets = {"before": before, "after": after}
  edges = np.histogram_bin_edges([*before.lengths, *after.lengths] or [0], 24)
  for color, (name, one) in zip(COLORS, sets.items(), strict=False):
    label = f"{name} ({len(one.lengths)})"
    left.hist(one.lengths, edges, color=color, alpha=0.55, label=label)
  _finish(left, before.unit, "trajectories", legend=True)

  # --- Right: spans by role, two bars each.
  roles = list(before.means() | after.means())
  for i, (name, one) in enumerate(sets.items()):
    means = one.means()
    y = np.arange(len(roles)) + (i - 0.5) * 0.38
    values = [means.get(r, 0.0) for r in roles]
    right.barh(y, values, 0.36, color=COLORS[i], label=name)
  right.set_yticks(range(len(roles)), roles)
  right.invert_yaxis()
  _finish(right, "spans per trajectory", "", legend=True)
  right.grid(visible=False, axis="y")
  return figure


def funnel_bars(stages: Mapping[str, tuple[int, Mapping[str, int]]]) -> Figure:
  """Draws each funnel stage's kept count and dropped counts by reason, top to bottom.

  `stages`: stage -> (kept, {reason: dropped}).
  """
  figure, (axis,) = _figure(1, width=8.8)
  figure.set_figheight(0.9 + 0.42 * len(stages))
  most = 1
  for y, (passed, dropped) in enumerate(stages.values()):
    # --- A stage's bar: the kept part, then the dropped part.
    lost = sum(dropped.values())
    most = max(most, passed + lost)
    green = axis.barh(y, passed, 0.7, color=COLORS[0])
    red = axis.barh(y, lost, 0.7, passed, color=COLORS[1])
    if y == 0:  # one legend entry for all stages
      green.set_label("kept")
      red.set_label("dropped")

    # --- The counts next to the bar, with the three most frequent reasons.
    worst = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    text = f" {passed:,} kept"
    if worst:
      text += "; " + ", ".join(f"{reason} {n:,}" for reason, n in worst[:3])
    if len(worst) > 3:
      text += f", {len(worst) - 3} more"
    axis.annotate(text, (passed + lost, y), va="center", size=8)
  axis.set_yticks(range(len(stages)), list(stages))
  axis.invert_yaxis()
  axis.set_xlim(0, 1.02 * most)  # the text must be next to the axes
  axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
  axis.xaxis.set_major_formatter("{x:,.0f}")
  _finish(axis, "trajectories", "", legend=True)
  axis.grid(visible=False, axis="y")
  return figure


def _error(value: float, low: float, high: float) -> list[list[float]]:
  """Returns an error bar; a bootstrap interval may exclude its point."""
  return [[max(value - low, 0)], [max(high - value, 0)]]


def _number_above(axis: Axes, text: str, x: float, y: float) -> None:
  axis.annotate(text, (x, y), (0, 3), textcoords="offset points", ha="center", size=8)


def _figure(panels: int, width: float = 4.4) -> tuple[Figure, list[Axes]]:
  narrowest = 4.4 if panels > 1 else 6.4
  size = (max(width, narrowest) * panels, 3.1)
  figure = Figure(size, layout="constrained")
  axes = figure.subplots(1, panels, squeeze=False)[0]
  return figure, list(axes)


def _finish(axis: Axes, xlabel: str, ylabel: str, legend: bool) -> None:
  # Called last: texts added later would not get the page's colour.
  axis.set_xlabel(xlabel)
  axis.set_ylabel(ylabel)
  axis.spines[["top", "right"]].set_visible(False)
  axis.grid(alpha=0.25, linewidth=0.6, color=_INK)
  axis.set_axisbelow(True)
  if legend:
    # Above the axes, outside of bars and lines.
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4}
    axis.legend(frameon=False, labelcolor=_INK, columnspacing=1.2, **place)
  for spine in axis.spines.values():
    spine.set_color(_INK)
  axis.tick_params(colors=_INK)
  for text in (axis.xaxis.label, axis.yaxis.label, *axis.texts):
    text.set_color(_INK)


def to_svg(figure: Figure) -> str:
  """Returns the figure as an `<svg>` element for a page."""
  out = io.StringIO()
  with matplotlib.rc_context(_STYLE):
    figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
  text = out.getvalue()
  # The text before the element is only for a standalone file.
  text = text[text.index("<svg") :].replace(_INK, "currentColor")
  # A page may set --figure-0 and so on, for contrast on a dark background.
  for i, color in enumerate(COLORS):
    text = text.replace(color.lower(), f"var(--figure-{i}, {color})")
  return text


def to_png(figure: Figure, dpi: int = 150) -> bytes:
  """Renders the figure as PNG bytes, on white."""
  out = io.BytesIO()
  figure.savefig(out, format="png", dpi=dpi)
  return out.getvalue()


def write_png(path: str, figure: Figure, title: str = "") -> None:
  """Writes the figure, on white, below a title: a PNG file has no caption."""
  if title:
    figure.suptitle(title, color=_INK)
  with open(path, "wb") as f:
    f.write(to_png(figure))


def write_filter_figures(
  prefix: str,
  stages: Mapping[str, tuple[int, Mapping[str, int]]],
  before: Statistics,
  after: Statistics,
) -> None:
  """Writes PREFIXfunnel.png and PREFIXstatistics.png; args as in the figures."""
  title = "Kept and dropped at each stage"
  write_png(f"{prefix}funnel.png", funnel_bars(stages), title)
  title = "Trajectories before and after filtering"
  write_png(f"{prefix}statistics.png", filter_statistics(before, after), title)
