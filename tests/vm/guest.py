"""One command in one guest: qemu, with the host's root read-only and a shared folder for what comes back."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT
from tests.vm import initrd
from tests.vm.kernels import Kernel

_MEMORY_MIB = 2048
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIME_FACTOR = 10
"""How much longer things take with qemu's translated instructions, about."""


class GuestError(Exception):
    """The guest ended without its command's exit status: a panic, or too little time."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What qemu is told of an architecture."""

    qemu: tuple[str, ...]
    console: str
    root: Path
    busybox: Path


X86_64 = Machine(("qemu-system-x86_64", "-cpu", "max"), "ttyS0", Path("/"), Path("/bin/busybox"))


def run(
    kernel: Kernel,
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
    (share / "command").write_text(_script(command, environment or {}))
    with tempfile.TemporaryDirectory() as scratch:
        first_root = Path(scratch) / "initrd"
        initrd.write(first_root, machine.busybox, kernel.modules, ROOT)
        boot(_command_line(kernel, machine, first_root, share, cpus), seconds, output)
    return exit_status(share)


def exit_status(share: Path) -> int:
    """Return the command's, as the guest wrote it down. Raises GuestError."""
    try:
        return int((share / "status").read_text())
    except (FileNotFoundError, ValueError):
        raise GuestError("the kernel went down before the command ended") from None


def _script(command: Sequence[str], environment: Mapping[str, str]) -> str:
    known = {
        "PATH": _PATH,
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STAPSDTD_TIME_FACTOR": str(TIME_FACTOR),
        **environment,
    }
    settings = [f"{name}={value}" for name, value in known.items()]
    return f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(['/usr/bin/env', '-i', *settings, *command])}\n"


def _command_line(kernel: Kernel, machine: Machine, first_root: Path, share: Path, cpus: int) -> list[str]:
    return [
        # however this process ends, the guest ends with it
        "setpriv", "--pdeathsig", "KILL", *machine.qemu,
        "-accel", "tcg,thread=multi", "-smp", str(cpus), "-m", str(_MEMORY_MIB),
        "-nodefaults", "-display", "none", "-monitor", "none", "-serial", "stdio", "-no-reboot",
        "-kernel", str(kernel.image), "-initrd", str(first_root),
        "-append", f"console={machine.console} panic=-1 quiet",
        "-virtfs", f"local,path={machine.root},mount_tag=root,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={share},mount_tag=share,security_model=none",
    ]  # fmt: skip


def boot(command: Sequence[str], seconds: float, output: Callable[[str], object]) -> None:
    """Wait for the guest to power off. Raises GuestError where it takes too long."""
    # qemu writes its own complaints to stderr; they belong to what is told of the guest
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as qemu:
        timer = threading.Timer(seconds, qemu.kill)
        timer.start()
        try:
            assert qemu.stdout is not None
            for line in qemu.stdout:
                output(line.rstrip("\r\n") + "\n")
            ended = qemu.wait()
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            qemu.kill()
    if is_late:
        raise GuestError(f"the guest was stopped after {seconds:g} s")
    if ended:
        raise GuestError(f"qemu ended with {ended}")
