"""Confines a process that runs a policy's code: Linux on x86-64, without privileges, also in containers.

    files       it may read Python's own installation and write nothing (Landlock, seccomp)
    network     it can open no socket (seccomp)
    processes   it can start no process or thread, and signal none (seccomp)
    memory      an address space of the bytes that its parent has (RLIMIT_AS)
    time        CPU seconds (RLIMIT_CPU); its parent limits the wall clock

The filter allows the system calls below, of which none reaches beyond the process; others fail with EPERM.
`confine` holds until the process ends.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys

# linux/prctl.h, linux/seccomp.h, linux/landlock.h, linux/audit.h
_PARENT_DEATH_SIGNAL, _SECCOMP, _NO_NEW_PRIVILEGES = 1, 22, 38
_FILTER, _ALLOW, _EPERM = 2, 0x7FFF_0000, 0x0005_0001
_X86_64 = 0xC000_003E
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1
_ALL_RIGHTS, _READ_FILE, _READ_DIRECTORY = (1 << 13) - 1, 1 << 2, 1 << 3
# Classic BPF: load a word, jump if equal, jump if any bit is set, return.
_LOAD, _IF_EQUAL, _IF_ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_2 = 0, 4, 32  # offsets in struct seccomp_data

_OPENAT = 257  # allowed for reading only
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CALLS = {
    'read': 0, 'write': 1, 'close': 3, 'stat': 4, 'fstat': 5, 'lstat': 6, 'poll': 7, 'lseek': 8, 'mmap': 9,
    'mprotect': 10, 'munmap': 11, 'brk': 12, 'rt_sigaction': 13, 'rt_sigprocmask': 14, 'rt_sigreturn': 15,
    'pread64': 17, 'readv': 19, 'writev': 20, 'access': 21, 'select': 23, 'sched_yield': 24, 'mremap': 25,
    'madvise': 28, 'nanosleep': 35, 'getpid': 39, 'exit': 60, 'uname': 63, 'getcwd': 79, 'readlink': 89,
    'gettimeofday': 96, 'getrlimit': 97, 'getrusage': 98, 'sysinfo': 99, 'times': 100, 'getuid': 102,
    'getgid': 104, 'geteuid': 107, 'getegid': 108, 'getppid': 110, 'sigaltstack': 131, 'gettid': 186,
    'time': 201, 'futex': 202, 'sched_getaffinity': 204, 'getdents64': 217, 'restart_syscall': 219,
    'clock_gettime': 228, 'clock_getres': 229, 'clock_nanosleep': 230, 'exit_group': 231, 'newfstatat': 262,
    'readlinkat': 267, 'faccessat': 269, 'pselect6': 270, 'ppoll': 271, 'getrandom': 318, 'statx': 332,
    'rseq': 334, 'faccessat2': 439,
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('instructions', ctypes.c_char_p)]


def why_not() -> str:
    """Why this machine cannot confine a process; '' if it seems able to."""
    if sys.platform != 'linux' or platform.machine() != 'x86_64':
        return f'it is {sys.platform} on {platform.machine()}, not Linux on x86-64'
    if _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1) < 1:
        return 'its kernel has no Landlock (Linux 5.13 or later, with landlock among its security modules)'
    return ''


def confine(cpu_s: int) -> None:
    """Confines this process, which has one thread, for good. Raises OSError if the kernel refuses."""
    _call(_libc.prctl, _PARENT_DEATH_SIGNAL, 9, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # a signal, and a second later the end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _call(_libc.prctl, _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _read_only_python()
    code = b''.join(struct.pack('HBBI', *instruction) for instruction in _filter())
    _call(_libc.prctl, _SECCOMP, _FILTER, ctypes.byref(_Program(len(code) // 8, code)), 0, 0)


def _read_only_python() -> None:
    """Lets the process read the folders of Python and its packages, and no other file."""
    packages = [folder for folder in sys.path if folder.endswith(('site-packages', 'dist-packages'))]
    folders = {sys.prefix, sys.base_prefix, *packages, '/usr', '/lib', '/lib64'}
    attributes = struct.pack('Q', _ALL_RIGHTS)
    rules = _call(_libc.syscall, _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for folder in filter(os.path.isdir, folders):
        place = os.open(folder, os.O_PATH)
        rule = struct.pack('=Qi', _READ_FILE | _READ_DIRECTORY, place)
        _call(_libc.syscall, _ADD_RULE, rules, _PATH_BENEATH, rule, 0)
        os.close(place)
    _call(_libc.syscall, _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _filter() -> list[tuple[int, int, int, int]]:
    """The seccomp filter: (code, instructions to skip if true, if false, operand)."""
    calls = list(_CALLS.values())
    ends = [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    # An open for reading is allowed, and so are the other calls: they skip to the last instruction.
    opening = [(_IF_EQUAL, 0, 2, _OPENAT), (_LOAD, 0, 0, _ARGUMENT_2), (_IF_ANY, 0, 1, _WRITES)]
    allowed = [(_IF_EQUAL, len(calls) - i + len(opening), 0, number) for i, number in enumerate(calls)]
    known = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 0, len(allowed) + len(opening) + 1, _X86_64)]
    return [*known, (_LOAD, 0, 0, _NUMBER), *allowed, *opening, *ends]


def _call(function, *arguments) -> int:
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f'the kernel refuses to confine a process: {os.strerror(number)}')
    return result
