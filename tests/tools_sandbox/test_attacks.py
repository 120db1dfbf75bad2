"""Every attack is contained by the jail, as root and as an ordinary user.

`test_the_suite_can_fail` tests the suite itself: without the jail many attacks succeed.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import pytest
from attacks_shared import ATTACKS

from tests.backend import MISSING, needs_jail

_HOST = pathlib.Path(__file__).parent / "attack_host.py"
# Attacks that succeed without a jail: quick, one per class, and none that depends on
# luck, as finding remains in an allocator's memory does.
_OPEN = {
  "secret_file": "host reads",
  "ptrace_a_child": "parent's environment and memory",
  "tcp_to_loopback": "network",
  "signal_the_host": "signals to others",
  "new_user_namespace": "mounts, namespaces, kernel",
  "disk": "bombs",
  "tick_after_the_end": "daemons",
  "claim_infrastructure": "verdict forging",
  "process_of_another_run": "other runs",
}


# At least one per class of `_OPEN`, and the forgers. README.md reports all
# attacks in sessions.
# fmt: off
_IN_A_SESSION = (
  "secret_file", "host_root_through_proc", "ptrace_a_child", "take_a_descriptor",
  "tcp_to_loopback", "signal_the_host", "new_user_namespace", "disk",
  "tick_after_the_end", "claim_infrastructure", "print_a_frame",
  "memory_of_the_last_run",
)
# fmt: on
# The attacks of each host, as regular expressions over GROUP/NAME. The jail's are two
# halves of equal duration, each on its own host: both mostly wait.
_PARTS = {
  "jail": ("^counters|^two", "^(?!counters|two)"),
  "session": (f"/({'|'.join(_IN_A_SESSION)})$",),
  "subprocess": (f"/({'|'.join(_OPEN)})$",),
}


@pytest.fixture(scope="module")
def hosts(request):
  """(back-end, user) -> futures of the faults found; all hosts start at once."""
  runs = []
  if os.geteuid() == 0:
    runs.append(("subprocess", "root"))
    if not MISSING:
      runs += [("jail", "root"), ("session", "root")]
      if any("[nobody-" in item.name for item in request.session.items):
        runs.append(("jail", "nobody"))
  with concurrent.futures.ThreadPoolExecutor() as threads:
    yield {
      run: [threads.submit(_faults, *run, only) for only in _PARTS[run[0]]]
      for run in runs
    }


def _faults(backend: str, user: str, only: str) -> dict[str, list[str] | None]:
  """Attack -> its faults, as `attack_host` prints them."""
  command = [sys.executable, str(_HOST), backend, f"--only={only}"]
  if user == "nobody":
    command.append("--nobody")
  done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
  assert done.returncode == 0, done.stderr[-2000:]
  return json.loads(done.stdout)


def _of(hosts, backend: str, user: str, attack: str) -> list[str] | None:
  if (backend, user) not in hosts:
    pytest.skip("only root can become another user; this run is an ordinary one")
  found = {}
  for part in hosts[backend, user]:
    found |= part.result()
  return found[attack]


def test_the_suite_is_large_and_its_names_unique():
  assert len({a.name for a in ATTACKS}) == len(ATTACKS) >= 60
  assert {a.name: a.group for a in ATTACKS}.items() >= _OPEN.items()


@needs_jail
@pytest.mark.parametrize("attack", [a.name for a in ATTACKS])
@pytest.mark.parametrize(
  "user", ["root", pytest.param("nobody", marks=pytest.mark.slow)]
)
def test_contained(hosts, user, attack):
  assert _of(hosts, "jail", user, attack) == []


@pytest.mark.parametrize("attack", _OPEN)
def test_the_suite_can_fail(hosts, attack):
  # `_OPEN` was measured as root.
  assert _of(hosts, "subprocess", "root", attack)


@needs_jail
@pytest.mark.parametrize("attack", _IN_A_SESSION)
def test_contained_as_a_cell_of_a_session(hosts, attack):
  assert _of(hosts, "session", "root", attack) == []
