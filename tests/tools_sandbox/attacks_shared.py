"""Hostile programs, continued: resources shared with other runs and the host."""

from __future__ import annotations

from attacks_limits import ATTACKS as _OTHERS
from attacks_limits import _group

MACHINE = _group(
  "the machine",
  host_folders_among_the_mounts=(
    "shows('PACKAGE', *('/proc/self/' + n for n in ('mountinfo', 'mounts', "
    "'mountstats', 'maps', 'cgroup', 'cmdline', 'auxv')))\n"
    "shows('HOST_FOLDERS', '/proc/self/mountinfo', '/proc/self/maps')"
  ),
  load=(
    "breach(call(99, ctypes.create_string_buffer(256)) >= 0)\n"
    "opens('/proc/loadavg', '/proc/stat', '/proc/uptime', '/proc/meminfo')\n"
    "with attempt(): os.getloadavg()"
  ),
  pages_that_others_have_read=(
    "fd, end = os.open(os.__file__, os.O_RDONLY), 8\n"
    "try:\n  os.preadv(fd, [bytearray(8)], 0, os.RWF_NOWAIT)\n  breach()\n"
    "except BlockingIOError: breach()\nexcept OSError as e: print(e)\n"
    "breach(call(451, fd, b'\\0' * 16, ctypes.create_string_buffer(64), 0) >= 0)\n"
    "import mmap\nm = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)\n"
    "start = libc.mmap\nstart.restype = ctypes.c_void_p\n"
    "at = start(None, ctypes.c_size_t(4096), 1, 2, fd, ctypes.c_long(0))\n"
    "breach(call(27, ctypes.c_void_p(at), ctypes.c_size_t(4096), b'\\0') >= 0)"
  ),
  pages_that_others_have_too=(
    "import mmap\nm = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
    "\nwith attempt(): m.madvise(12)"
  ),
)

# This loop looks for a lock while the other program still holds it.
_LOOK = (
  "import fcntl, struct\nf = open(os.__file__)\nend = time.time() + 1.2\n"
  "while time.time() < end:\n  time.sleep(0.01)\n"
)
# Every kind of file a run can open; some are the same inode in all runs.
_FILES = """\
import fcntl, json, socket, struct
def files():
  names = ['/', '/proc', '/etc', '/etc/passwd', sys.executable, json.__file__]
  names += [os.path.dirname(json.__file__), '/lib', '/usr/lib', '/site']
  for folder in ('/dev', '/proc/self', '/proc/self/ns', '/proc/self/net', '/python'):
    if os.path.isdir(folder):
      names += [folder] + [f'{folder}/{n}' for n in sorted(os.listdir(folder))]
  for name in names:
    for flags in (os.O_RDWR, os.O_RDONLY):
      try:
        yield name, os.open(name, flags | os.O_NONBLOCK)
        break
      except OSError: pass
  yield 'eventfd', os.eventfd(0)
  yield 'timerfd', call(283, 0, 0)
  yield 'signalfd', call(289, -1, b'\\0' * 8, 8, 0)
  yield from enumerate(os.pipe())
  yield 'pair', socket.socketpair()[0].detach()
def lock(f, kind, how):
  try:
    (fcntl.flock if how else fcntl.lockf)(f, kind)
    return 'locked'
  except OSError as e: return e.errno
ALL = dict(files())
KINDS = fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_SH | fcntl.LOCK_NB
"""
TOGETHER = _group(
  "two runs at once",
  # One program locks and unlocks every file in turns; the other must see no difference.
  locks_of_any_file={
    "program": _FILES
    + (
      "end = time.time() + 2.4\nwhile time.time() < end:\n"
      "  for kind in KINDS:\n"
      "    for f in ALL.values(): lock(f, kind, 0), lock(f, kind, 1)\n"
      "    time.sleep(0.2)\n"
      "    for f in ALL.values(): [lock(f, fcntl.LOCK_UN, how) for how in (0, 1)]\n"
      "    time.sleep(0.2)"
    ),
    "verdicts": ("ok",),
    "beside": _FILES
    + (
      "sys.excepthook = lambda *e: (print(e), breach())\n"
      "def see(f):\n  out = []\n  for kind in KINDS:\n    for how in (0, 1):\n"
      "      out.append(lock(f, kind, how))\n      lock(f, fcntl.LOCK_UN, how)\n"
      "  for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):\n"
      "    row = struct.pack('hhqqi4x', kind, 0, 0, 0, 0)\n"
      "    try: out.append(fcntl.fcntl(f, fcntl.F_GETLK, row))\n"
      "    except OSError as e: out.append(e.errno)\n"
      "  return out\n"
      "seen = {n: see(f) for n, f in ALL.items()}\nend = time.time() + 1.8\n"
      "while time.time() < end:\n  for n, f in ALL.items():\n"
      "    if see(f) != seen[n]:\n      print(n, see(f), seen[n])\n      breach()\n"
      "      seen[n] = see(f)"
    ),
  },
  record_lock={
    "program": (
      "import fcntl\nf = open(os.__file__)\nfcntl.lockf(f, fcntl.LOCK_SH)\n"
      "time.sleep(1.8)"
    ),
    "beside": _LOOK
    + (
      "  row = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)\n"
      "  row = fcntl.fcntl(f, fcntl.F_GETLK, row)\n"
      "  breach(struct.unpack('hhqqi4x', row)[0] != fcntl.F_UNLCK)"
    ),
  },
  whole_file_lock={
    "program": (
      "import fcntl\nf = open(os.__file__)\nfcntl.flock(f, fcntl.LOCK_EX)\n"
      "time.sleep(1.8)"
    ),
    "beside": _LOOK
    + (
      "  try:\n    fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
      "    fcntl.flock(f, fcntl.LOCK_UN)\n  except BlockingIOError: breach()"
    ),
  },
)

# Common operations in programs, which use the kernel's counters.
_WORKS = """\
import select, socket, subprocess, tempfile, threading
def works():
  timer = ctypes.c_int()
  if call(222, 1, None, ctypes.byref(timer)):
    raise OSError(ctypes.get_errno(), 'timer_create')
  call(226, timer)
  pipe = os.pipe()
  pair = socket.socketpair()
  pair[0].send(os.read(pipe[0], os.write(pipe[1], b'x' * 4096)))
  try:
    socket.send_fds(pair[0], [b'x'], list(pipe))
    _, fds, _, _ = socket.recv_fds(pair[1], 9999, 9)
    for fd in fds: os.close(fd)
  except PermissionError: pass
  try:
    poll = select.epoll()
    poll.register(pipe[0])
    poll.close()
  except OSError as e:
    if e.errno != 38: raise
  for end in (*pipe, *(s.detach() for s in pair)): os.close(end)
  with tempfile.TemporaryFile() as f: f.write(b'x')
  thread = threading.Thread(target=int)
  thread.start()
  thread.join()
  if os.fork() == 0: os._exit(0)
  os.wait()
end = time.time() + 1.8
while time.time() < end:
  try:
    works()
  except (OSError, RuntimeError) as e:
    print(repr(e))
    breach()
    break
"""
_EVERY_PROCESS = "for _ in range(29):\n  if not os.fork(): break\n"


def _worst(program: str) -> dict:
  """Takes and keeps all it can, while other programs must still be able to work."""
  program += "\ntime.sleep(1)"
  more = {"verdicts": ("ok", "error", "memory", "timeout"), "harmless": False}
  return {"program": program, "beside": _WORKS, "on_the_host": True, **more}


COUNTERS = _group(
  "counters of the kernel",
  timers=_worst(
    "n, timer = 0, ctypes.c_int()\n"
    "while n < 200000 and not call(222, 1, None, ctypes.byref(timer)): n += 1\n"
    "breach(n > 5000)"
  ),
  waiting_signals=_worst(
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    "row, n = ctypes.create_string_buffer(b'\\0' * 8 + b'\\xff' * 4, 128), 0\n"
    "while n < 200000 and not call(129, os.getpid(), 40, row): n += 1\n"
    "breach(n > 5000)"
  ),
  descriptors_in_flight=_worst(
    "import socket\npairs, n = [socket.socketpair() for _ in range(9)], 0\n"
    "try:\n  for a, b in pairs:\n    for _ in range(10):\n"
    "      socket.send_fds(a, [b'x'], [1] * 200)\n      n += 200\n"
    "except OSError as e: print(e)\nbreach(n > 0)"
  ),
  pipes=_worst(
    _EVERY_PROCESS + "try:\n  while True: os.pipe()\nexcept OSError as e: print(e)"
  ),
  sockets=_worst(
    _EVERY_PROCESS + "import socket\npairs = []\n"
    "try:\n  while True:\n    pairs += socket.socketpair()\n"
    "    pairs[-1].setblocking(False)\n    pairs[-1].send(b'x' * 400000)\n"
    "except OSError as e: print(e)"
  ),
  mapped_files=_worst(
    _EVERY_PROCESS + "start, end, n = libc.mmap, time.time() + 1, 0\n"
    "start.restype = ctypes.c_void_p\nwhile time.time() < end:\n"
    "  fd = os.open(os.__file__, os.O_RDONLY)\n"
    "  at = start(None, ctypes.c_size_t(4096), 1, 2, fd, ctypes.c_long(0))\n"
    "  os.close(fd)\n  if at == 2 ** 64 - 1: break"
  ),
  locks=_worst(
    "import fcntl\nend, f, n = time.time() + 1, open('f', 'w'), 0\n"
    "while time.time() < end:\n  fcntl.lockf(f, fcntl.LOCK_EX, 1, 1 << 40 - n)\n"
    "  n = (n + 1) % 40"
  ),
  processes=_worst(
    "for _ in range(99):\n  try:\n    if os.fork() == 0: time.sleep(9)\n"
    "  except OSError as e: print(e)"
  ),
  # inotify, epoll, fanotify, message queues, asynchronous input and output
  watches_and_queues=(
    "for nr in (253, 294, 213, 291): breach(call(nr, 1) >= 0)\n"
    "breach(call(300, 0, 0) >= 0)\nbreach(call(240, b'q', 0o102, 0o600, None) >= 0)\n"
    "breach(call(206, 9, ctypes.byref(ctypes.c_long())) >= 0)\n"
    "opens('/dev/ptmx', '/dev/pts/ptmx')"
  ),
  # EPERM whatever the number of huge pages: most machines have none.
  huge_pages=(
    "start = libc.mmap\nstart.restype = ctypes.c_void_p\n"
    "start(None, ctypes.c_size_t(2 << 20), 3, 0x40022, -1, ctypes.c_long(0))\n"
    "breach(ctypes.get_errno() != 1)"
  ),
  filters_of_sockets=(
    "import socket\na, b = socket.socketpair()\n"
    "code = ctypes.create_string_buffer(bytes.fromhex('0600000000000000'))\n"
    "row = bytes(ctypes.c_ulong(1)) + bytes(ctypes.c_ulong(ctypes.addressof(code)))\n"
    "with attempt(): a.setsockopt(1, 26, row)"
  ),
)

ATTACKS = [*_OTHERS, *MACHINE, *TOGETHER, *COUNTERS]
