"""What tests of the sandbox share."""

from __future__ import annotations

import pytest
from http_server import Server


@pytest.fixture
def server():
  """A server on loopback that does what a test has put into its `actions`."""
  with Server() as running:
    yield running
