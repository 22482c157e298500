"""Whose a process is: real processes that root makes be somebody's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.kernel.ownership import belonging, belongs, owner_of
from tests.support import SYSTEM_PYTHON, require, wait_for
from tests.users import ANNE, BERT, public_folder

BECOME = "import ctypes, os, sys, time; {}; print(flush=True); time.sleep(1000)"
IDS = "os.setgroups([]); os.setresgid({0}, {0}, {0}); os.setresuid({0}, {1}, {2})"
DUMPABLE = "ctypes.CDLL(None).prctl(4, {})"


@pytest.fixture(autouse=True)
def _root() -> None:
    require(os.geteuid() == 0, "root")


@contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Until it says something."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            yield child.pid
        finally:
            child.kill()


def python(*steps: str) -> list[str]:
    return [SYSTEM_PYTHON, "-c", BECOME.format("; ".join(steps))]


PLAIN = python("pass")


def test_process_is_its_users() -> None:
    with running(ANNE.command(*PLAIN)) as pid, running(PLAIN) as roots:
        assert (owner_of(pid), owner_of(roots)) == (ANNE.uid, 0)
        assert belonging([pid, roots, 1 << 30], frozenset({ANNE.uid, BERT.uid})) == {pid}
        assert belongs(pid, frozenset({ANNE.uid}))
        assert not belongs(pid, frozenset({BERT.uid, 0}))
        assert not belongs(pid, frozenset())


def test_process_that_is_gone() -> None:
    assert owner_of(1 << 30) is None
    child = subprocess.Popen(["true"])
    child.wait()
    assert owner_of(child.pid) is None


@pytest.mark.parametrize(
    "steps",
    [
        [IDS.format(ANNE.uid, ANNE.uid, ANNE.uid)],
        [IDS.format(ANNE.uid, ANNE.uid, ANNE.uid), DUMPABLE.format(0)],
        [IDS.format(ANNE.uid, ANNE.uid, 0), DUMPABLE.format(1)],
        [IDS.format(ANNE.uid, ANNE.uid, BERT.uid), DUMPABLE.format(1)],
        [IDS.format(ANNE.uid, BERT.uid, ANNE.uid), DUMPABLE.format(1)],
        [IDS.format(BERT.uid, ANNE.uid, ANNE.uid), DUMPABLE.format(1)],
        [f"os.setresgid(0, {ANNE.uid}, 0)", f"os.setresuid(*[{ANNE.uid}] * 3)", DUMPABLE.format(1)],
    ],
    ids=["changed", "not dumpable", "root's saved", "Bert's saved", "Bert's effective", "Bert's real", "other groups"],
)
def test_process_that_is_nobodys(steps: list[str]) -> None:
    with running(python(*steps)) as pid:
        assert owner_of(pid) is None
        assert not belonging([pid], frozenset({ANNE.uid, BERT.uid}))


def test_process_that_says_that_it_may_be_looked_into() -> None:
    with running(python(IDS.format(ANNE.uid, ANNE.uid, ANNE.uid), DUMPABLE.format(1))) as pid:
        assert owner_of(pid) == ANNE.uid


def test_program_that_its_user_cannot_read() -> None:
    with public_folder() as folder:
        program = folder / "sleep"
        program.write_bytes(Path("/bin/sleep").read_bytes())
        program.chmod(0o711)
        with subprocess.Popen(ANNE.command(program, "1000")) as child:
            try:
                wait_for(lambda: os.readlink(f"/proc/{child.pid}/exe") == str(program), "the program")
                # the kernel says so a moment after it has another program
                wait_for(lambda: owner_of(child.pid) is None, "nobody to own it")
            finally:
                child.kill()


def test_capabilities_are_more_than_a_users_rights() -> None:
    options = ("--inh-caps=+net_admin", "--ambient-caps=+net_admin")
    with running(ANNE.command(*PLAIN, options=options)) as pid:
        assert owner_of(pid) is None


def test_capabilities_in_a_user_namespace_are_not() -> None:
    with running(ANNE.command("unshare", "--user", "--map-root-user", *PLAIN)) as pid:
        assert "CapPrm:\t0000000000000000" not in Path(f"/proc/{pid}/status").read_text()
        assert owner_of(pid) == ANNE.uid


def test_process_in_roots_user_namespace_is_nobodys() -> None:
    """As a service's with PrivateUsers=, whose user may not trace it either."""
    with running(ANNE.in_namespace_of(0, *PLAIN)) as pid:
        assert os.stat(f"/proc/{pid}/status").st_uid == ANNE.uid
        assert owner_of(pid) is None
    nested = ("unshare", "--user", "--map-root-user", "unshare", "--user", "--map-root-user", *PLAIN)
    with running(ANNE.command(*nested)) as pid:
        assert owner_of(pid) == ANNE.uid
    with running(ANNE.in_namespace_of(0, *nested)) as pid:
        assert owner_of(pid) is None


def test_process_in_anothers_rootless_container_has_its_own_id() -> None:
    """A subordinate one of that user's, which a role may name."""
    with running(BERT.in_namespace_of(ANNE.uid, *PLAIN)) as pid:
        assert owner_of(pid) == BERT.uid


STATUS = "Uid:\t{0}\t{0}\t{0}\t{0}\nGid:\t{0}\t{0}\t{0}\t{0}\n"


@pytest.mark.parametrize(
    ("capabilities", "is_told"), [("", False), ("CapPrm:\t0000000000000000\n", True), ("CapPrm:\t1000\n", False)]
)
def test_status_that_does_not_tell_capabilities(tmp_path: Path, capabilities: str, *, is_told: bool) -> None:
    """The process may have some, if it is in this namespace, or does not show which one it is in."""
    status, namespace = tmp_path / "7/status", tmp_path / "7/ns/user"
    namespace.parent.mkdir(parents=True)
    status.write_text(STATUS.format(ANNE.uid) + capabilities)
    os.chown(status, ANNE.uid, ANNE.uid)
    assert owner_of(7, str(tmp_path)) is None
    # the text of the link says that it is another one
    namespace.symlink_to("/proc/self/ns/user")
    assert owner_of(7, str(tmp_path)) == ANNE.uid
    this = os.readlink("/proc/self/ns/user")
    namespace.rename(namespace.with_name(this))
    namespace.symlink_to(this)
    assert owner_of(7, str(tmp_path)) == (ANNE.uid if is_told else None)
