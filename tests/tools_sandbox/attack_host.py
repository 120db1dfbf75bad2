"""Runs the attacks against a victim process on the host; prints JSON.

A separate program, so that it can become an ordinary user first:
attack_host.py BACKEND [--nobody] [--only=REGEX]. BACKEND `session` is the jail, with
each attack as the second cell of a session. The victim runs as the same user and holds
a secret in its environment, a secret file, open sockets and shared memory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from attacks import PRELUDE, Attack  # noqa: E402
from attacks_shared import ATTACKS  # noqa: E402

from tools_sandbox.host.pool import SandboxPool  # noqa: E402
from tools_sandbox.jail import kernel  # noqa: E402
from tools_sandbox.jail.wire import Limits, Result, Verdict  # noqa: E402

_NOBODY = 65534
_SECRET = "s3cret-of-the-host"
# Unique to this run: another one may run at the same time.
_MARK = f"mark-of-the-host-{os.getpid()}"
_SHM_KEY = 0x7A6A0000 + os.getpid() % 65536
_LIMITS = Limits(
  wall_s=10, cpu_s=10, memory_mb=256, file_mb=8, processes=32, disk_mb=16, inodes=500
)
# Programs of these groups use up their time, unless their verdicts exclude a timeout: a
# short limit is enough. If a timeout is the only verdict, one second is enough.
_SHORT = {"bombs", "time", "races"}
_SHORT_S = 2.0
_TIMEOUT_S = 1.0


def victim(folder: str, mark: str, shm_key: int) -> None:
  """Listens wherever attacks connect; prints its TCP port; ends when stdin closes."""
  import ctypes

  tcp = socket.create_server(("127.0.0.1", 0))
  udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
  udp.bind(tcp.getsockname())
  sockets = [tcp, udp]
  for name in (f"\0{mark}", f"{folder}/socket"):
    for kind, ending in ((socket.SOCK_STREAM, ""), (socket.SOCK_DGRAM, "-DATAGRAM")):
      s = socket.socket(socket.AF_UNIX, kind)
      s.bind(name + ending)
      if not ending:
        s.listen(99)
      sockets.append(s)
  libc = ctypes.CDLL(None)
  shared = libc.shmget(shm_key, 4096, 0o1666)
  print(tcp.getsockname()[1], flush=True)
  sys.stdin.read()
  libc.shmctl(shared, 0, None)
  del sockets


@contextlib.contextmanager
def _host():
  """Starts a victim; yields values for the names in a program."""
  with tempfile.TemporaryDirectory(prefix="attack-host-") as folder:
    os.chmod(folder, 0o755)
    secret = os.path.join(folder, "secret")
    with open(secret, "w", encoding="ascii") as f:
      f.write(_SECRET)
    with subprocess.Popen(
      [sys.executable, __file__, "--victim", folder, _MARK, str(_SHM_KEY)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={"SECRET": _SECRET},
    ) as process:
      yield {
        "SECRET_PATH": secret,
        "'SECRET'": repr(_SECRET),
        "HOST_PID": str(process.pid),
        "HOST_NAME": os.uname().nodename,
        "HOST_MARK": _MARK,
        "HOST_FOLDER": folder,
        "PORT": process.stdout.readline().strip(),
        "ABSTRACT": _MARK,
        "SOCKET_PATH": f"{folder}/socket",
        "SHM_KEY": str(_SHM_KEY),
        "HOST_FOLDERS": os.path.dirname(os.path.realpath(sys.prefix)),
        "PACKAGE": str(HERE.parent.parent / "tools_sandbox"),
        "LEFT": f"LEFT-{os.getpid()}",
        "PLANTED": f"/tmp/planted-{os.getpid()}",
      }
      process.stdin.close()


def _fill(program: str, names: dict[str, str]) -> str:
  for name in sorted(names, key=len, reverse=True):
    program = program.replace(name, names[name])
  return PRELUDE + program


def _alive(word: str) -> bool:
  for name in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as f:
      if word.encode() in f.read().split(b"\0"):
        return True
  return False


def _faults(
  attack: Attack, result: Result, after: Result | None, wall_s: float, leaves: str
):
  """Yields the reasons to call the attack a breach; none if it was contained."""
  if "BREACH" in result.stdout + (after.stdout if after else ""):
    yield "it printed BREACH"
  if result.verdict == Verdict.INFRASTRUCTURE:
    yield f"it broke the service: {result.stderr[-300:]}"
  elif attack.verdicts and result.verdict not in attack.verdicts:
    yield f"verdict {result.verdict}, not {attack.verdicts}: {result.stderr[-300:]}"
  if wall_s > attack.within_s:
    yield f"it took {wall_s:.1f} s"
  if leaves and _alive(leaves):
    yield "a process of it lives"


def run(backend: str, only: str = "") -> dict[str, list[str] | None]:
  """Attack -> its faults, or None if it does not run on this back-end."""
  out = {}
  jailed = backend in ("jail", "session")
  walls = "jail" if jailed else backend
  with _host() as names, SandboxPool(1, _LIMITS, (), backend=walls) as pool:

    def execute(program: str, limits: Limits = _LIMITS) -> Result:
      if backend != "session":
        return pool.run(_fill(program, names), limits=limits)
      with pool.session(limits) as session:
        session.run("print(1)")
        return session.run(_fill(program, names))

    def execute_beside(attack: Attack, limits: Limits) -> tuple[Result, Result]:
      beside = _fill(attack.beside, names)
      host = [sys.executable, "-c", beside if attack.on_the_host else ""]
      with (
        SandboxPool(1, _LIMITS, (), backend=walls) as other,
        concurrent.futures.ThreadPoolExecutor() as threads,
      ):
        other.run("")  # its slot is ready before both begin
        both = [
          threads.submit(execute, attack.program, limits),
          threads.submit(other.run, beside),
        ]
        done = subprocess.run(host, capture_output=True, text=True, check=False)
        result, after = (run.result() for run in both)
      printed = after.stdout + done.stdout
      return result, dataclasses.replace(after, stdout=printed)

    for attack in ATTACKS:
      if not re.search(only, f"{attack.group}/{attack.name}"):
        continue
      if not jailed and not attack.harmless:
        out[attack.name] = None
        continue
      wall_limit = _LIMITS.wall_s
      if attack.verdicts == ("timeout",):
        wall_limit = _TIMEOUT_S
      elif attack.group in _SHORT and (
        not attack.verdicts or "timeout" in attack.verdicts
      ):
        wall_limit = _SHORT_S
      limits = dataclasses.replace(_LIMITS, wall_s=wall_limit, cpu_s=wall_limit)
      start = time.monotonic()
      if attack.beside:
        result, after = execute_beside(attack, limits)
      else:
        result = execute(attack.program, limits)
        after = execute(attack.after) if attack.after else None
      wall_s = time.monotonic() - start
      leaves = attack.leaves.replace("LEFT", names["LEFT"])
      faults = list(_faults(attack, result, after, wall_s, leaves))
      if jailed and pool.run("print(2)").stdout != "2\n":
        faults.append("the slot serves no more")
      out[attack.name] = faults
      for path in pathlib.Path("/tmp").glob(f"planted-{os.getpid()}*"):
        path.unlink()
  return out


def become_nobody() -> None:
  """Gives up root; an interpreter in a folder only root can enter stays reachable.

  Raises:
    OSError: this process may not change its user or its mounts.
  """
  base = os.path.realpath(sys.base_prefix)
  kernel.unshare(kernel.NEWNS)
  kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
  parents = [str(p) for p in reversed(pathlib.Path(base).parents)]
  locked = [p for p in parents if not os.stat(p).st_mode & 1]
  if locked:
    folder_fd = os.open(base, os.O_PATH)
    kernel.mount("tmpfs", locked[0], "tmpfs", 0, "mode=755")
    umask = os.umask(0o022)
    os.makedirs(base)
    os.umask(umask)
    bind = kernel.MS_BIND | kernel.MS_REC
    kernel.mount(f"/proc/self/fd/{folder_fd}", base, "", bind)
  os.setgroups([])
  os.setresgid(_NOBODY, _NOBODY, _NOBODY)
  os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def main() -> None:
  """See the module docstring."""
  first, *options = sys.argv[1:]
  if first == "--victim":
    folder, mark, shm_key = options
    return victim(folder, mark, int(shm_key))
  if "--nobody" in options:
    become_nobody()
    options.remove("--nobody")
    os.execv(sys.executable, [sys.executable, __file__, first, *options])
  only = "".join(o.removeprefix("--only=") for o in options)
  print(json.dumps(run(first, only), indent=1))


if __name__ == "__main__":
  main()
