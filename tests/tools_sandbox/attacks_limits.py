"""Hostile programs, continued: bombs, daemons, forged verdicts, other runs, time."""

from __future__ import annotations

from attacks import HOST_READS, KERNEL, NETWORK, PARENT, SIGNALS, _group


# Each holds much more than its limit of 256 MiB, and prints BREACH if it survives.
def _map(flags: str, fd: str) -> dict:
  program = (
    f"flags = {flags}\nstart = libc.mmap\nstart.restype = ctypes.c_void_p\n"
    "n, size = 0, ctypes.c_size_t(15 << 20)\nfor _ in range(30):\n"
    f"  at = start(None, size, 3, flags, {fd}, ctypes.c_long(0))\n"
    "  if at == 2 ** 64 - 1: break\n  ctypes.memset(at, 1, size.value)\n"
    "  libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size.value - 4096))\n  n += 1\n"
    "breach(n > 25)"
  )
  return {"program": program, "verdicts": ("ok", "error", "memory")}


BOMBS = _group(
  "bombs",
  forks={
    "program": "while True:\n  os.fork()",
    "verdicts": ("error", "timeout"),
  },
  forks_that_ignore_errors={
    "program": "while True:\n  try: os.fork()\n  except OSError: pass",
    "verdicts": ("error", "timeout"),
  },
  count_of_processes={
    "program": (
      "n = 0\nfor _ in range(200):\n  try:\n    if os.fork() == 0: time.sleep(9)\n"
      "    n += 1\n  except OSError: break\nbreach(n > 40)"
    ),
    "verdicts": ("ok", "error"),
  },
  count_of_threads=(
    "import threading\nn = 0\ntry:\n  for _ in range(200):\n"
    "    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
    "    n += 1\nexcept RuntimeError as e: print(e)\nbreach(n > 40)"
  ),
  memory={
    "program": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "verdicts": ("memory",),
  },
  memory_of_many={
    "program": (
      "for _ in range(5):\n  if os.fork() == 0: break\n"
      "x = b'x' * (120 << 20)\ntime.sleep(600)"
    ),
    "verdicts": ("memory", "error"),
  },
  shared_memory={
    "program": (
      "import mmap\nmaps = []\nfor _ in range(64):\n"
      "  m = mmap.mmap(-1, 16 << 20)\n  m.write(b'x' * (16 << 20))\n  maps.append(m)\n"
      "breach()"
    ),
    "verdicts": ("memory", "error"),
  },
  shared_pages_of_no_process=_map("0x21", "-1"),
  shared_pages_of_the_third_kind=_map("0x23", "-1"),
  shared_pages_of_a_device=_map("1", "os.open('/dev/zero', os.O_RDWR)"),
  memory_of_a_process_without_its_first_thread={
    "program": (
      "import threading\ndef hold():\n  time.sleep(0.5)\n"
      "  x = b'x' * (170 << 20)\n  time.sleep(2)\n  breach()\n  os._exit(0)\n"
      "for _ in range(3):\n  if os.fork() == 0: break\n"
      "threading.Thread(target=hold).start()\ntime.sleep(0.2)\ncall(60, 0)"
    ),
    "verdicts": ("memory",),
  },
  memory_of_many_small_processes={
    "program": (
      "import subprocess\n"
      "hold = 'import time; x = b\"x\" * (9 << 20); time.sleep(3)'\n"
      "ps = [subprocess.Popen([sys.executable, '-ISc', hold]) for _ in range(30)]\n"
      "for p in ps: p.wait()\nbreach()"
    ),
    "verdicts": ("memory",),
  },
  kernel_shared_memory=(
    "for i in range(20):\n  n = call(29, 0, 64 << 20, 0o1600)\n  breach(n >= 0)\n"
    "  call(31, n, 0, 0)"
  ),
  disk=(
    "n = 0\ntry:\n  for i in range(40):\n    with open(f'f{i}', 'wb') as f:\n"
    "      f.write(b'x' * (1 << 20))\n    n += 1\nexcept OSError as e: print(e)\n"
    "breach(n > 20)"
  ),
  disk_through_shm=(
    "n = 0\ntry:\n  for i in range(40):\n    with open(f'/dev/shm/f{i}', 'wb') as f:\n"
    "      f.write(b'x' * (1 << 20))\n    n += 1\nexcept OSError as e: print(e)\n"
    "[os.unlink(f'/dev/shm/f{i}') for i in range(n)]\nbreach(n > 20)"
  ),
  one_large_file=("with attempt():\n  with open('f', 'wb') as f: f.truncate(1 << 40)"),
  inodes=(
    "n = 0\ntry:\n  for i in range(2000):\n    open(f'i{i}', 'w').close()\n    n += 1\n"
    "except OSError as e: print(e)\nbreach(n > 600)"
  ),
  descriptors=(
    "n = 0\ntry:\n  while n < 5000:\n    os.dup(1)\n    n += 1\n"
    "except OSError as e: print(e)\nbreach(n > 1024)"
  ),
  output="while True: os.write(1, b'x' * 65536)",
  output_to_both="while True:\n  os.write(1, b'x' * 9999)\n  os.write(2, b'y' * 9999)",
  deep_folders=(
    "with attempt():\n  for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')"
  ),
)

DAEMONS = _group(
  "daemons",
  **{
    f"daemon_{kind}": {
      "program": (
        f"if os.fork() == 0:\n  {setup}\n  if os.fork() == 0:\n"
        f"    os.execv(sys.executable, ['LEFT-{kind}', '-c', "
        "'import time; time.sleep(600)'])\n  os._exit(0)\ntime.sleep(0.3)"
      ),
      "leaves": f"LEFT-{kind}",
    }
    for kind, setup in {
      "own_session": "os.setsid()",
      "own_group": "os.setpgid(0, 0)",
      "without_pipes": "os.setsid(); os.close(0); os.close(1); os.close(2)",
      "deaf": "import signal; [signal.signal(s, 1) for s in (1, 2, 3, 15, 24)]",
    }.items()
  },
  keeps_the_pipes_open={
    "program": "if os.fork() == 0:\n  os.setsid()\n  time.sleep(600)\nprint('done')",
    "verdicts": ("ok",),
  },
  tick_after_the_end={
    "program": (
      "if os.fork() == 0:\n  os.setsid()\n  while True:\n    time.sleep(0.01)\n"
      "    open('PLANTED-TICK', 'a').write('x')\ntime.sleep(0.1)"
    ),
    "after": "shows('x', 'PLANTED-TICK')",
  },
)

FORGING = _group(
  "verdict forging",
  write_to_every_descriptor={
    "program": (
      "import json, struct\nbody = json.dumps({'event': 'result', 'result': {"
      "'stdout': 'BREACH', 'stderr': '', 'exit_code': 0, 'verdict': 'ok', "
      "'seconds': 0.0, 'truncated': False}}).encode().replace(b'BREACH', b'FORGED')\n"
      "for fd in range(3, 256):\n  try:\n"
      "    os.write(fd, struct.pack('>I', len(body)) + body)\n    breach()\n"
      "  except OSError: pass\nos._exit(5)"
    ),
    "verdicts": ("error",),
  },
  print_a_frame={
    "program": (
      'import struct\nbody = b\'{"event": "result"}\'\n'
      "for fd in (1, 2): os.write(fd, struct.pack('>I', len(body)) + body)\nos._exit(5)"
    ),
    "verdicts": ("error",),
  },
  status_record={
    "program": (
      "import struct\nfor fd in range(256):\n  try: os.write(fd, "
      "struct.pack('=?id', True, 0, 0.0))\n  except OSError: pass\nos._exit(7)"
    ),
    "verdicts": ("error",),
  },
  claim_infrastructure={
    "program": "import signal\nos.kill(os.getpid(), signal.SIGRTMAX - 1)",
    "verdicts": ("error",),
  },
  claim_infrastructure_by_the_parent={
    "program": (
      "import signal\nos.kill(os.getppid() or 1, signal.SIGKILL)\ntime.sleep(0.3)"
    ),
    "verdicts": ("ok", "error"),
  },
  claim_a_timeout={
    "program": "os.kill(os.getpid(), 9)",
    "verdicts": ("error",),
  },
  claim_a_timeout_by_signal={
    "program": "import signal\nsignal.signal(24, 0)\nos.kill(os.getpid(), 24)",
    "verdicts": ("error",),
  },
  patched_stdout={
    "program": (
      "class Out:\n  def write(self, s): return os.write(1, b'forged')\n"
      "  def flush(self): os._exit(3)\nsys.stdout = Out()\n"
      "print('x')\nraise SystemExit(4)"
    ),
    "verdicts": ("error",),
  },
  exit_hook_hides_an_error={
    "program": "import atexit\natexit.register(time.sleep, 0)\n1 / 0",
    "verdicts": ("error",),
  },
  patched_exit={
    "program": "real = os._exit\nos._exit = lambda c: real(9)\n1 / 0",
    "verdicts": ("error",),
  },
  pipes_of_the_parent=(
    "opens(*(f'/proc/{p}/fd/{n}' for p in (os.getppid() or 1, 1) for n in range(16)), "
    "flags=os.O_WRONLY)"
  ),
  frames_of_the_harness=(
    "import gc\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
    "for o in gc.get_objects():\n  breach(type(o).__name__ == 'SandboxPool')"
  ),
)

CROSS_RUN = _group(
  "other runs",
  file_left_for_the_next={
    "program": "open('PLANTED', 'w').write('x')",
    "after": "shows('x', 'PLANTED')",
  },
  file_in_the_folder={
    "program": "open('planted', 'w').write('x')",
    "after": "breach(os.path.exists('planted') or len(os.listdir('.')) > 0)",
  },
  module_patched={
    "program": "import math\nmath.pi = 3",
    "after": "import math\nbreach(math.pi == 3)",
  },
  compiled_file_poisoned={
    "program": (
      "import json, glob\nfolder = os.path.dirname(json.__file__)\n"
      "opens(json.__file__, *glob.glob(folder + '/__pycache__/*.pyc'), "
      "flags=os.O_WRONLY)"
    ),
  },
  site_packages_poisoned={
    "program": (
      "for path in sys.path:\n  if not os.path.isdir(path): continue\n  try:\n"
      "    name = os.path.join(path, 'planted-by-an-attack.pth')\n"
      "    os.close(os.open(name, os.O_CREAT | os.O_WRONLY))\n    os.unlink(name)\n"
      "    breach(path not in ('', os.getcwd()))\n  except OSError as e: print(e)"
    ),
    "harmless": False,
  },
  user_site_poisoned={
    # Every later interpreter of the user runs this file.
    "program": (
      "import site\np = site.getusersitepackages()\ntry:\n  os.makedirs(p)\n"
      "  open(p + '/usercustomize.py', 'w').write(\"print('BREACH')\")\n"
      "except OSError as e: print(e)"
    ),
    "after": "import site\nbreach(os.path.exists(site.getusersitepackages()))",
    "harmless": False,
  },
  code_of_the_harness=(
    "opens(*(f'{d}/{n}.py' for d in ('/jail', 'PACKAGE') for n in ('zygote', 'child', "
    "'wire')), flags=os.O_WRONLY)"
  ),
  write_anywhere=(
    "for folder in ('/', '/usr/lib', '/dev', '/etc', '/var/tmp', '/run', '/proc', "
    "'/python', 'HOST_FOLDER'):\n  try:\n    p = folder + '/planted-by-an-attack'\n"
    "    os.close(os.open(p, os.O_CREAT | os.O_WRONLY))\n    os.unlink(p)\n"
    "    breach()\n  except OSError as e: print(folder, e.errno)"
  ),
  process_of_another_run="breach(sum(p.isdigit() for p in os.listdir('/proc')) > 2)",
  memory_of_the_last_run={
    # Too much for the next run's program and reply to overwrite all of it.
    "program": "x = 'remains-of-' + 'the-last-run'\nprint(x * 2000)",
    "after": (
      "word = b'-'.join([b'remains', b'of', b'the', b'last', b'run'])\n"
      "memory = open('/proc/self/mem', 'rb')\nfor line in open('/proc/self/maps'):\n"
      "  area, mode, *_, name = (line + ' -').split()[:6]\n"
      "  start, end = (int(x, 16) for x in area.split('-'))\n"
      "  if mode[:2] != 'rw' or end - start > 1 << 28: continue\n"
      "  try:\n    memory.seek(start)\n    data = memory.read(end - start)\n"
      "  except (OSError, ValueError, OverflowError): continue\n"
      "  breach(word in data.replace(b'', b'') and word * 2 in data)"
    ),
  },
  message_queue_for_the_next={
    "program": "call(68, 7, 0o1666)",
    "after": "n = call(68, 7, 0)\nbreach(n >= 0)\ncall(71, n, 0, 0)",
  },
  # The host and all runs share the interpreter's files and folders.
  watch_a_shared_folder=(
    "fd = os.open(os.path.dirname(os.__file__), os.O_RDONLY)\n"
    "with attempt(): fcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_ACCESS)"
  ),
  lease_of_a_shared_file=(
    "for path in (os.__file__, sys.executable):\n"
    "  with attempt(): fcntl.fcntl(open(path), fcntl.F_SETLEASE, fcntl.F_RDLCK)"
  ),
)

TIME = _group(
  "time",
  **{
    name: {"program": program, "verdicts": ("timeout",)}
    for name, program in {
      "sleeps": "time.sleep(99)",
      "spins": "while True: pass",
      "spins_in_c": "'a' * 10 ** 8 in 'b' * 10\npow(7, 10 ** 9)",
      "ignores_signals": (
        "import signal\nfor s in (1, 2, 3, 13, 14, 15, 24, 25): signal.signal(s, 1)\n"
        "while True: pass"
      ),
      "blocks_signals": (
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "time.sleep(99)"
      ),
      "stops_itself": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
      "hides_in_a_child": (
        "pid = os.fork()\nif not pid:\n  os.setsid()\n  while True: pass\n"
        "os.waitpid(pid, 0)"
      ),
      "never_reads_and_closes": "os.close(1)\nos.close(2)\ntime.sleep(99)",
      "spends_cpu_in_threads": (
        "import threading\ndef f():\n  while True: pass\n"
        "for _ in range(4): threading.Thread(target=f).start()"
      ),
      "catches_the_alarm": (
        "import signal\nsignal.signal(24, lambda *a: None)\nwhile True:\n  try:\n"
        "    time.sleep(9)\n  except BaseException: pass"
      ),
    }.items()
  },
)

RACES = _group(
  "races",
  fork_faster_than_the_kill={
    "program": (
      "while True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass"
    ),
    "harmless": False,
  },
  links_swapped_under_a_reader=(
    "import threading\nopen('plain', 'w').write('x')\n"
    "def swap():\n  while True:\n    os.symlink('SECRET_PATH', 'n')\n"
    "    os.rename('n', 'link')\n    os.symlink('plain', 'n')\n"
    "    os.rename('n', 'link')\n"
    "threading.Thread(target=swap, daemon=True).start()\nend = time.time() + 0.5\n"
    "while time.time() < end: shows('SECRET', 'link')"
  ),
  limits_raised_by_threads=(
    "import resource, threading\ndef f():\n  for _ in range(200):\n    try:\n"
    "      resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))\n      breach()\n"
    "    except (OSError, ValueError): pass\n"
    "ts = [threading.Thread(target=f) for _ in range(4)]\n"
    "[t.start() for t in ts]\n[t.join() for t in ts]"
  ),
  exec_while_threads_run=(
    "import threading\nfor _ in range(4):\n"
    "  threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
    "os.execv(sys.executable, [sys.executable, '-c', "
    '\'import socket\\ntry:\\n  socket.socket()\\n  print("BREACH")\\n'
    "except OSError: pass'])"
  ),
)

ATTACKS = [
  *(HOST_READS + PARENT + NETWORK + SIGNALS + KERNEL),
  *(BOMBS + DAEMONS + FORGING + CROSS_RUN + TIME + RACES),
]
