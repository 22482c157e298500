"""One command in one guest: qemu, with a root that it reads and a shared folder for what comes back."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from tests.support import ROOT
from tests.vm import initrd
from tests.vm.kernels import Kernel

_MEMORY_MIB = 2048
_WATCH_SECONDS = 1.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIME_FACTOR = 10
"""How much longer things take with emulated instructions, about."""


class GuestError(Exception):
    """The guest ended without its command's exit status: a panic, or too little time."""


class GuestHungError(GuestError):
    """The guest printed nothing for longer than any of its tests may take."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A kernel, the root it has, and what qemu is told of its architecture.

    commands: the folder of python and stapsdt in the guest. environment: what programs there need besides. provide:
    puts files into the shared folder; setup is a shell script that takes them from there, in the guest.
    """

    architecture: str
    kernel: Kernel
    qemu: tuple[str, ...]
    console: str
    root: Path
    busybox: Path
    commands: str
    environment: Mapping[str, str] = field(default_factory=dict)
    provide: Callable[[Path], None] = lambda _: None
    setup: str = ""


def run(
    machine: Machine,
    command: Sequence[str],
    share: Path,
    *,
    seconds: float,
    cpus: int = 2,
    environment: Mapping[str, str] | None = None,
    output: Callable[[str], object] = sys.stdout.write,
) -> int:
    """Run a command in the tree's folder, as root; return its exit status. Raises GuestError.

    share: a folder that the guest has as initrd.SHARE, and may write to. output: takes the console's lines.
    """
    (share / "status").unlink(missing_ok=True)
    (share / "command").write_text(_script(machine, command, environment or {}))
    machine.provide(share)
    with tempfile.TemporaryDirectory() as scratch:
        first_root = Path(scratch) / "initrd"
        initrd.write(first_root, machine.busybox, machine.kernel.modules, ROOT)
        boot(_command_line(machine, first_root, share, cpus), seconds, output)
    return exit_status(share)


def exit_status(share: Path) -> int:
    """Return the command's, as the guest wrote it down. Raises GuestError."""
    try:
        return int((share / "status").read_text())
    except (FileNotFoundError, ValueError):
        raise GuestError("the kernel went down before the command ended") from None


def _script(machine: Machine, command: Sequence[str], environment: Mapping[str, str]) -> str:
    known = {
        "PATH": _PATH,
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STAPSDTD_TIME_FACTOR": str(TIME_FACTOR),
        # which is the guest's own
        "STAPSDTD_MAY_SET_CLOCK": "1",
        **machine.environment,
        **environment,
    }
    clean = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in known.items())]
    return f"set -e\ncd {shlex.quote(str(ROOT))}\n{machine.setup}\nexec {shlex.join([*clean, *command])}\n"


def _command_line(machine: Machine, first_root: Path, share: Path, cpus: int) -> list[str]:
    read_only = "security_model=none,readonly=on,multidevs=remap"
    return [
        *emulator(machine.qemu, cpus=cpus, memory_mib=_MEMORY_MIB),
        "-serial", "stdio",
        "-kernel", str(machine.kernel.image), "-initrd", str(first_root),
        "-append", f"console={machine.console} panic=-1 quiet",
        "-virtfs", f"local,path={machine.root},mount_tag=root,{read_only}",
        "-virtfs", f"local,path={ROOT},mount_tag=tree,{read_only}",
        *shared(share),
    ]  # fmt: skip


def emulator(qemu: Sequence[str], *, cpus: int, memory_mib: int) -> list[str]:
    """Return the part of qemu's command that all guests have. qemu: its name, and its options of the machine."""
    return [
        # however this process ends, the guest ends with it
        "setpriv", "--pdeathsig", "KILL", *qemu,
        # in one thread: with several, a CPU may meet the breakpoint by which another one patches the kernel's code, and
        # find nobody who knows of it ("Oops: int3" in __schedule, seen on 6.12)
        "-accel", "tcg,thread=single", "-smp", str(cpus), "-m", str(memory_mib),
        "-nodefaults", "-display", "none", "-monitor", "none", "-no-reboot",
    ]  # fmt: skip


def shared(folder: Path) -> list[str]:
    """Return qemu's options for a folder that the guest mounts as `share`, and may write to."""
    return ["-virtfs", f"local,path={folder},mount_tag=share,security_model=none"]


def boot(command: Sequence[str], seconds: float, output: Callable[[str], object], silent_seconds: float = inf) -> None:
    """Wait for the guest to power off. Raises GuestError where it takes too long, and GuestHungError where it prints
    nothing for silent_seconds.
    """
    spoken = time.monotonic()
    # qemu writes its own complaints to stderr; they belong to what is told of the guest
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as qemu:
        timer = threading.Timer(seconds, qemu.kill)
        timer.start()
        is_hung = threading.Event()

        def watch() -> None:
            while qemu.poll() is None:
                if time.monotonic() - spoken > silent_seconds:
                    is_hung.set()
                    qemu.kill()
                    return
                time.sleep(_WATCH_SECONDS)

        threading.Thread(target=watch, name="watch-guest", daemon=True).start()
        try:
            assert qemu.stdout is not None
            for line in qemu.stdout:
                spoken = time.monotonic()
                output(line.rstrip("\r\n") + "\n")
            ended = qemu.wait()
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            qemu.kill()
    if is_hung.is_set():
        raise GuestHungError(f"the guest printed nothing for {silent_seconds:g} s, and was stopped")
    if is_late:
        raise GuestError(f"the guest was stopped after {seconds:g} s")
    if ended:
        raise GuestError(f"qemu ended with {ended}")
