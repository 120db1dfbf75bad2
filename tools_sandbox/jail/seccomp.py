"""The system calls a jailed program may make, as a seccomp filter in classic BPF.

An allow-list: a call not named here fails with EPERM. Some calls fail with the error of
a kernel without them, because libraries then use a fallback.
"""

from __future__ import annotations

import errno
import platform
import struct

# Linux x86_64: name -> number. Grouped by resource, so that a reader sees the gaps.
_ALLOWED = {
  # open files
  "read": 0,
  "write": 1,
  "open": 2,
  "close": 3,
  "lseek": 8,
  "pread64": 17,
  "pwrite64": 18,
  "readv": 19,
  "writev": 20,
  "preadv": 295,
  "pwritev": 296,
  "dup": 32,
  "dup2": 33,
  "dup3": 292,
  "fsync": 74,
  "fdatasync": 75,
  "flock": 73,
  "ftruncate": 77,
  "fallocate": 285,
  "sendfile": 40,
  "copy_file_range": 326,
  "openat": 257,
  "close_range": 436,
  "pipe": 22,
  "pipe2": 293,
  "eventfd": 284,
  "eventfd2": 290,
  "poll": 7,
  "ppoll": 271,
  "select": 23,
  "pselect6": 270,
  "timerfd_create": 283,
  "timerfd_settime": 286,
  "timerfd_gettime": 287,
  "signalfd": 282,
  "signalfd4": 289,
  # For socket pairs; no other sockets can be created. Not sendmsg, which can send
  # descriptors: the kernel counts descriptors in transit per user.
  "sendto": 44,
  "recvfrom": 45,
  "recvmsg": 47,
  "shutdown": 48,
  "getsockname": 51,
  "getpeername": 52,
  "getsockopt": 55,
  # the file system
  "stat": 4,
  "fstat": 5,
  "lstat": 6,
  "newfstatat": 262,
  "statx": 332,
  "access": 21,
  "faccessat": 269,
  "faccessat2": 439,
  "truncate": 76,
  "getdents": 78,
  "getdents64": 217,
  "getcwd": 79,
  "chdir": 80,
  "fchdir": 81,
  "rename": 82,
  "renameat": 264,
  "renameat2": 316,
  "mkdir": 83,
  "mkdirat": 258,
  "rmdir": 84,
  "creat": 85,
  "link": 86,
  "linkat": 265,
  "unlink": 87,
  "unlinkat": 263,
  "symlink": 88,
  "symlinkat": 266,
  "readlink": 89,
  "readlinkat": 267,
  "chmod": 90,
  "fchmod": 91,
  "fchmodat": 268,
  "umask": 95,
  "mknod": 133,
  "mknodat": 259,
  "statfs": 137,
  "fstatfs": 138,
  "utime": 132,
  "utimes": 235,
  "futimesat": 261,
  "utimensat": 280,
  # memory
  "mprotect": 10,
  "munmap": 11,
  "brk": 12,
  "mremap": 25,
  "msync": 26,
  # processes, threads and signals
  "fork": 57,
  "vfork": 58,
  "execve": 59,
  "exit": 60,
  "exit_group": 231,
  "wait4": 61,
  "waitid": 247,
  "kill": 62,
  "tkill": 200,
  "tgkill": 234,
  "getpid": 39,
  "getppid": 110,
  "gettid": 186,
  "getpgrp": 111,
  "getpgid": 121,
  "setpgid": 109,
  "setsid": 112,
  "getsid": 124,
  "getuid": 102,
  "getgid": 104,
  "geteuid": 107,
  "getegid": 108,
  "getresuid": 118,
  "getresgid": 120,
  "getgroups": 115,
  "capget": 125,
  "set_tid_address": 218,
  "set_robust_list": 273,
  "get_robust_list": 274,
  "rseq": 334,
  "futex": 202,
  "membarrier": 324,
  "arch_prctl": 158,
  "rt_sigaction": 13,
  "rt_sigprocmask": 14,
  "rt_sigreturn": 15,
  "rt_sigpending": 127,
  "rt_sigtimedwait": 128,
  "rt_sigqueueinfo": 129,
  "rt_sigsuspend": 130,
  "sigaltstack": 131,
  "pause": 34,
  "restart_syscall": 219,
  "getrlimit": 97,
  "setrlimit": 160,
  "getrusage": 98,
  "times": 100,
  "getpriority": 140,
  "setpriority": 141,
  "sched_yield": 24,
  "getcpu": 309,
  "sched_getparam": 143,
  "sched_getscheduler": 145,
  "sched_get_priority_max": 146,
  "sched_get_priority_min": 147,
  # time and the machine
  "nanosleep": 35,
  "clock_nanosleep": 230,
  "clock_gettime": 228,
  "clock_getres": 229,
  "gettimeofday": 96,
  "time": 201,
  "getitimer": 36,
  "setitimer": 38,
  "alarm": 37,
  "timer_create": 222,
  "timer_settime": 223,
  "timer_gettime": 224,
  "timer_getoverrun": 225,
  "timer_delete": 226,
  "uname": 63,
  "getrandom": 318,
}
# Numbers for the calls in the tables below.
_LIMITED = {
  "mmap": 9,
  "ioctl": 16,
  "madvise": 28,
  "socketpair": 53,
  "setsockopt": 54,
  "clone": 56,
  "fcntl": 72,
  "personality": 135,
  "prctl": 157,
  "sched_setaffinity": 203,
  "sched_getaffinity": 204,
  "prlimit64": 302,
  "sysinfo": 99,
  "epoll_create": 213,
  "fadvise64": 221,
  "epoll_create1": 291,
  "memfd_create": 319,
  "preadv2": 327,
  "pwritev2": 328,
  "io_uring_setup": 425,
  "io_uring_enter": 426,
  "io_uring_register": 427,
  "pidfd_open": 434,
  "clone3": 435,
  "openat2": 437,
  "setxattr": 188,
  "lsetxattr": 189,
  "fsetxattr": 190,
  "getxattr": 191,
  "lgetxattr": 192,
  "fgetxattr": 193,
  "listxattr": 194,
  "llistxattr": 195,
  "flistxattr": 196,
  "removexattr": 197,
  "lremovexattr": 198,
  "fremovexattr": 199,
}
NUMBERS = {**_ALLOWED, **_LIMITED}
# Name -> (argument, allowed values): harmless uses, on the program itself.
_ALLOWED_WITH = {
  "socketpair": (0, (1,)),  # AF_UNIX
  "prlimit64": (0, (0,)),  # only on itself
  "sched_setaffinity": (0, (0,)),
  "sched_getaffinity": (0, (0,)),
  "personality": (0, (0xFFFFFFFF,)),  # only asks
  "prctl": (0, (1, 2, 3, 15, 16)),  # parent-death signal, dumpable?, thread name
  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
  "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
  # SO_RCVTIMEO, SO_SNDTIMEO; no filters or larger buffers, which use uncounted memory
  "setsockopt": (2, (20, 21)),
  # Advice about this process's own pages. No merging with other processes' pages (the
  # kernel would report the number found), and no MADV_COLLAPSE, which moves file pages
  # that others map too.
  "madvise": (2, (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23)),
  # F_DUPFD, _GETFD, _SETFD, _GETFL, _SETFL, _GETLK, _SETLK, _SETLKW, _DUPFD_CLOEXEC,
  # _GETPIPE_SZ. Leases, owners and F_NOTIFY have no use here; larger pipes use
  # uncounted memory.
  "fcntl": (1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),
}
# Name -> (argument, forbidden bits).
_ALLOWED_WITHOUT = {
  "clone": (0, 0x7E020000),  # any new namespace
}
_MMAP_FLAGS = 3  # the argument's index
_HUGE = 0x40000  # MAP_HUGETLB: the machine's huge pages, which no limit counts
# MAP_ANONYMOUS with MAP_SHARED or MAP_SHARED_VALIDATE: such pages survive an unmap and
# then count for no process.
_ANONYMOUS = 0x20
_SHARED = 0x01
_REFUSED = {
  "clone3": errno.ENOSYS,  # a filter cannot see its flags
  "io_uring_setup": errno.ENOSYS,
  "io_uring_enter": errno.ENOSYS,
  "io_uring_register": errno.ENOSYS,
  "memfd_create": errno.ENOSYS,  # uncounted memory
  "pidfd_open": errno.ENOSYS,
  "openat2": errno.ENOSYS,
  "sysinfo": errno.ENOSYS,  # shows the machine's load and memory
  # The kernel counts watches per user, and one run could use the user's whole limit.
  # Without epoll, Python's selectors use poll.
  "epoll_create": errno.ENOSYS,
  "epoll_create1": errno.ENOSYS,
  # With RWF_NOWAIT these calls tell which file pages others have read.
  "preadv2": errno.ENOSYS,
  "pwritev2": errno.ENOSYS,
  # Reports success without acting: the call would drop pages that others read.
  "fadvise64": 0,
  # Extended attributes: shutil expects the error ENOTSUP.
  **{name: errno.ENOTSUP for name in _LIMITED if name.endswith("xattr")},
}

_AUDIT_X86_64 = 0xC000003E
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_JUMP = 0x05
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
  return struct.pack("HBBI", code, if_true, if_false, k)


def _argument(index: int) -> bytes:
  """Loads an argument's low half: the kernel reads only this half of an int."""
  return _op(_LOAD, 16 + 8 * index)


def build() -> bytes:
  """Builds the filter for `kernel.set_filter`.

  Raises:
    OSError: this architecture has no table.
  """
  if platform.machine() != "x86_64":
    raise OSError(f"no seccomp table for {platform.machine()}, only for x86_64")
  allow = _op(_RETURN, _ALLOW)
  refuse = _op(_RETURN, _ERRNO | errno.EPERM)
  # 32-bit calls have other numbers; a process that makes one is killed.
  head = _op(_LOAD, 4) + _op(_EQUAL, _AUDIT_X86_64, 1, 0) + _op(_RETURN, _KILL)
  rules = dict.fromkeys(_ALLOWED.values(), allow)
  for name, error in _REFUSED.items():
    rules[NUMBERS[name]] = _op(_RETURN, _ERRNO | error)
  for name, (index, values) in _ALLOWED_WITH.items():
    tests = [_op(_EQUAL, value, 0, 1) + allow for value in values]
    rules[NUMBERS[name]] = _argument(index) + b"".join(tests) + refuse
  for name, (index, bits) in _ALLOWED_WITHOUT.items():
    rules[NUMBERS[name]] = _argument(index) + _op(_ANY_BIT, bits, 0, 1) + refuse + allow
  rules[NUMBERS["mmap"]] = (
    _argument(_MMAP_FLAGS)
    + _op(_ANY_BIT, _HUGE, 2, 0)
    + _op(_ANY_BIT, _ANONYMOUS, 0, 2)
    + _op(_ANY_BIT, _SHARED, 0, 1)
    + refuse
    + allow
  )
  return head + _op(_LOAD, 0) + _search(_intervals(rules, refuse))


def _intervals(rules: dict[int, bytes], other: bytes) -> list[tuple[int, bytes]]:
  """Merges rules to (first number, action from there on), ascending."""
  out = [(0, rules.get(0, other))]
  for number in sorted({n + i for n in rules for i in (0, 1)}):
    rule = rules.get(number, other)
    if rule != out[-1][1]:
      out.append((number, rule))
  return out


def _search(intervals: list[tuple[int, bytes]]) -> bytes:
  """Builds a binary search over intervals for the loaded number."""
  # Not a linear search, which would cost every run 0.3 ms: the kernel runs a new filter
  # once per system call number, to cache the calls that are always allowed.
  if len(intervals) == 1:
    return intervals[0][1]
  half = len(intervals) // 2
  low = _search(intervals[:half])
  high = _search(intervals[half:])
  # Only the unconditional jump reaches further than 255 instructions.
  return (
    _op(_AT_LEAST, intervals[half][0], 0, 1) + _op(_JUMP, len(low) // 8) + low + high
  )
