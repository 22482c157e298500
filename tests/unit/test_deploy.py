"""deploy/ agrees with the rest of the repository. tests/kernel/test_podman.py runs the image."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from typing import Any

import pytest

from stapsdtd import __version__
from tests.daemon_image import SOURCES, instructions
from tests.seccomp_profile import NAMESPACES, PROFILE, written
from tests.support import ROOT, require
from tests.units import SERVICE, SOCKET, capabilities, settings

_SYSTEMD = "252"
"""Debian 12's, whose sets of system calls the profile has."""
DAEMON_SET = (ROOT / "deploy" / "daemonset.yaml").read_text()


def entries(key: str) -> list[str]:
    """Of a list, each on a line of its own."""
    found = re.search(rf"^( *){key}:\n((?:\1  - .*\n)+)", DAEMON_SET, re.MULTILINE)
    assert found is not None
    return [line.strip().removeprefix("- ") for line in found[2].splitlines()]


def test_the_daemon_set_has_the_capabilities_of_the_unit_and_no_more() -> None:
    assert [name.lower() for name in entries("add")] == capabilities()
    assert 'drop: ["ALL"]' in DAEMON_SET
    for line in ("privileged: false", "allowPrivilegeEscalation: false", "readOnlyRootFilesystem: true"):
        assert len(re.findall(f"^ +{line}$", DAEMON_SET, re.MULTILINE)) == 1


def test_the_seccomp_profile_is_what_the_unit_allows() -> None:
    require(shutil.which("systemd-analyze"), "systemd-analyze")
    told = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout.split()
    if told[1] != _SYSTEMD:
        pytest.skip(f"systemd {told[1]} may have other system calls in its sets than {_SYSTEMD}")
    assert PROFILE.read_text() == written(), "run: .venv/bin/python -m tests.seccomp_profile"


def rules() -> dict[str, list[dict[str, Any]]]:
    """The profile's rules for each system call."""
    found: dict[str, list[dict[str, Any]]] = {}
    for rule in json.loads(PROFILE.read_text())["syscalls"]:
        for name in rule["names"]:
            found.setdefault(name, []).append(rule)
    return found


def test_the_seccomp_profile_is_for_all_runtimes() -> None:
    """Containerd passes over conditions that are not the OCI's, and would allow without them."""
    profile = json.loads(PROFILE.read_text())
    assert profile.keys() == {"defaultAction", "defaultErrnoRet", "syscalls"}
    for rule in profile["syscalls"]:
        assert rule.keys() <= {"names", "action", "errnoRet", "args"}
    allowed = {name for name, of_name in rules().items() if of_name[0]["action"] == "SCMP_ACT_ALLOW"}
    words = [word for word in settings(SERVICE, "SystemCallFilter") if not word.startswith("@")]
    # a runtime's last step, what is for the daemon alone, and what no container needs
    assert {"execve", "bpf", "perf_event_open", *words} <= allowed
    assert not {"mount", "setns", "ptrace", "init_module", "kexec_load", "reboot", "clone3"} & allowed


def test_the_seccomp_profile_allows_the_units_namespaces_and_families() -> None:
    families = [rule["args"][0]["value"] for rule in rules()["socket"]]
    assert families == sorted(getattr(socket, name) for name in settings(SERVICE, "RestrictAddressFamilies"))
    for call in ("clone", "unshare"):
        (rule,) = rules()[call]
        (argument,) = rule["args"]
        assert (argument["op"], argument["valueTwo"]) == ("SCMP_CMP_MASKED_EQ", 0)
        for name, bit in NAMESPACES.items():
            is_allowed = name in settings(SERVICE, "RestrictNamespaces") or (call, name) == ("clone", "time")
            assert bool(argument["value"] & bit) is not is_allowed, (call, name)


def test_containers_are_documented_with_what_the_unit_has() -> None:
    document = (ROOT / "docs" / "operating.md").read_text()
    assert [name.lower() for name in re.findall(r"--cap-add=(\w+)", document)] == capabilities()
    assert "--security-opt=seccomp=deploy/seccomp.json" in document
    (profile,) = re.findall(r"localhostProfile: (\S+)", DAEMON_SET)
    assert f"/var/lib/kubelet/seccomp/{profile}" in document


def test_the_daemon_set_mounts_what_the_unit_may_write_to() -> None:
    mounts = re.findall(r"mountPath: (\S+)", DAEMON_SET)
    assert mounts == re.findall(r"^ +path: (\S+)", DAEMON_SET, re.MULTILINE)
    for path in (*settings(SERVICE, "ReadWritePaths"), *settings(SOCKET, "ListenStream")):
        assert [mount for mount in mounts if f"{path.removeprefix('-')}/".startswith(f"{mount}/")], path


def test_the_daemon_set_is_indented_with_pairs_of_blanks() -> None:
    for line in DAEMON_SET.splitlines():
        assert re.fullmatch(r"(  )*(- )?(#.*|[\w./-]+:?( .*)?)", line), line


def test_the_image_is_built_from_what_a_test_installs_from() -> None:
    copied = [source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]]
    assert tuple(copied) == SOURCES
    assert f"image: stapsdtd:{__version__}\n" in DAEMON_SET
    assert instructions("ENTRYPOINT") == ['["/opt/stapsdtd/bin/stapsdtd"]']
    (variable,) = [word for word in settings(SERVICE, "Environment") if word.startswith("TMPDIR=")]
    assert variable in instructions("ENV")
