"""A hanging program ends itself and reports where; a working program continues."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import time

import pytest

HANGS = """
import threading, time
from coa_jax.runtime import heartbeat

def hold_on():
  time.sleep(600)

heartbeat.watch(1)
threading.Thread(target=hold_on, daemon=True).start()
{before}
hold_on()
"""
BUSY = """
until = time.monotonic() + 3
while time.monotonic() < until:
  time.sleep(0.1)
  heartbeat.beat()
"""


# Name -> what the program does before it hangs.
PROGRAMS = {
  "hangs": "",
  "works": BUSY,
  "no watch": "heartbeat.watch(0); time.sleep(2.5); raise SystemExit(7)",
}


def run(name: str) -> tuple[int, str, float]:
  """Runs a program; returns its status, standard error and seconds."""
  began = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", HANGS.format(before=PROGRAMS[name])],
    capture_output=True,
    text=True,
    timeout=60,
  )
  return done.returncode, done.stderr, time.monotonic() - began


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str, float]]:
  """`run` of all programs at once: they wait most of their time."""
  with concurrent.futures.ThreadPoolExecutor() as threads:
    return dict(zip(PROGRAMS, threads.map(run, PROGRAMS), strict=True))


def test_a_program_that_hangs_ends_with_the_stacks_of_all_threads(ended):
  status, errors, _ = ended["hangs"]
  assert status == 1
  assert errors.startswith("Timeout") and errors.count("in hold_on") == 2, errors


def test_a_working_program_goes_on_and_stays_watched(ended):
  status, _, seconds = ended["works"]
  # 3 s of work, then 1 s until the watch ends it.
  assert status == 1 and seconds > 4


def test_a_watch_can_be_ended(ended):
  status, errors, _ = ended["no watch"]
  assert (status, errors) == (7, "")
