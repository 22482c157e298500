"""What systemd/ says, for tests to hold the daemon and other files against."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support import ROOT

UNITS = ROOT / "systemd"
SERVICE = UNITS / "stapsdtd.service"
SOCKET = UNITS / "stapsdtd.socket"
OPENER_SERVICE = UNITS / "stapsdtd-opener@.service"
OPENER_SOCKET = UNITS / "stapsdtd-opener.socket"


def settings(unit: Path, name: str) -> list[str]:
    """The words of all lines that set a name."""
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    return [word for key, _, value in lines if key == name for word in value.split()]


def capabilities(service: Path = SERVICE) -> list[str]:
    """What a service may keep, as setpriv writes it: `sys_ptrace`."""
    return [word.removeprefix("CAP_").lower() for word in settings(service, "CapabilityBoundingSet")]


def with_capabilities(names: Iterable[str]) -> list[str]:
    """A command that runs another one as root with these alone, as the service manager does."""
    kept = ",".join(["-all", *(f"+{name}" for name in names)])
    return ["setpriv", f"--bounding-set={kept}", "--inh-caps=-all", "--no-new-privs"]
