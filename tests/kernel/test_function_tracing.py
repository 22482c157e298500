"""Kernel functions are traced with the arguments and results that their calls had."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stapsdtd.capture.names import Owner
from stapsdtd.client import AccessDeniedError, Aggregate, Clause, Client, SiteState, Span, SubscribeOptions
from stapsdtd.kernel import procfs
from stapsdtd.kernel.places import KPROBE_EVENTS
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import (
    TIME_FACTOR,
    Daemon,
    Ticker,
    compile_target,
    running_daemon,
    stapsdt,
    stapsdt_command,
    wait_for,
)
from tests.users import ANNE, public_folder

HAS_KPROBES = os.path.exists("/sys/bus/event_source/devices/kprobe/type")

pytestmark = [pytest.mark.kernel, pytest.mark.parametrize("engine", ["bpf"], indirect=True)]
# the virtual machines have them
with_kprobes = pytest.mark.skipif(not HAS_KPROBES and TIME_FACTOR == 1, reason="this kernel has no kprobes")

SIZE = 1000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
THREADS, TIMES = 4, 25_000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_target("calls.c", tmp_path_factory.mktemp("targets") / "calls", "-lpthread")


@pytest.fixture
def calls(program: Path, tmp_path: Path) -> Iterator[Ticker]:
    file = tmp_path / "known"
    file.write_bytes(b"x" * SIZE)
    with Ticker(program, file) as running:
        yield running


def bring_up_loopback() -> None:
    """Virtual machines have no init that would."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def all_are_armed(client: Client) -> None:
    """Wait for what a subscription does not wait for on a slow host."""
    wait_for(lambda: not (arming := client.info().arming).waiting and not arming.running, "all to be armed")


@contextmanager
def traced(daemon: Daemon, *arguments: str) -> Iterator[list[dict[str, Any]]]:
    """What `kernel trace` prints until the with statement ends."""
    records: list[dict[str, Any]] = []
    command = stapsdt_command(daemon.target, "kernel", "trace", "--json", *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Client(daemon.target) as client:
        wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the trace to run")
        all_are_armed(client)
        yield records
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        records += map(json.loads, output.splitlines())
    assert process.returncode == 0


@pytest.mark.vm
@with_kprobes
class TestCalls:
    def test_entry_and_return_have_what_the_call_had(self, daemon: Daemon, calls: Ticker) -> None:
        values = "vfs_read(str(file->f_path.dentry->d_name.name), file->f_inode->i_size, count, return)"
        with traced(daemon, values, "--pid", str(calls.pid)) as records:
            assert calls.do("read 123 1 1") == 123
            assert calls.do("read 5000 1 1") == SIZE
        of_file = [each for each in records if each["at"] == "entry" and "known" in each["values"].values()]
        assert [each["values"] for each in of_file] == [
            {"file->f_path.dentry->d_name.name": "known", "file->f_inode->i_size": SIZE, "count": count}
            for count in (123, 5000)
        ]
        assert {each["pid"] for each in records} == {calls.pid}
        assert {each["tid"] for each in of_file}.isdisjoint({calls.pid})
        results = [
            each["values"]["return"] for each in records if each["at"] == "return" and each["tid"] != each["pid"]
        ]
        assert results == [123, SIZE]

    def test_each_return_ends_the_span_of_its_entry(self, daemon: Daemon, calls: Ticker) -> None:
        span = Span(start_selectors=["fbt:vmlinux:vfs_read:entry"], start_where="arg2 == 100")
        options = SubscribeOptions(pids=[calls.pid], functions=["vfs_read"], where="elapsed > 0")
        with Client(daemon.target) as client:
            pairs = client.aggregate("fbt:vmlinux:vfs_read:return", Aggregate(), options, span)
            all_are_armed(client)
            calls.do("read 100 1000 4")
            account = pairs.unsubscribe()
        assert (account.spans.starts, account.spans.paired, account.spans.open) == (4000, 4000, 0)
        assert account.aggregated == 4000

    @pytest.mark.parametrize("command", ["latency", "spans"])
    def test_the_return_ends_what_the_entry_begins(self, daemon: Daemon, calls: Ticker, command: str) -> None:
        arguments = (command, "fbt::vfs_read:entry", "--pid", str(calls.pid), "--start-where", "arg2 == 100", "--json")
        with (
            subprocess.Popen(
                stapsdt_command(daemon.target, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process,
            Client(daemon.target) as client,
        ):
            wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the command to run")
            all_are_armed(client)
            calls.do("read 100 50 2")
            process.send_signal(signal.SIGINT)
            output, told = process.communicate(timeout=60)
        assert process.returncode == 0
        summary = json.loads(told.splitlines()[-1])
        records = [json.loads(line) for line in output.splitlines()]
        assert summary["spans"]["paired"] >= 100
        if command == "latency":
            assert records[-1]["count"] == 100
        else:
            assert [each["args"][0] for each in records] == [100] * 100

    def test_arguments_of_failed_calls(self, daemon: Daemon, calls: Ticker, tmp_path: Path) -> None:
        there, missing = tmp_path / "known", tmp_path / "missing"
        with traced(daemon, "do_sys_openat2(str(filename), return == -ENOENT)", "--pid", str(calls.pid)) as records:
            assert calls.do(f"open {there}") > 0
            assert calls.do(f"open {missing}") == -errno.ENOENT
        (record,) = records
        assert record["values"] == {"filename": str(missing), "return": -errno.ENOENT}
        assert record["elapsed_ns"] > 0

    def test_conditions_are_of_the_type_and_sign_of_their_value(self, daemon: Daemon, calls: Ticker) -> None:
        values = "vfs_read(count > 200, file->f_path.dentry->d_name.len == 5, return >= 0)"
        with traced(daemon, values, "--pid", str(calls.pid)) as records:
            calls.do("read 100 1 1")
            calls.do("read 300 1 1")
        assert [each["values"] for each in records] == [
            {"count": 300, "file->f_path.dentry->d_name.len": 5, "return": 300}
        ]

    def test_a_condition_at_the_entry_holds_back_the_return(self, daemon: Daemon, calls: Ticker) -> None:
        with traced(daemon, "vfs_read(count > 200, return)", "--pid", str(calls.pid)) as records:
            for size in (100, 300, 150, 400):
                calls.do(f"read {size} 1 1")
        # the main thread reads commands
        of_file = [each for each in records if each["tid"] != each["pid"]]
        ends = sorted((each["monotonic_ns"], each["at"], each["values"]) for each in of_file)
        assert [each[1:] for each in ends] == [
            ("entry", {"count": 300}), ("return", {"return": 300}),
            ("entry", {"count": 400}), ("return", {"return": 400}),
        ]  # fmt: skip

    def test_events_of_a_glob_name_their_functions(self, daemon: Daemon, calls: Ticker) -> None:
        """Of which one may be called alone."""
        command = stapsdt_command(daemon.target, "trace", "fbt::vfs_rea*:entry", "--pid", str(calls.pid))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, Client(daemon.target) as client:
            wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the trace to run")
            all_are_armed(client)
            calls.do("read 100 1 1")
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        assert "fbt:entry@vfs_read" in {part for line in output.splitlines() for part in line.split()}

    def test_numbers_in_network_byte_order(self, daemon: Daemon) -> None:
        port, address = "ntohs(sk->__sk_common.skc_dport)", "ntohl(sk->__sk_common.skc_daddr)"
        bring_up_loopback()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
            wanted = server.getsockname()[1]
            call = f"tcp_connect({port} == {wanted}, {address}, return)"
            with traced(daemon, call, "--pid", str(os.getpid())) as records:
                for each in other, server:
                    socket.create_connection(each.getsockname()).close()
        values = sorted((each["monotonic_ns"], each["values"]) for each in records)
        assert [each for _, each in values] == [{port: wanted, address: 0x7F00_0001}, {"return": 0}]

    def test_text_of_an_array(self, daemon: Daemon, calls: Ticker) -> None:
        """Of the name that the file's entry in the cache has room for itself."""
        name = "file->f_path.dentry->d_iname"
        values = f'vfs_read(str({name}) == "known", str(file->f_path.dentry->d_name.name), count)'
        with traced(daemon, values, "--pid", str(calls.pid)) as records:
            calls.do("read 100 1 1")
        assert [each["values"] for each in records] == [
            {name: "known", "file->f_path.dentry->d_name.name": "known", "count": 100}
        ]

    def test_bit_fields_unions_and_structs(self, daemon: Daemon) -> None:
        """Of a socket, whose options are bit fields of a struct behind two pointers."""
        common = "sock->sk->__sk_common"
        values = f"sock->type, {common}.skc_family, {common}.skc_reuse, {common}.skc_reuseport, {common}, len, return"
        one, other = socket.socketpair()
        with one, other:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with traced(daemon, f"unix_stream_sendmsg({values})", "--pid", str(os.getpid())) as records:
                one.send(b"x" * 77)
        sent = [each["values"] for each in records if each["at"] == "entry" and each["values"]["len"] == 77]
        (entered,) = sent
        struct = entered.pop(common)
        assert entered == {
            "sock->type": socket.SOCK_STREAM, f"{common}.skc_family": socket.AF_UNIX, f"{common}.skc_reuse": 1,
            f"{common}.skc_reuseport": 0, "len": 77,
        }  # fmt: skip
        assert (struct["skc_family"], struct["skc_reuse"], struct["skc_reuseport"]) == (socket.AF_UNIX, 1, 0)
        assert struct["skc_daddr"] == struct["skc_addrpair"] & 0xFFFFFFFF
        assert 77 in [each["values"].get("return") for each in records]

    def test_calls_that_led_to_each_other(self, daemon: Daemon, calls: Ticker) -> None:
        # ksys_pread64 is inlined there
        chain = "__x64_sys_pread64(regs)", "vfs_read(count, return)"
        with traced(daemon, "--stack", *chain, "--pid", str(calls.pid)) as records:
            calls.do("read 100 2 1")
        shown = [(each["function"], each["at"], each["values"].get("count")) for each in records]
        once = [
            ("__x64_sys_pread64", "entry", None), ("vfs_read", "entry", 100), ("vfs_read", "return", None),
            ("__x64_sys_pread64", "return", None),
        ]  # fmt: skip
        assert shown == once * 2

    def test_conditions_on_calls_that_led_to_each_other(self, daemon: Daemon, calls: Ticker) -> None:
        """Also on what the first one returns, on which all waits that it led to."""
        chain = "__x64_sys_pread64(return == 77)", "vfs_read(count > 70, return)"
        with traced(daemon, "--stack", *chain, "--pid", str(calls.pid)) as records:
            for size in (77, 60, 80, 77):
                calls.do(f"read {size} 1 1")
        outer, inner = "__x64_sys_pread64", "vfs_read"
        once = [(outer, "entry"), (inner, "entry"), (inner, "return"), (outer, "return")]
        assert [(each["function"], each["at"]) for each in records] == once * 2
        assert [each["values"] for each in records[:4]] == [{}, {"count": 77}, {"return": 77}, {"return": 77}]

    def test_only_calls_that_were_led_to_leave_the_kernel(self, daemon: Daemon, calls: Ticker) -> None:
        """Of one that is not called itself from there; every call is accounted for."""
        chain = ["__x64_sys_pread64", "vfs_read"]
        functions = [*chain, "__x64_sys_read"]
        ends = [f"fbt:vmlinux:{function}:{end}" for function in functions for end in ("entry", "return")]
        options = SubscribeOptions(pids=[calls.pid], functions=functions)
        with Client(daemon.target) as client:
            wanted = Clause(
                selectors=ends, chain=["__x64_sys_pread64", "vfs_read"], aggregate=Aggregate(by=["function"])
            )
            total = client.query([wanted], options)
            all_are_armed(client)
            calls.do(f"read 100 1000 {THREADS}")
            account = total.unsubscribe()
            rows = {row.key: row.values["count"] or 0 for each in total.snapshots() for row in each.rows}
        missed = account.lost_missed
        assert rows.keys() == {(function,) for function in chain}
        assert all(2000 * THREADS - missed <= count <= 2000 * THREADS for count in rows.values())
        assert account.filtered >= 4
        assert account.fired == account.aggregated + account.filtered + account.lost

    def test_calls_that_did_not_lead_there_are_not_shown(self, daemon: Daemon, calls: Ticker) -> None:
        with traced(daemon, "--stack", "__x64_sys_read", "__x64_sys_pread64", "--pid", str(calls.pid)) as records:
            calls.do("read 100 2 1")
        assert not records

    def test_thousands_are_counted(self, daemon: Daemon, calls: Ticker) -> None:
        with Client(daemon.target) as client:
            if not {feature.name: feature.available for feature in client.info().features}["kprobe.multi"]:
                pytest.skip("a kprobe each takes minutes")
            options = SubscribeOptions(pids=[calls.pid], functions=["acpi_*", "tcp_*", "vfs_read"])
            with client.aggregate("fbt:vmlinux:*:entry", Aggregate(by=["function"]), options) as total:
                all_are_armed(client)
                calls.do("read 100 50 2")
                assert total.unsubscribe().sites > 1000
                counts = Counter({row.key: row.values["count"] for each in total.snapshots() for row in each.rows})
        assert counts[("vfs_read",)] >= 100

    def test_calls_of_several_threads_are_exact(self, daemon: Daemon, calls: Ticker) -> None:
        """What a task misses since another one, interrupted, is in the program there is told, and not delivered."""
        options = SubscribeOptions(pids=[calls.pid], functions=["vfs_read"], where="arg0 == 100")
        with Client(daemon.target) as client:
            total = client.aggregate("fbt:vmlinux:vfs_read:return", Aggregate(functions=["sum"], value="arg0"), options)
            all_are_armed(client)
            assert calls.do(f"read 100 {TIMES} {THREADS}") == 100 * TIMES * THREADS
            account = total.unsubscribe()
            (row,) = [row for snapshot in total.snapshots() for row in snapshot.rows]
        assert row.values["sum"] == 100 * account.aggregated
        assert account.aggregated + account.lost_missed == TIMES * THREADS
        assert account.fired == account.aggregated + account.filtered + account.lost
        assert account.lost == account.lost_missed

    def test_what_one_subscription_leaves_goes_on_for_the_other(self, daemon: Daemon, calls: Ticker) -> None:
        options = SubscribeOptions(pids=[calls.pid], functions=["vfs_read", "vfs_statx"], where="arg2 == 100")
        with Client(daemon.target) as client:
            total = client.aggregate("fbt:vmlinux:vfs_read:entry", Aggregate(), options)
            with client.aggregate("fbt:vmlinux:*:entry", Aggregate(), options):
                all_are_armed(client)
                calls.do("read 100 10 1")
            calls.do("read 100 10 1")
            account = total.unsubscribe()
        assert (account.aggregated, account.lost) == (20, 0)

    def test_nothing_is_left_behind(self, daemon: Daemon, tracefs: Tracefs, calls: Ticker) -> None:
        before = patched(tracefs)
        with traced(daemon, "vfs_read", "--pid", str(calls.pid)):
            assert patched(tracefs) - before == {"vfs_read"}
        wait_for(lambda: patched(tracefs) == before, "it to be detached from")

    def test_what_a_killed_daemon_leaves_is_removed(self, engine: str, tracefs: Tracefs, tmp_path: Path) -> None:
        """Programs and their links go with it, events do not."""
        del engine
        with subprocess.Popen(["sleep", "100"]) as process:
            stat = procfs.stat(process.pid)
            assert stat is not None
            process.kill()
        group = Owner(procfs.pid_namespace(), process.pid, stat.key.start_ticks).group
        tracefs.append_definition(f"p:{group}/g0 vfs_read", KPROBE_EVENTS)
        assert (group, "g0") in tracefs.kprobe_events()
        with running_daemon(tmp_path):
            # another daemon's may still be on their way out
            assert (group, "g0") not in tracefs.kprobe_events()


def patched(tracefs: Tracefs) -> set[str]:
    """The functions that ftrace patches at present."""
    return {line.split()[0] for line in tracefs.read("enabled_functions").splitlines() if line.startswith("vfs_")}


def test_unknown_names_are_told_with_the_column(daemon: Daemon) -> None:
    done = stapsdt(daemon.target, "kernel", "trace", "vfs_read(fil)", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no argument is called fil; its arguments are file, buf, count, pos (column 10)" in done.stderr


@pytest.mark.skipif(HAS_KPROBES, reason="this kernel has kprobes")
def test_host_without_kprobes_says_so(daemon: Daemon) -> None:
    done = stapsdt(daemon.target, "kernel", "trace", "vfs_read", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "kprobe: the kernel has none" in done.stderr
    options = SubscribeOptions(functions=["vfs_read"])
    with Client(daemon.target) as client, client.subscribe("fbt:vmlinux:vfs_read:entry", options) as subscription:
        (site,) = subscription.sites
    assert (site.state, site.function) == (SiteState.REFUSED, "vfs_read")


def test_only_root_may(engine: str) -> None:
    del engine
    with public_folder() as folder, running_daemon(folder, "--engine", "bpf") as daemon:
        os.chmod(daemon.target.removeprefix("unix:"), 0o666)

        with ANNE.connecting(daemon.target) as target, Client(target) as client:
            with pytest.raises(AccessDeniedError, match="does not allow tracing kernel functions"):
                client.subscribe("fbt:vmlinux:vfs_read:entry", SubscribeOptions(functions=["vfs_read"]))
            assert client.kernel_functions("vfs_read").functions
