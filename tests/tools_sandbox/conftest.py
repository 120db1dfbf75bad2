"""Shared fixtures of the sandbox tests."""

from __future__ import annotations

import pytest
from http_server import Server


@pytest.fixture
def server():
  """A mock server on loopback; a test sets its replies in `actions`."""
  with Server() as running:
    yield running
