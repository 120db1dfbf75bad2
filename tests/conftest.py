"""Settings of every test, made before anything imports JAX, and shared fixtures."""

from __future__ import annotations

import os

# Subprocesses of tests inherit all of this. Programs are compiled once per machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "tests"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import pytest
import toy

from coa_jax.tools.tools import ToolsConfig
from tools_sandbox.jail import keeper as jail

hypothesis.settings.register_profile("coa_jax", deadline=None, max_examples=200)
hypothesis.settings.load_profile("coa_jax")
_NO_JAIL = jail.check()


@pytest.fixture(scope="session")
def tokenizer():
  """The toy tokenizer: every tag is one token."""
  return toy.tokenizer()


@pytest.fixture(scope="session")
def stock():
  """A stock-like tokenizer: tags are ordinary text, and merges cross their borders."""
  return toy.stock_tokenizer()


@pytest.fixture(scope="session")
def actor():
  """A policy that was trained until it knows `toy.SCRIPTS` by heart."""
  return toy.actor()


def pytest_configure(config: pytest.Config) -> None:
  """Lets tests of journeys run programs on machines without a jail, and says so."""
  del config
  if _NO_JAIL:
    make = ToolsConfig.__init__
    defaults = ("subprocess" if d == "jail" else d for d in make.__defaults__)
    make.__defaults__ = tuple(defaults)


def pytest_report_header() -> str:
  """Which back-end `tools.sandbox` is; tests of the jail itself skip without one."""
  if not _NO_JAIL:
    return "tools.sandbox: jail"
  return f"tools.sandbox: subprocess, this machine has no jail: {'; '.join(_NO_JAIL)}"
