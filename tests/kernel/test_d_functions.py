"""D programs over kernel functions, as DTrace's fbt has them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client
from tests.kernel.test_function_tracing import SIZE, all_are_armed, calls, program, with_kprobes
from tests.support import Daemon, Ticker, stapsdt, stapsdt_command

__all__ = ["calls", "program"]

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.vm,
    pytest.mark.parametrize("engine", ["bpf"], indirect=True),
    with_kprobes,
]

READS = """
    BEGIN { printf("armed\\n"); }
    fbt::vfs_read:entry /pid == $target && arg2 == 5000/
    { @calls[probefunc, probemod] = count(); self->at = timestamp; }
    fbt::vfs_read:return /self->at/ { @ns = sum(timestamp - self->at); INTERPRETED self->at = 0; }
    fbt::vfs_read:return /pid == $target && arg1 == 1000/ { @bytes = sum(arg1); }
    fbt::do_sys_openat2:entry /pid == $target/ { printf("open %s\\n", copyinstr(arg1)); }
    fbt::do_sys_openat2:return /pid == $target && args[1] < 0/ { printf("%s%s %d\\n", probeprov, probefunc, arg1); }
    END { printa("%s in %s %@d\\n", @calls); printa("ns %@d\\n", @ns); printa("bytes %@d\\n", @bytes); }
"""


@contextmanager
def run(daemon: Daemon, calls: Ticker, text: str) -> Iterator[list[str]]:
    """The lines that a program prints about `calls`, until the with statement ends."""
    lines: list[str] = []
    command = [*stapsdt_command(daemon.target, "d"), "-q", "-p", str(calls.pid), "-n", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracing, Client(daemon.target) as client:
        assert tracing.stdout is not None
        assert tracing.stdout.readline() == "armed\n"
        all_are_armed(client)
        yield lines
        tracing.send_signal(signal.SIGINT)
        output, _ = tracing.communicate(timeout=60)
        lines += output.split("\n")
    assert tracing.returncode == 0


@pytest.mark.parametrize("interpreted", ["", "x++;"], ids=["lowered", "interpreted"])
def test_calls_and_their_results(daemon: Daemon, calls: Ticker, tmp_path: Path, interpreted: str) -> None:
    with run(daemon, calls, READS.replace("INTERPRETED", interpreted)) as lines:
        assert calls.do("read 5000 10 2") == 20 * SIZE
        calls.do(f"open {tmp_path}/missing")
    assert [f"open {tmp_path}/missing", "fbtdo_sys_openat2 -2"] == [each for each in lines if "open" in each]
    assert {"vfs_read in vmlinux 20", f"bytes {20 * SIZE}"} <= {*lines}
    (nanoseconds,) = [int(each.split()[1]) for each in lines if each.startswith("ns ")]
    assert nanoseconds > 0


def test_list(daemon: Daemon) -> None:
    listed = stapsdt(daemon.target, "d", "-l", "-v", "-n", "fbt::vfs_read:").stdout.split("\n")
    assert listed[1].split() == ["4", "fbt", "vmlinux", "vfs_read", "entry"]
    assert {"\t\targs[2]: uint64_t", "\t\targs[0]: int64_t"} <= {*listed}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fbt::no_such_function:entry", "probe description fbt::no_such_function:entry does not match any probes"),
        ("fbt:::entry", "over the limit match; name fewer"),
    ],
)
def test_errors(daemon: Daemon, text: str, reason: str) -> None:
    done = stapsdt(daemon.target, "d", "-n", text, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr


MEMBERS = """
    BEGIN { printf("armed\\n"); }
    fbt::vfs_read:entry
    /pid == $target && args[0]->f_path.dentry->d_name.len == 5 && arg2 < 5000/
    { @sizes[stringof(args[0]->f_path.dentry->d_name.name), args[0]->f_inode->i_size] = count(); }
    fbt::vfs_read:entry /pid == $target && arg2 == 5000 && args[0]->f_path.dentry->d_iname == "known"/
    { printf("read of %s, %d bytes\\n", args[0]->f_path.dentry->d_iname, args[0]->f_inode->i_size); }
    END { printa("%s %d %@d\\n", @sizes); }
"""


def test_members(daemon: Daemon, calls: Ticker) -> None:
    with run(daemon, calls, MEMBERS) as lines:
        assert calls.do("read 100 10 2") == 2000
        assert calls.do("read 5000 1 1") == SIZE
    assert lines[:2] == [f"read of known, {SIZE} bytes", f"known {SIZE} 20"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fbt::vfs_read:entry { trace(args[0]->no_such); }", "no_such"),
        ("fbt::vfs_read:entry { trace(args[0]->f_path); }", "file->f_path is a struct path; name a member of it"),
        ("fbt::vfs_rea*:entry { trace(args[0]->f_pos); }", "named without a glob"),
    ],
)
def test_members_that_there_are_not(daemon: Daemon, text: str, reason: str) -> None:
    done = stapsdt(daemon.target, "d", "-n", text, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
