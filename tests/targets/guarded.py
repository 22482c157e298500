"""Speaks as ticker.c does, and can be somebody's or nobody's: `call N` calls a library's probe, `dumpable 0|1`,
`become UID`.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_DUMPABLE = 4

library = ctypes.CDLL(sys.argv[1])
libc = ctypes.CDLL(None)
print("ready", flush=True)
for line in sys.stdin:
    command, _, number = line.partition(" ")
    if command == "call":
        for count in range(int(number)):
            library.library_call(count)
    elif command == "dumpable":
        libc.prctl(PR_SET_DUMPABLE, int(number), 0, 0, 0)
    else:
        user = int(number)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    print(command, "0", flush=True)
