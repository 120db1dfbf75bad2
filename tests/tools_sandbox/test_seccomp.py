"""The seccomp filter follows its tables for every system call."""

from __future__ import annotations

import errno
import pathlib
import platform
import re
import struct

import pytest

from tools_sandbox.jail import seccomp

if platform.machine() != "x86_64":
  pytest.skip("tables exist for x86_64", allow_module_level=True)

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
X86_64 = 0xC000003E
TABLE = pathlib.Path(__file__).parents[1] / "fixtures" / "unistd_64.txt"
HEADERS = ("x86_64-linux-gnu/asm/unistd_64.h", "asm/unistd_64.h")


def kernel_numbers() -> dict[str, int]:
  """System call -> its number in the kernel's table."""
  pairs = re.findall(r"^(\w+) (\d+)$", TABLE.read_text(), re.MULTILINE)
  return {name: int(number) for name, number in pairs}


KERNEL = kernel_numbers()
CODE = seccomp.build()


def verdict(name: str | int, *arguments: int, arch: int = X86_64) -> int:
  """The filter's verdict, as the kernel's classic BPF interpreter returns it."""
  number = KERNEL[name] if isinstance(name, str) else name
  code = CODE
  padded = (*arguments, *(0,) * (6 - len(arguments)))
  data = struct.pack("<iIQ6Q", number, arch, 0, *padded)
  loaded = 0
  at = 0
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
      test = {0x15: loaded == k, 0x35: loaded >= k, 0x45: bool(loaded & k)}[op]
      at += if_true if test else if_false


def test_the_kernels_table_has_these_numbers():
  # Compared by name and number: two swapped numbers fail.
  assert len(KERNEL) > 350 and (KERNEL["read"], KERNEL["clone3"]) == (0, 435)
  ours = {name: KERNEL.get(name) for name in seccomp.NUMBERS}
  assert ours == seccomp.NUMBERS


def test_the_table_is_the_installed_headers():
  headers = [pathlib.Path("/usr/include", name) for name in HEADERS]
  installed = [path for path in headers if path.exists()]
  if not installed:
    pytest.skip("the kernel's headers are not installed")
  pairs = re.findall(r"#define __NR_(\w+)\s+(\d+)\n", installed[0].read_text())
  header = {name: int(number) for name, number in pairs}
  assert {n: KERNEL[n] for n in header.keys() & KERNEL.keys()} == {
    n: header[n] for n in header.keys() & KERNEL.keys()
  }
  assert seccomp.NUMBERS.keys() <= header.keys()


def test_every_call_gets_what_its_table_says():
  limited = {*seccomp._ALLOWED_WITH, *seccomp._ALLOWED_WITHOUT, "mmap"}
  for name in KERNEL.keys() - limited:
    if name in seccomp._ALLOWED:
      assert verdict(name) == ALLOW, name
    else:
      error = seccomp._REFUSED.get(name, errno.EPERM)
      assert verdict(name) == REFUSE | error, name
  known = set(KERNEL.values())
  for number in (*range(600), 0x40000000 | KERNEL["getpid"]):  # the last: an x32 call
    if number not in known:
      assert verdict(number) == REFUSE | errno.EPERM, number


@pytest.mark.parametrize("name", seccomp._ALLOWED_WITH)
def test_only_listed_arguments_pass(name):
  index, values = seccomp._ALLOWED_WITH[name]
  for value in {*values, *range(70), *range(1020, 1040), 0x5412, 0xFFFFFFFF}:
    expected = ALLOW if value in values else REFUSE | errno.EPERM
    assert verdict(name, *(0,) * index, value) == expected, value


@pytest.mark.parametrize("name", seccomp._ALLOWED_WITHOUT)
def test_every_forbidden_bit_is_refused(name):
  index, bits = seccomp._ALLOWED_WITHOUT[name]
  for bit in range(32):
    expected = REFUSE | errno.EPERM if bits >> bit & 1 else ALLOW
    assert verdict(name, *(0,) * index, 1 << bit) == expected, bit


@pytest.mark.parametrize(
  "command", [1026, 1024, 8, 10], ids=["NOTIFY", "SETLEASE", "SETOWN", "SETSIG"]
)
def test_no_file_tells_what_others_do_with_it(command):
  assert verdict("fcntl", 3, command, 1) == REFUSE | errno.EPERM


def test_no_map_is_of_huge_pages_or_both_anonymous_and_shared():
  for flags in range(1 << 19):
    refused = flags & 0x40000 or (flags & 0x20 and flags & 1)
    expected = REFUSE | errno.EPERM if refused else ALLOW
    if flags < 64 or flags % 4099 == 0 or flags.bit_count() < 4:
      assert verdict("mmap", 0, 1, 3, flags) == expected, hex(flags)


def test_clone_makes_threads_and_processes_but_no_namespace():
  for flags in (0x3D0F00, 0x01200011, 17):
    assert verdict("clone", flags) == ALLOW
  for bit in (17, 25, 26, 27, 28, 29, 30):
    assert verdict("clone", 17 | 1 << bit) == REFUSE | errno.EPERM, bit


def test_another_architecture_is_the_end():
  assert verdict("write", arch=0x40000003) == KILL
