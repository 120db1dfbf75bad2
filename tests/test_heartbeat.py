"""A hanging program ends itself and reports where; a working program continues."""

from __future__ import annotations

import subprocess
import sys
import time

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


def run(before: str) -> tuple[int, str, float]:
  began = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-c", HANGS.format(before=before)],
    capture_output=True,
    text=True,
    timeout=60,
  )
  return done.returncode, done.stderr, time.monotonic() - began


def test_what_hangs_ends_with_the_stacks_of_all_threads():
  status, errors, _ = run("")
  assert status == 1
  assert errors.startswith("Timeout") and errors.count("in hold_on") == 2, errors


def test_what_moves_is_left_alone_and_watched_on():
  status, _, seconds = run(BUSY)
  # 3 s of work, then 1 s until the watch ends it.
  assert status == 1 and seconds > 4


def test_a_watch_can_be_ended():
  status, errors, _ = run("heartbeat.watch(0); time.sleep(2.5); raise SystemExit(7)")
  assert (status, errors) == (7, "")
