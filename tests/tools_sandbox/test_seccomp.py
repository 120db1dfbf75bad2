"""The filter says of every system call what its tables say."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from tools_sandbox.jail import seccomp

if platform.machine() != "x86_64":
  pytest.skip("tables exist for x86_64", allow_module_level=True)

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
X86_64 = 0xC000003E


def verdict(code: bytes, arch: int, number: int, arguments: tuple[int, ...]) -> int:
  """What the kernel's interpreter of classic BPF would return."""
  data = struct.pack("<iIQ6Q", number, arch, 0, *arguments)
  loaded, at = 0, 0
  while True:
    op, if_true, if_false, k = struct.unpack_from("<HBBI", code, 8 * at)
    at += 1
    if op == 0x20:
      (loaded,) = struct.unpack_from("<I", data, k)
    elif op == 0x06:
      return k
    elif op == 0x05:
      at += k
    else:
      found = {0x15: loaded == k, 0x35: loaded >= k, 0x45: bool(loaded & k)}[op]
      at += if_true if found else if_false


def test_every_number_gets_what_its_table_says():
  code = seccomp.build()
  allowed = set(seccomp._ALLOWED.values())
  for number in range(600):
    said = verdict(code, X86_64, number, (0,) * 6)
    if number in allowed:
      assert said == ALLOW, number
    elif number in seccomp._REFUSED:
      assert said == REFUSE | seccomp._REFUSED[number], number
    elif number not in {*seccomp._ALLOWED_WITH, *seccomp._ALLOWED_WITHOUT}:
      assert said == REFUSE | errno.EPERM, number
  x32 = verdict(code, X86_64, 0x40000000 | 39, (0,) * 6)
  assert x32 == REFUSE | errno.EPERM


@pytest.mark.parametrize("number", seccomp._ALLOWED_WITH)
def test_only_listed_arguments_pass(number):
  code = seccomp.build()
  index, values = seccomp._ALLOWED_WITH[number]
  for value in {*values, *range(70), *range(1020, 1040), 0x5412, 0xFFFFFFFF}:
    arguments = tuple(value if i == index else 0 for i in range(6))
    wanted = ALLOW if value in values else REFUSE | errno.EPERM
    assert verdict(code, X86_64, number, arguments) == wanted, value


@pytest.mark.parametrize("number", seccomp._ALLOWED_WITHOUT)
def test_every_forbidden_bit_is_refused(number):
  code = seccomp.build()
  index, bits = seccomp._ALLOWED_WITHOUT[number]
  for bit in range(32):
    arguments = tuple(1 << bit if i == index else 0 for i in range(6))
    wanted = REFUSE | errno.EPERM if bits >> bit & 1 else ALLOW
    assert verdict(code, X86_64, number, arguments) == wanted, bit


@pytest.mark.parametrize("command", ["NOTIFY", "SETLEASE", "SETOWN", "SETSIG"])
def test_no_file_tells_what_others_do_with_it(command):
  command = {"NOTIFY": 1026, "SETLEASE": 1024, "SETOWN": 8, "SETSIG": 10}[command]
  arguments = (3, command, 1, 0, 0, 0)
  assert verdict(seccomp.build(), X86_64, 72, arguments) == REFUSE | errno.EPERM


def test_clone_makes_threads_and_processes_but_no_namespace():
  code = seccomp.build()
  for flags in (0x3D0F00, 0x01200011, 17):
    assert verdict(code, X86_64, 56, (flags, 0, 0, 0, 0, 0)) == ALLOW
  for bit in (17, 25, 26, 27, 28, 29, 30):
    arguments = (17 | 1 << bit, 0, 0, 0, 0, 0)
    assert verdict(code, X86_64, 56, arguments) == REFUSE | errno.EPERM, bit


def test_another_architecture_is_the_end():
  assert verdict(seccomp.build(), 0x40000003, 1, (0,) * 6) == KILL
