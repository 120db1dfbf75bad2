"""A fixture that grades programs."""

from __future__ import annotations

import pytest

from coa_jax.rewards.code.grader import CodeConfig, CodeGrader
from tests.backend import BACKEND


@pytest.fixture(scope="session")
def grader():
  """Rewards 1.0 if all tests pass, and 0.0 otherwise."""
  service = CodeGrader(CodeConfig(sandbox=BACKEND, test_s=30.0))
  yield service
  service.close()
