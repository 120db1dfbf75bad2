"""Fixtures that tests of reports share."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def clock(monkeypatch) -> list[float]:
  """A clock that stands still until it is moved: clock[0] += seconds."""
  now = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  return now
