"""Goodput over restarts, and the line about changed devices."""

from __future__ import annotations

import time

import jax
import pytest

from coa_jax.report.restarts import Goodput, say_what_changed

COMPILE = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def clocks(monkeypatch) -> list[float]:
  """The seconds shown by both of Python's clocks."""
  now = [1000.0]
  monkeypatch.setattr(time, "time", lambda: now[0])
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  return now


def test_useful_seconds_by_wall_time_over_two_lives(clocks):
  with Goodput([], 990.0, 4) as goodput:  # ten seconds to start
    clocks[0] += 6
    jax.monitoring.record_event_duration_secs(COMPILE, 4.0)
    jax.monitoring.record_event_duration_secs(COMPILE, 3.0)  # nested in the first
    jax.monitoring.record_event_duration_secs("/jax/other", 2.0)
    clocks[0] += 4
    first = goodput.after_step({"seconds_step": 9.0, "seconds_other": 1.0}, output=800)
    assert first["useful_seconds"] == 10 - 4
    assert first["goodput"] == pytest.approx(6 / 20)
    assert first["output_tokens_per_second_per_chip"] == 800 / 10 / 4
    clocks[0] += 10
    second = goodput.after_step({"seconds_step": 10.0})
    assert second["goodput"] == pytest.approx(16 / 30)
    assert "output_tokens_per_second_per_chip" not in second
  # --- Ten seconds of step 3 are lost; it is repeated after ten seconds of starting.
  clocks[0] += 20
  with Goodput([{"seconds": 20.0, **second}], 990.0, 2) as goodput:
    clocks[0] += 10
    third = goodput.after_step({"seconds_step": 10.0})
    assert third["useful_seconds"] == 26
    assert third["goodput"] == pytest.approx(26 / 60)
    assert third["devices"] == 2 and third["processes"] == 1
  # --- The listener is gone; compiling before a step does not count for it.
  jax.monitoring.record_event_duration_secs(COMPILE, 4.0)
  with Goodput([{"seconds": 20.0}], None, 1) as goodput:
    jax.monitoring.record_event_duration_secs(COMPILE, 5.0)
    clocks[0] += 1
    assert goodput.after_step({"seconds_step": 1.0})["goodput"] == pytest.approx(1.0)


def test_other_devices_are_said(capsys):
  row = {"step": 6, "devices": 8.0, "processes": 2.0}
  say_what_changed([row], 8, 2)
  say_what_changed([{"step": 6}], 8, 2)  # from an earlier version
  say_what_changed([], 8, 2)
  assert capsys.readouterr().err == ""
  say_what_changed([row], 4, 1)
  said = capsys.readouterr().err
  assert "after step 6 with 4 devices of 1 processes, before 8 devices of 2" in said
