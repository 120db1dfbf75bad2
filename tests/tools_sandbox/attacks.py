"""Hostile programs, as data: each prints BREACH if it succeeds.

`attack_host` replaces the names in capitals by the host's resources under attack.
Attacks do not harm the machine: they open a kernel file for writing but write nothing,
and send signal 0 to the host. An attack that would harm it if not contained has
`harmless=False` and runs in the jail only.
"""

from __future__ import annotations

import dataclasses

PRELUDE = """\
import contextlib, ctypes, fcntl, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def breach(yes=True):
  if yes:
    os.write(1, b'BREACH\\n')
@contextlib.contextmanager
def attempt():
  try:
    yield
    breach()
  except OSError as e:
    print(e)
def call(number, *args):
  return libc.syscall(ctypes.c_long(number), *args)
def opens(*paths, flags=os.O_RDONLY):
  for path in paths:
    try:
      os.close(os.open(path, flags))
      breach()
    except OSError as e:
      print(path, e.errno)
def shows(word, *paths):
  for path in paths:
    try:
      with open(path, 'rb') as f:
        breach(word.encode() in f.read(1 << 20))
    except OSError as e:
      print(path, e.errno)
"""


@dataclasses.dataclass(frozen=True)
class Attack:
  """One hostile program.

  Attributes:
    group: its class.
    name: unique.
    program: source, run after PRELUDE.
    verdicts: a contained run has one of these; () allows any but `infrastructure`.
    after: a second program, in a later run, which looks for leftovers of the first.
    beside: a second program, in another slot at the same time.
    on_the_host: whether `beside` also runs as the host's user, without a jail.
    within_s: maximum wall seconds of the run.
    leaves: an argument that no host process may have on its command line afterwards.
    harmless: False if it must not run without a jail.
  """

  group: str
  name: str
  program: str
  verdicts: tuple[str, ...] = ()
  after: str = ""
  beside: str = ""
  on_the_host: bool = False
  within_s: float = 45.0
  leaves: str = ""
  harmless: bool = True


def _group(group: str, **programs: str | dict) -> list[Attack]:
  out = []
  for name, program in programs.items():
    more = program if isinstance(program, dict) else {"program": program}
    out.append(Attack(group, name, **more))
  return out


HOST_READS = _group(
  "host reads",
  secret_file="shows('SECRET', 'SECRET_PATH')",
  host_accounts="shows('root:', '/etc/passwd', '/etc/shadow')",
  home_folders="opens('/root', '/home', flags=os.O_RDONLY | os.O_DIRECTORY)",
  host_root_through_proc="opens('/proc/1/root/etc', '/proc/HOST_PID/root')",
  host_folder_through_cwd=(
    "opens('/proc/HOST_PID/cwd', f'/proc/{os.getppid() or 1}/cwd')"
  ),
  dot_dot_out_of_the_root=(
    "shows('SECRET', '/' + '../' * 40 + 'SECRET_PATH', '../' * 40 + 'SECRET_PATH')"
  ),
  symbolic_link_out=(
    "os.symlink('SECRET_PATH', 'link')\nshows('SECRET', 'link', '/dev/fd/../SECRET')"
  ),
  block_devices="opens('/dev/vda', '/dev/sda', '/dev/mem', '/dev/kmem', '/dev/port')",
  make_a_block_device=(
    "try:\n  os.mknod('disk', 0o60600, os.makedev(254, 0))\n  opens('disk')\n"
    "except OSError as e: print(e)"
  ),
  open_by_handle="breach(call(304, -100, b'1234567890', 0) >= 0)",
  machine_files=(
    "opens('/proc/iomem', '/proc/kallsyms', '/proc/modules', '/proc/cmdline', "
    "'/proc/meminfo', '/sys/class/net', '/sys/kernel', '/proc/config.gz')"
  ),
  host_name="breach(os.uname().nodename == 'HOST_NAME')",
)

PARENT = _group(
  "parent's environment and memory",
  environment_of_the_host="shows('SECRET', '/proc/HOST_PID/environ')",
  environment_of_any=(
    "shows('SECRET', *(f'/proc/{p}/environ' for p in os.listdir('/proc') "
    "if p.isdigit()))"
  ),
  own_environment="breach('SECRET' in repr(dict(os.environ)))",
  command_lines=(
    "shows('HOST_MARK', *(f'/proc/{p}/cmdline' for p in os.listdir('/proc') "
    "if p.isdigit()))"
  ),
  memory_of_the_parent=(
    "opens(f'/proc/{os.getppid() or 1}/mem', '/proc/1/mem', '/proc/HOST_PID/mem')"
  ),
  maps_of_the_parent=(
    "shows('-', f'/proc/{os.getppid() or 1}/maps', '/proc/1/maps', "
    "'/proc/HOST_PID/maps')"
  ),
  process_vm_readv=(
    "buffer = ctypes.create_string_buffer(8)\n"
    "class IO(ctypes.Structure):\n"
    "  _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
    "mine = IO(ctypes.addressof(buffer), 8)\n"
    "for pid in (os.getppid(), 1, HOST_PID):\n  theirs = mine\n  try:\n"
    "    start = open(f'/proc/{pid}/maps').read().split('-')[0]\n"
    "    theirs = IO(int(start, 16), 8)\n  except OSError: pass\n"
    "  breach(call(310, pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0)"
  ),
  ptrace_the_parent=(
    "for pid in (os.getppid(), 1, HOST_PID):\n"
    "  breach(call(101, 0x4206, pid, 0, 0) >= 0)"
  ),
  ptrace_a_child=(
    "pid = os.fork()\nif not pid:\n  time.sleep(1)\n  os._exit(0)\n"
    "breach(call(101, 0x4206, pid, 0, 0) >= 0)"
  ),
  inherited_descriptors=(
    "for fd in range(3, 1024):\n  try:\n    os.fstat(fd)\n    breach()\n"
    "  except OSError: pass"
  ),
  take_a_descriptor=(
    "pid = call(434, os.getppid() or 1, 0)\nbreach(pid >= 0)\n"
    "breach(call(438, pid, 0, 0) >= 0)"
  ),
)

NETWORK = _group(
  "network",
  tcp_to_loopback="with attempt(): socket.create_connection(('127.0.0.1', PORT), 1)",
  udp_socket=(
    "with attempt():\n  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "  s.sendto(b'x', ('127.0.0.1', PORT))"
  ),
  ip6="with attempt(): socket.socket(socket.AF_INET6)",
  raw_and_packet=(
    "for f, k in ((2, 3), (17, 3), (10, 3)):\n  with attempt(): socket.socket(f, k)"
  ),
  vsock="breach(call(41, 40, 1, 0) >= 0)",
  netlink="breach(call(41, 16, 3, 0) >= 0)",
  bluetooth_and_alg="for f in (31, 38, 29, 44): breach(call(41, f, 5, 0) >= 0)",
  listen="with attempt(): socket.create_server(('127.0.0.1', 0))",
  abstract_unix_socket=(
    "with attempt(): socket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')"
  ),
  unix_socket_of_the_host=(
    "with attempt(): socket.socket(socket.AF_UNIX).connect('SOCKET_PATH')"
  ),
  socket_pair_sends_to_a_name=(
    "a, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
    "for name in ('\\0ABSTRACT-DATAGRAM', 'SOCKET_PATH-DATAGRAM'):\n"
    "  with attempt(): a.sendto(b'x', name)"
  ),
  interfaces="breach(any(n != 'lo' for _, n in socket.if_nameindex()))",
  look_up_a_name="with attempt(): socket.gethostbyname('localhost')",
)

SIGNALS = _group(
  "signals to others",
  signal_the_host="with attempt(): os.kill(HOST_PID, 0)",
  signal_a_low_pid=(
    "for pid in range(3, 400):\n  if pid in (os.getpid(), os.getppid()): continue\n"
    "  try:\n    os.kill(pid, 0)\n    breach()\n  except OSError: pass"
  ),
  kill_the_parent={
    "program": (
      "import signal\nfor s in (2, 15, 1, 3, 10, 24, 9):\n"
      "  os.kill(os.getppid() or 1, s)\n"
      "time.sleep(0.2)\nprint('alive')"
    ),
    "verdicts": ("ok", "error"),
  },
  stop_the_parent={
    "program": (
      "import signal\nos.kill(os.getppid() or 1, signal.SIGSTOP)\nprint('alive')"
    ),
    "verdicts": ("ok", "error"),
  },
  kill_all={
    "program": "os.kill(-1, 9)\nprint('alive')",
    "harmless": False,
  },
  own_a_signal_of_the_host="with attempt(): fcntl.fcntl(os.pipe()[0], 8, HOST_PID)",
  pidfd_signal="breach(call(424, call(434, 1, 0), 0, 0, 0) >= 0)",
  priority_of_others="with attempt(): os.setpriority(os.PRIO_PROCESS, HOST_PID, 1)",
  limits_of_others=(
    "import resource\n"
    "with attempt(): resource.prlimit(os.getppid() or 1, resource.RLIMIT_CPU)"
  ),
  affinity_of_others="with attempt(): os.sched_setaffinity(os.getppid() or 1, {0})",
  shared_memory_of_the_host="breach(call(29, SHM_KEY, 0, 0) >= 0)",
)

KERNEL = _group(
  "mounts, namespaces, kernel",
  mount_a_tmpfs="breach(call(165, b'x', b'/tmp', b'tmpfs', 0, 0) >= 0)",
  remount_the_root="breach(call(165, 0, b'/', 0, 32, 0) >= 0)",
  unmount_proc="breach(call(166, b'/proc', 2) >= 0)",
  new_mount_calls=(
    "breach(call(430, b'tmpfs', 0) >= 0)\nbreach(call(428, -100, b'/', 1) >= 0)\n"
    "breach(call(442, -100, b'/', 0, b'\\0' * 32, 32) >= 0)"
  ),
  new_user_namespace="breach(call(272, 0x10000000) >= 0)",
  namespaces_by_clone=(
    "pid = call(56, ctypes.c_ulong(0x10000000 | 17), 0, 0, 0, 0)\n"
    "if pid == 0: os._exit(0)\nbreach(pid > 0)"
  ),
  namespaces_by_clone3=(
    "import struct\nargs = struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
    "pid = call(435, args, 64)\nif pid == 0: os._exit(0)\nbreach(pid > 0)"
  ),
  enter_a_namespace=(
    "for n in ('net', 'mnt', 'user', 'pid'):\n  try:\n"
    "    fd = os.open(f'/proc/{os.getppid() or 1}/ns/{n}', 0)\n"
    "    breach(call(308, fd, 0) >= 0)\n  except OSError as e: print(e)"
  ),
  change_root=(
    "os.mkdir('r')\nbreach(call(161, b'r') >= 0)\nbreach(call(155, b'r', b'r') >= 0)"
  ),
  become_another_user=(
    "for nr in (105, 106, 113, 114, 117, 119): breach(call(nr, 12345, 12345, 0) >= 0)"
  ),
  raise_capabilities=(
    "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\nbreach(call(126, header, "
    "(ctypes.c_uint32 * 6)(*[0xffffffff] * 6)) >= 0)"
  ),
  set_uid_program=(
    "try:\n  os.execv('/usr/bin/su', ['su', '-c', 'echo BREACH'])\n"
    "except OSError as e: print(e)"
  ),
  core_pattern="opens('/proc/sys/kernel/core_pattern', flags=os.O_WRONLY)",
  sysrq="opens('/proc/sysrq-trigger', '/proc/sys/kernel/sysrq', flags=os.O_WRONLY)",
  kernel_log="opens('/dev/kmsg', '/proc/kmsg')\nbreach(call(103, 10, 0, 0) >= 0)",
  own_oom_score=(
    "opens('/proc/HOST_PID/oom_score_adj', '/proc/1/oom_score_adj', flags=os.O_WRONLY)"
  ),
  bpf="breach(call(321, 0, b'\\0' * 72, 72) >= 0)",
  keyrings=(
    "breach(call(250, 0, ctypes.c_int(-3), 1) >= 0)\n"
    "breach(call(248, b'user', b'k', b'v', 1, ctypes.c_int(-3)) >= 0)"
  ),
  userfaultfd="breach(call(323, 1) >= 0)\nopens('/dev/userfaultfd')",
  io_uring="breach(call(425, 4, ctypes.create_string_buffer(120)) >= 0)",
  perf="breach(call(298, b'\\0' * 112, 0, -1, -1, 0) >= 0)",
  memfd="breach(call(319, b'x', 0) >= 0)",
  loosen_the_filter="breach(call(317, 1, 0, b'\\0' * 16) >= 0)",
  thirty_two_bit_calls={
    "program": (
      "import mmap\ncode = bytes.fromhex('b814000000cd80c3')\n"
      "m = mmap.mmap(-1, 4096, prot=7)\nm.write(code)\n"
      "f = ctypes.CFUNCTYPE(ctypes.c_int)("
      "ctypes.addressof(ctypes.c_char.from_buffer(m)))\nbreach(f() == os.getpid())"
    ),
  },
  x32_calls="breach(call(0x40000000 + 39) == os.getpid())",
  quota_and_swap="breach(call(167, b'x', 0) >= 0)\nbreach(call(179, 0, 0, 0, 0) >= 0)",
  clock_and_name=(
    "breach(call(170, b'h', 1) >= 0)\nbreach(call(227, 0, b'\\0' * 16) >= 0)"
  ),
  modules_and_reboot=(
    "breach(call(175, b'', 0, b'') >= 0)\nbreach(call(246, 0, 0, 0, 0) >= 0)"
  ),
  terminal_injection="breach(call(16, 0, 0x5412, b'x') >= 0)",
)
