r"""Tell which files a program that is about to run is going to map: itself, its loader and its libraries.

The loader is asked, since only it knows what LD_LIBRARY_PATH, RUNPATH, $ORIGIN and the processor's abilities come to:

    $ /lib64/ld-linux-x86-64.so.2 --list /usr/bin/env
    \tlinux-vdso.so.1 (0x00007ffd5a3f2000)
    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f0a4f0a0000)
    \t/lib64/ld-linux-x86-64.so.2 (0x00007f0a4f2c5000)
"""

from __future__ import annotations

import os
import shutil
import subprocess

_LIST_SECONDS = 10.0


def expected_files(pid: int) -> list[str]:
    """Return the files that a process that was just executed is going to map, as far as that can be known."""
    program = os.readlink(f"/proc/{pid}/exe")
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        columns = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    mapped = dict.fromkeys(each[5] for each in columns if len(each) == 6 and each[5].startswith("/"))
    loader = next((path for path in mapped if path != program), None)
    found = dict.fromkeys([program, *mapped])
    if loader is not None:
        for path in filter(None, [program, _behind_env(pid, program)]):
            found |= dict.fromkeys([path, *_libraries(loader, path)])
    return list(found)


def _behind_env(pid: int, program: str) -> str | None:
    """Return the program that env(1) executes, as of scripts that begin with `#!/usr/bin/env python3`."""
    if os.path.basename(program) != "env":
        return None
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")[1:]
    name = next((word for word in words if not word.startswith(b"-") and b"=" not in word), b"")
    found = shutil.which(os.fsdecode(name))
    return None if found is None else os.path.realpath(found)


def _libraries(loader: str, program: str) -> list[str]:
    """Return what a program's loader maps for it before it runs, by the loader's own word; nothing of it is run."""
    try:
        listed = subprocess.run(
            [loader, "--list", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_LIST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [path for line in listed.stdout.splitlines() if (path := _listed(line))]


def _listed(line: str) -> str | None:
    r"""Return the path in `\tlibc.so.6 => /lib/libc.so.6 (0x7f0000000000)`, or in `\t/lib/ld.so (0x7f0000000000)`."""
    left, _, address = line.rpartition(" (0x")
    path = left.removeprefix("\t").rpartition(" => ")[2]
    return path if address and path.startswith("/") else None
