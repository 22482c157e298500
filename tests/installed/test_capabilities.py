"""The unit's capabilities: with all of them nothing is missing, and without any one something is, as `doctor` tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.connector import connector_queue_bytes
from tests.installed import machine

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("service")]

_DROP_IN = Path("/run/systemd/system/stapsdtd.service.d/without.conf")


def missing() -> set[str]:
    """Return what the service says that it lacks."""
    with Client(machine.SERVER) as client:
        return {feature.name for feature in client.info().features if not feature.available}


def lacks(feature: str) -> Callable[[], bool]:
    return lambda: feature in missing()


def _queue_is_short() -> bool:
    most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    # before Linux 6.6 there is no connector at all then
    return connector_queue_bytes(machine.main_pid()) in {None, most}


def _root_parses() -> bool:
    pid = machine.main_pid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return 0 in {Path(f"/proc/{child}").stat().st_uid for child in children}


_WITHOUT: dict[str, Callable[[], bool]] = {
    "cap_bpf": lacks("bpf programs"),
    "cap_perfmon": lacks("bpf programs"),
    "cap_sys_ptrace": lacks("other processes"),
    "cap_checkpoint_restore": lacks("map_files"),
    "cap_dac_read_search": lacks("files of others"),
    "cap_net_admin": _queue_is_short,
    "cap_setuid": _root_parses,
    "cap_setgid": _root_parses,
}
"""What holds where the service runs without a capability, and only there."""


def bounding_set() -> set[str]:
    return set(machine.show("CapabilityBoundingSet").split())


@pytest.fixture(scope="module", autouse=True)
def _all_again() -> Iterator[None]:
    yield
    _DROP_IN.unlink(missing_ok=True)
    _restart()


def _restart() -> None:
    machine.systemctl("daemon-reload")
    machine.systemctl("restart", machine.SERVICE)


def test_each_capability_of_the_unit_is_spoken_of_here() -> None:
    assert bounding_set() == set(_WITHOUT)
    assert "cap_sys_admin" not in bounding_set()


def test_with_all_of_them_nothing_is_worse() -> None:
    assert [name for name, is_worse in _WITHOUT.items() if is_worse()] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _WITHOUT)
def test_without_one_something_is_worse(name: str) -> None:
    kept = set(_WITHOUT) - {name}
    _DROP_IN.parent.mkdir(parents=True, exist_ok=True)
    _DROP_IN.write_text(f"[Service]\nCapabilityBoundingSet=\nCapabilityBoundingSet={' '.join(sorted(kept)).upper()}\n")
    _restart()
    assert bounding_set() == kept
    assert _WITHOUT[name]()
