"""Seconds by phase: they add up, and appear in a line, a table and a picture."""

from __future__ import annotations

import io

import pytest
import rich.console

from coa_jax.model import flops
from coa_jax.model.config import ModelConfig
from coa_jax.report import plots, timers
from coa_jax.report.metrics import Metrics, read_metrics


def test_phases_add_up_to_the_wall_time_whatever_is_lapped(clock):
  measured = timers.StepTimer()
  clock[0] += 1
  measured.lap("sync")
  clock[0] += 6
  measured.lap("other", sync=0.5, decode=4.0, tools=1.0)
  clock[0] += 2
  measured.lap("learn")
  clock[0] += 0.25
  row = measured.flush(decode=400, learn=100, tools=0, eval=7)
  assert row == {
    "seconds_sync": 1.5,
    "seconds_decode": 4.0,
    "seconds_tools": 1.0,
    "seconds_learn": 2.0,
    "seconds_other": 0.75,
    "decode_tokens_per_second": 100.0,
    "learn_tokens_per_second": 50.0,
  }
  clock[0] += 3
  measured.lap("save")  # after a step's line: counts for the next step
  assert measured.flush() == {"seconds_save": 3.0, "seconds_other": 0.0}
  assert measured.flush() == {"seconds_other": 0.0}


def test_a_line_tells_shares_within_80_columns():
  seconds = {"learn": 2.0, "decode": 6.0, "sync": 0.001, "other": 2.0}
  assert timers.line(seconds) == "decode 60%  learn 20%  other 20%"
  assert timers.line({}) == timers.line({"other": 0.0}) == ""
  many = {f"a_phase_with_a_name_{i}": 1.0 for i in range(9)}
  assert 40 < len(timers.line(many)) < 80


ROWS = [
  {"step": i, "seconds_decode": 3.0, "seconds_learn": 1.0, "seconds_other": 0.0}
  | {"decode_tokens_per_second": 100.0 * i, "seconds": 4.0 * i}
  for i in (1, 2, 3)
]


def test_a_table_weighs_rates_by_their_time():
  table = timers.PhaseTotals(ROWS).table("where")
  assert [r["phase"] for r in table.rows] == ["decode", "learn"]
  assert [r["share"] for r in table.rows] == ["75.0%", "25.0%"]
  assert [r["rate"] for r in table.rows] == [200.0, None]
  console = rich.console.Console(width=80, record=True, file=io.StringIO())
  console.print(table)
  lines = console.export_text().splitlines()
  assert max(map(len, lines)) <= 80
  assert any("decode" in x and "75.0%" in x and "200.0" in x for x in lines)


def test_phases_of_other_versions_come_last():
  rows = [{"seconds_ancient": 3.0, "seconds_learn": 1.0}]
  table = timers.PhaseTotals(rows).table("time")
  assert [row["phase"] for row in table.rows] == ["learn", "ancient"]


def test_metrics_show_the_phases_at_the_end(tmp_path, capsys):
  with Metrics(str(tmp_path), "rl", total=3) as log:
    for row in ROWS:
      values = {k: v for k, v in row.items() if k not in ("step", "seconds")}
      log.log(row["step"], values, "reward 0.5")
  printed = capsys.readouterr().err
  assert "rl  step 3/3" in printed and "\n  decode 75%  learn 25%\n" in printed
  assert "rl: where the time went" in printed and "75.0%" in printed
  assert len(read_metrics(str(tmp_path), "rl")) == 3


def test_a_picture_stacks_the_phases_of_every_step():
  for count in (3, 70):
    rows = [{**ROWS[0], "step": i} for i in range(count)]
    rows[1] = {"step": 1}  # from an older run
    svg = plots.to_svg(plots.phase_areas(rows))
    assert "decode" in svg and "learn" in svg and "seconds of a step" in svg
    assert "other" not in svg  # it took no time
  (axis,) = plots.phase_areas(ROWS).axes
  tops = {round(bar.get_y() + bar.get_height(), 6) for bar in axis.patches}
  assert tops == {3.0, 4.0}
  with pytest.raises(ValueError, match="seconds_"):
    plots.phase_areas([{"step": 1}])


def test_utilisation_is_known_where_the_peak_is(monkeypatch):
  cfg = ModelConfig(vocab_size=64, width=16, layers=1, heads=2, kv_heads=1, head_dim=8)
  assert flops.utilisation(cfg, [8], 1.0) == {}
  monkeypatch.setattr(flops, "peak_flops", lambda kind: 1e6)
  half = flops.train_flops(cfg, [8, 5]) / 1e6
  assert flops.utilisation(cfg, iter([8, 5]), half, devices=2) == {
    "mfu": pytest.approx(0.5)
  }
