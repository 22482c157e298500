"""deploy/ agrees with the rest of the repository. To run it takes a container engine and a cluster."""

from __future__ import annotations

import re

from stapsdtd import __version__
from tests.kernel.test_install import SOURCES
from tests.support import ROOT
from tests.units import SERVICE, SOCKET, capabilities, settings

DAEMON_SET = (ROOT / "deploy" / "daemonset.yaml").read_text()
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def entries(key: str) -> list[str]:
    """Of a list, each on a line of its own."""
    found = re.search(rf"^( *){key}:\n((?:\1  - .*\n)+)", DAEMON_SET, re.MULTILINE)
    assert found is not None
    return [line.strip().removeprefix("- ") for line in found[2].splitlines()]


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_the_daemon_set_has_the_capabilities_of_the_unit_and_no_more() -> None:
    assert [name.lower() for name in entries("add")] == capabilities()
    assert 'drop: ["ALL"]' in DAEMON_SET
    for line in ("privileged: false", "allowPrivilegeEscalation: false", "readOnlyRootFilesystem: true"):
        assert len(re.findall(f"^ +{line}$", DAEMON_SET, re.MULTILINE)) == 1


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
