"""Fixtures shared by the report tests."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def clock(monkeypatch) -> list[float]:
  """A stopped clock; tests advance it by clock[0] += seconds."""
  now = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  return now
