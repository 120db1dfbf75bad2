"""A fixture shared by the tool tests."""

from __future__ import annotations

import functools

import pytest

from coa_jax.tools import toolbox
from tools_sandbox.client import Sandbox


@pytest.fixture(scope="session", autouse=True)
def _bare_slots():
  """Starts slots without preloaded imports, which take seconds."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(toolbox, "Sandbox", functools.partial(Sandbox, preload=()))
    yield
