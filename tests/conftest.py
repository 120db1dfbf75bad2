"""Settings of every test, made before anything imports JAX, and shared fixtures."""

from __future__ import annotations

import os
import shutil

# Subprocesses of tests inherit all of this. Programs are compiled once per machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Torch's idle threads would spin on the cores that the other worker's tests need: under
# `-n 2` on two cores its small models ran four times slower with two threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  os.path.join(os.path.expanduser("~"), ".cache", "coa_jax", "tests"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest
import toy

from tests.backend import BACKEND, WHY

hypothesis.settings.register_profile("coa_jax", deadline=None, max_examples=100)
hypothesis.settings.load_profile("coa_jax")


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


@pytest.fixture(scope="module")
def chromium():
  """A browser that all tests of a file share; they skip where there is none."""
  api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
  with api.sync_playwright() as playwright:
    path = shutil.which("chromium") or playwright.chromium.executable_path
    if not os.path.exists(path):
      pytest.skip("needs Chromium: apt-get install chromium")
    browser = playwright.chromium.launch(executable_path=path)
    yield browser
    browser.close()


@pytest.fixture
def gpu_described():
  """For a test that lowers programs for a GPU without one: JAX 0.12 asks which."""
  gpu = jax.sharding.AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def pytest_xdist_auto_num_workers() -> int:
  """One worker more than cores, at most 8: many tests wait for a sandbox."""
  return min(8, len(os.sched_getaffinity(0)) + 1)


def pytest_report_header() -> str:
  """Names the back-end of programs; tests of the jail itself skip without one."""
  why = f", this machine has no jail: {WHY}" if WHY else ""
  return f"tools.sandbox of tests: {BACKEND}{why}"


def pytest_runtest_logreport(report) -> None:
  """Adds a skipped test to the file that COA_SKIPS names, for .ci/run."""
  path = os.environ.get("COA_SKIPS")
  if path and report.skipped and not hasattr(report, "wasxfail"):
    reason = " ".join(report.longrepr[-1].split())
    with open(path, "a", encoding="utf-8") as f:
      f.write(f"{report.nodeid}\t{reason}\n")


pytest_collectreport = pytest_runtest_logreport  # a file whose import skips it
