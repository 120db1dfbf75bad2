"""Settings for all tests, made before JAX is imported, and shared fixtures."""

from __future__ import annotations

import os
import shutil

# Subprocesses inherit these settings. Programs are compiled once per machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Torch's idle threads would spin on the cores needed by the other worker's tests: with
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
  """A stock-like tokenizer: tags are ordinary text, and merges cross tag borders."""
  return toy.stock_tokenizer()


@pytest.fixture(scope="session")
def actor():
  """A policy trained to reproduce `toy.SCRIPTS`."""
  return toy.actor()


@pytest.fixture(scope="module")
def chromium():
  """A browser shared by a file's tests; they skip if there is none."""
  api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
  with api.sync_playwright() as playwright:
    path = shutil.which("chromium") or playwright.chromium.executable_path
    if not os.path.exists(path):
      pytest.skip("needs Chromium: apt-get install chromium")
    browser = playwright.chromium.launch(executable_path=path)
    yield browser
    browser.close()


@pytest.fixture(scope="module", autouse=True)
def compiled_programs():
  """Frees a file's compiled programs; workers that kept all grew to 5.6 GiB."""
  yield
  jax.clear_caches()


@pytest.fixture
def gpu_described():
  """Describes an absent GPU; JAX 0.12 needs this to lower programs for it."""
  gpu = jax.sharding.AbstractDevice("NVIDIA H100", num_cores=132, platform="gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
  with jax.sharding.use_abstract_mesh(mesh):
    yield


def pytest_xdist_auto_num_workers() -> int:
  """One worker more than cores, at most 8: many tests wait for a sandbox."""
  return min(8, len(os.sched_getaffinity(0)) + 1)


def pytest_report_header() -> str:
  """Reports the sandbox back-end; tests of the jail are skipped without one."""
  why = f", this machine has no jail: {WHY}" if WHY else ""
  return f"tools.sandbox of tests: {BACKEND}{why}"


def pytest_runtest_logreport(report) -> None:
  """Adds a skipped test to the file in COA_SKIPS, for .ci/run."""
  path = os.environ.get("COA_SKIPS")
  if path and report.skipped and not hasattr(report, "wasxfail"):
    reason = " ".join(report.longrepr[-1].split())
    with open(path, "a", encoding="utf-8") as f:
      f.write(f"{report.nodeid}\t{reason}\n")


pytest_collectreport = pytest_runtest_logreport  # for a file skipped at import
