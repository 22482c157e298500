from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stapsdtd.kernel import procfs
from stapsdtd.kernel.containers import Placement, cgroups_of, containers_in, matching, placement
from stapsdtd.kernel.identity import Identities
from stapsdtd.kernel.locked import LockedCalls

ID = "8d0c2f6e5b1a4d3c9e7f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5"
OTHER = "8d0c2f6e5b1affffffffffffffffffffffffffffffffffffffffffffffffffff"
POD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f1b6a52_8d0c_4d3c.slice"


@pytest.mark.parametrize(
    "path",
    [
        f"/docker/{ID}",
        f"/docker/{ID}/init.scope",
        f"/system.slice/docker-{ID}.scope",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope",
        f"/my.slice/{ID}",
        f"/ecs/0a1b2c3d4e5f/{ID}",
        f"/default/{ID}",
        f"/system.slice/nerdctl-{ID}.scope",
        f"/{POD}/cri-containerd-{ID}.scope",
        f"/kubepods/burstable/pod5f1b6a52-8d0c-4d3c-9e7f-60718293a4b5/{ID}",
        f"/system.slice/containerd.service/kubepods-burstable-pod5f1b6a52.slice:cri-containerd:{ID}",
        f"/{POD}/crio-{ID}.scope",
        f"/{POD}/crio-{ID}.scope/container",
        f"/kubepods/besteffort/pod5f1b6a52/crio-{ID}",
        f"/machine.slice/libpod-{ID}.scope",
        f"/machine.slice/libpod-{ID}.scope/container",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        f"/machine.slice/machine-libpod_pod_{OTHER}.slice/libpod-{ID}.scope",
        f"/libpod_parent/libpod-{ID}",
        f"/system.slice/web.service/libpod-payload-{ID}",
    ],
)
def test_container_with_an_id(path: str) -> None:
    assert containers_in(path) == [ID]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/lxc/web", "web"),
        ("/lxc/101/ns/system.slice/cron.service", "101"),
        ("/lxc.payload.web-2", "web-2"),
        ("/lxc.payload/web", "web"),
        ("/lxc.payload.project_web/system.slice", "project_web"),
        ("/machine.slice/machine-web.scope/payload", "web"),
        (r"/machine.slice/machine-my\x2dweb.scope", "my-web"),
        ("/machine.slice/systemd-nspawn@web.service/payload/init.scope", "web"),
        (r"/machine.slice/systemd-nspawn@my\x2dweb.service", "my-web"),
        ("/machine.slice/web.scope/payload", "web"),
    ],
)
def test_container_with_a_name(path: str, name: str) -> None:
    assert containers_in(path) == [name]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "relative",
        "/system.slice/docker.service",
        "/system.slice/containerd.service",
        f"/machine.slice/libpod-conmon-{ID}.scope",
        f"/{POD}/crio-conmon-{ID}.scope",
        f"/machine.slice/machine-libpod_pod_{ID}.slice",
        "/lxc.monitor.web",
        "/lxc.monitor/web",
        "/lxc",
        "/lxc.payload.",
        r"/machine.slice/machine-qemu\x2d1\x2dguest.scope",
        "/system.slice/machine-web.scope",
        f"/docker/{ID[:-1]}",
        f"/docker/{ID}0",
        f"/docker/{ID.upper()}",
        f"/system.slice/docker-{ID}.scope.d",
        f"/docker/{ID}\n",
        f"/docker/\u0661{ID[1:]}",
        "/lxc/..",
        "/lxc/a b",
        "/lxc/\x1b[2J",
        "/lxc/\udcff",
        "/lxc/" + "x" * 65,
        r"/machine.slice/machine-a\x2fb.scope",
        r"/machine.slice/machine-a\x0ab.scope",
        r"/machine.slice/machine-a\xff.scope",
    ],
)
def test_what_is_no_container(path: str) -> None:
    assert containers_in(path) == []


def test_the_innermost_container_is_last() -> None:
    path = f"/lxc.payload.outer/system.slice/docker-{OTHER}.scope/kubepods/burstable/pod1/{ID}"
    assert containers_in(path) == ["outer", OTHER, ID]
    assert placement(f"0::{path}\n".encode()) == Placement(path, ID)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (b"", Placement("", "")),
        (b"0::/\n", Placement("/", "")),
        (f"0::/docker/{ID} (deleted)\n".encode(), Placement(f"/docker/{ID}", ID)),
        (
            f"12:pids:/docker/{OTHER}\n1:name=systemd:/docker/{OTHER}\n0::/docker/{ID}\n".encode(),
            Placement(f"/docker/{ID}", ID),
        ),
        (f"12:cpu,cpuacct:/docker/{ID}\n0::/system.slice/a:b\n".encode(), Placement("/system.slice/a:b", ID)),
        (f"1:name=systemd:/docker/{ID}\n".encode(), Placement("", ID)),
        (b"0::/caf\xe9/lxc/web\n", Placement("/caf\udce9/lxc/web", "web")),
        (b"no line of cgroup\n0\n::\n0::/lxc/web", Placement("/lxc/web", "web")),
    ],
)
def test_placement(lines: bytes, found: Placement) -> None:
    assert placement(lines) == found


@given(st.binary(max_size=200) | st.text(st.sampled_from("/0:.-\\x2dlxcmachine scope\n\udcff"), max_size=80))
def test_any_bytes_are_a_placement(lines: bytes | str) -> None:
    found = placement(os.fsencode(lines) if isinstance(lines, str) else lines)
    assert found.container.isascii()
    assert found.container.isprintable()
    assert "\n" not in found.cgroup


def test_cgroups_of_each_container() -> None:
    paths = [
        "/",
        f"/docker/{ID}",
        f"/docker/{ID}/init.scope",
        f"/docker/{ID}/docker/{OTHER}",
        f"/elsewhere/docker-{ID}.scope",
        f"/elsewhere/docker-{ID}.scope/docker-{ID}.scope",
        "/lxc/web",
        "/lxc/web/ns",
    ]
    assert cgroups_of(paths) == {
        ID: [f"/docker/{ID}", f"/elsewhere/docker-{ID}.scope"],
        OTHER: [f"/docker/{ID}/docker/{OTHER}"],
        "web": ["/lxc/web"],
    }


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (ID, [ID]),
        (ID[:13], [ID]),
        (ID[:12], [ID, OTHER]),
        (ID[:11], []),
        (ID + "0", []),
        ("web", ["web"]),
        ("we", []),
        ("a-container-with-a-long", []),
        ("", []),
        ("101", ["101"]),
    ],
)
def test_what_is_meant(wanted: str, found: list[str]) -> None:
    known: dict[str, list[str]] = {each: [] for each in (OTHER, ID, "web", "101", "a-container-with-a-long-name")}
    assert matching(wanted, known) == found


def test_identity_of_this_process() -> None:
    found = Identities(LockedCalls()).of(os.getpid())
    assert found is not None
    unified = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    assert found.cgroup == (unified[0] if unified else "")
    assert found.namespace_pid == procfs.namespace_pid(os.getpid()) == os.getpid()
    assert procfs.namespace_pid(1 << 30) is None
