"""Commands that run another one under a seccomp filter, as a container's or a unit's profile would be."""

from __future__ import annotations

import errno
import sys

_FILTER = """
import ctypes, os, platform, shutil, struct, sys
known = {
    "bpf": {"x86_64": 321, "aarch64": 280},
    "perf_event_open": {"x86_64": 298, "aarch64": 241},
    # of x86-64 alone
    "uprobe": {"x86_64": 336, "aarch64": 0xFFFF},
    # the command itself is then a binary, which execveat begins
    "execve": {"x86_64": 59, "aarch64": 221},
}
names, answer, command = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:]
LOAD_NUMBER, IS, ANSWER = 0x20, 0x15, 0x06
lines = [(LOAD_NUMBER, 0, 0, 0)]
for name in names:
    lines += [(IS, 0, 1, known[name][platform.machine()]), (ANSWER, 0, 0, 0x50000 | answer)]
lines += [(ANSWER, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
assert ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0
if "execve" not in names:
    os.execvp(command[0], command)
program = os.open(shutil.which(command[0]), os.O_RDONLY | os.O_CLOEXEC)
arguments = (ctypes.c_char_p * (len(command) + 1))(*map(os.fsencode, command))
environment = [b"=".join(each) for each in os.environb.items()]
variables = (ctypes.c_char_p * (len(environment) + 1))(*environment)
AT_EMPTY_PATH = 0x1000
EXECVEAT = {"x86_64": 322, "aarch64": 281}[platform.machine()]
ctypes.CDLL(None).syscall(EXECVEAT, program, b"", arguments, variables, AT_EMPTY_PATH)
"""


def refusing(*names: str, answer: int = errno.EPERM) -> tuple[str, ...]:
    """A command that runs another one, to which some system calls are refused with an errno."""
    return (sys.executable, "-c", _FILTER, ",".join(names), str(answer))
