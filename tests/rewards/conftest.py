"""The grader of programs."""

from __future__ import annotations

import pytest

from coa_jax.rewards.code.grader import CodeConfig, CodeGrader
from tests.backend import BACKEND


@pytest.fixture(scope="session")
def grader():
  """Gives 1.0 for all tests passed."""
  service = CodeGrader(CodeConfig(sandbox=BACKEND, test_s=30.0))
  yield service
  service.close()
