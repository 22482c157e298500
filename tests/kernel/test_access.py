"""What ordinary users get of others' processes on the real kernel, by every way they have: nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Account, Aggregate, Client, EndReason, SiteState, Span, SpanAccount, SubscribeOptions
from stapsdtd.client.errors import AccessDeniedError, LimitReachedError
from tests.support import (
    SYSTEM_PYTHON,
    TARGETS,
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    is_dead,
    running_daemon,
    stapsdt_command,
    wait_for,
)
from tests.users import ANNE, BERT, User, public_folder

pytestmark = pytest.mark.kernel

OPERATORS = 64110


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


@pytest.fixture
def program(folder: Path, ticker_program: Path) -> Path:
    """A ticker that anybody may run, and nobody else has."""
    return copied(ticker_program, folder / "ticker")


def copied(program: Path, to: Path, mode: int = 0o755) -> Path:
    shutil.copy(program, to)
    to.chmod(mode)
    return to


@contextmanager
def daemon_with(folder: Path, roles: str = "", engine: str = "bpf") -> Iterator[Daemon]:
    (folder / "daemon.toml").write_text(roles)
    with running_daemon(folder, "--engine", engine, "--config", str(folder / "daemon.toml")) as started:
        yield started


def recorder(user: User, daemon: Daemon, program: Path, probe: str = "tick(arg0)", **more: str | int) -> Recorder:
    with user.connecting(daemon.target) as door:
        return Recorder(door, of(program, probe), **more)  # type: ignore[arg-type]


def client_of(user: User, daemon: Daemon) -> Client:
    with user.connecting(daemon.target) as door:
        client = Client(door)
        client.info()
    return client


def of(program: Path, probe: str) -> str:
    return f":{program}::{probe}"


def ticker_of(user: User, program: Path, *options: str) -> Ticker:
    return Ticker(*user.command(program, options=options))


def stapsdt(user: User, daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = user.command(*stapsdt_command(daemon.target, *arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd="/")


def figures(account: Account) -> tuple[int, int, int, int]:
    assert account.in_flight == 0
    return account.fired, account.delivered, account.filtered, account.lost


def reload(daemon: Daemon, roles: str) -> None:
    (Path(daemon.log_path).parent / "daemon.toml").write_text(roles)
    before = reloads(daemon)
    daemon.process.send_signal(signal.SIGHUP)
    wait_for(lambda: reloads(daemon) > before, "the policy to be looked at")


def reloads(daemon: Daemon) -> int:
    return daemon.log().count("not allowed any more") + daemon.log().count("cannot be reloaded")


class TestOwnProcesses:
    def test_events_and_accounts_know_no_others(self, folder: Path, program: Path) -> None:
        with (
            daemon_with(folder) as daemon,
            ticker_of(ANNE, program) as anne,
            ticker_of(BERT, program) as bert,
            Ticker(program) as root,
        ):
            recorders = [
                recorder(ANNE, daemon, program),
                recorder(ANNE, daemon, program, where="arg0 > 2"),
                recorder(BERT, daemon, program, where=f"pid == {anne.pid}"),
                Recorder(daemon.target, of(program, "tick(arg0)")),
            ]
            anne.do("fire 5")
            bert.do("fire 7")
            root.do("fire 11")
            accounts = [figures(each.finish()) for each in recorders]
        assert accounts == [(5, 5, 0, 0), (5, 2, 3, 0), (7, 0, 7, 0), (23, 23, 0, 0)]
        assert {event.pid for each in recorders[:2] for event in each.events} == {anne.pid}

    @pytest.mark.parametrize(
        ("keys", "functions"),
        [((), ["count"]), (("pid", "arg2:str"), ["count", "sum"]), (("pid",), ["count", "stddev"])],
        ids=["counters", "kernel", "daemon"],
    )
    def test_aggregations_know_no_others(
        self, folder: Path, program: Path, keys: tuple[str, ...], functions: list[str]
    ) -> None:
        value = "arg0" if len(functions) > 1 else ""
        wanted = Aggregate(functions=functions, value=value, by=keys)
        with (
            daemon_with(folder) as daemon,
            ticker_of(ANNE, program) as anne,
            ticker_of(BERT, program) as bert,
            client_of(ANNE, daemon) as client,
            client.aggregate(of(program, "tick"), wanted) as subscription,
        ):
            anne.do("fire 50")
            bert.do("fire 70")
            account = subscription.unsubscribe()
            (snapshot,) = subscription.snapshots()
        assert (account.fired, account.aggregated, account.lost) == (50, 50, 0)
        assert [row.values["count"] for row in snapshot.rows] == [50]
        assert "pid" not in keys or snapshot.rows[0].key[0] == anne.pid

    @pytest.mark.parametrize("key", [(), ("cpu",), ("execname",)], ids=["thread", "kernel", "daemon"])
    def test_spans_know_no_others(self, folder: Path, program: Path, key: tuple[str, ...]) -> None:
        """Starts of one user and ends of another have the same key, where it is not the thread."""
        cpu = {min(os.sched_getaffinity(0))}
        span = Span(start_selectors=[of(program, "tick")], key=key)
        with (
            daemon_with(folder) as daemon,
            ticker_of(ANNE, program) as anne,
            ticker_of(BERT, program) as bert,
            client_of(ANNE, daemon) as client,
            client.subscribe(f"{of(program, 'text')}(arg0:str)", span=span) as subscription,
        ):
            for each in (anne, bert):
                os.sched_setaffinity(each.pid, cpu)
            bert.do("fire 1")
            anne.do("text alone")
            anne.do("fire 1")
            bert.do("text his")
            anne.do("text hers")
            subscription.unsubscribe()
            (event,) = subscription.events()
            account = subscription.account
        assert event.values[0] == "hers"
        assert account is not None
        assert (account.fired, account.spans) == (3, SpanAccount(starts=1, paired=1, unmatched=1))

    def test_process_whose_main_thread_ended_is_still_hers(self, folder: Path, program: Path, library: Path) -> None:
        late = copied(library, folder / "late.so")
        with daemon_with(folder) as daemon, ticker_of(ANNE, program) as anne:
            recording = recorder(ANNE, daemon, late, "called(arg0)")
            anne.begin("leave")
            wait_for(lambda: is_dead(anne.pid), "the main thread to end")
            anne.do(f"open {late}")
            wait_for(recording.armed, "the library")
            anne.do("call 3")
            with client_of(ANNE, daemon) as client:
                assert client.list_probes(of(late, ""), [anne.pid]).probes
            with client_of(BERT, daemon) as client:
                assert not client.list_probes(of(late, "")).probes
            assert figures(recording.finish()) == (3, 3, 0, 0)

    def test_what_only_others_map_is_not_there(self, folder: Path, program: Path) -> None:
        with daemon_with(folder) as daemon, ticker_of(BERT, program) as bert:
            recording = recorder(ANNE, daemon, program)
            assert recording.sites == ()
            assert bert.semaphore == 0
            with ticker_of(ANNE, program) as anne:
                wait_for(recording.armed, "her own process")
                anne.do("fire 2")
                bert.do("fire 3")
            assert figures(recording.finish()) == (2, 2, 0, 0)

    def test_process_of_another_cannot_be_named(self, folder: Path, program: Path) -> None:
        with daemon_with(folder) as daemon, ticker_of(BERT, program) as bert, client_of(ANNE, daemon) as client:
            with pytest.raises(AccessDeniedError, match=f"role user does not allow tracing process {bert.pid},"):
                client.subscribe(of(program, "tick"), SubscribeOptions(pids=[bert.pid]))
            assert not client.list_probes(of(program, ""), [bert.pid], details=True).probes
            with client.subscribe(f"{TICKER}{bert.pid}:{program}::tick") as subscription:
                assert subscription.sites == ()

    @pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o711], ids=["setuid", "setgid", "unreadable"])
    def test_program_with_other_rights_is_nobodys(self, folder: Path, ticker_program: Path, mode: int) -> None:
        """Also where the same file is armed for a process of hers that is one of her own."""
        guarded = copied(ticker_program, folder / "guarded", mode)
        with daemon_with(folder) as daemon, ticker_of(ANNE, guarded) as ticker:
            recording = recorder(ANNE, daemon, guarded)
            with client_of(ANNE, daemon) as client:
                assert not client.list_probes(of(guarded, ""), details=True).probes
            assert recording.sites == ()
            guarded.chmod(0o755)
            with ticker_of(ANNE, guarded) as plain:
                wait_for(recording.armed, "a process of her own")
                ticker.do("fire 3")
                plain.do("fire 2")
                ticker.do("fire 3")
            assert figures(recording.finish()) == (2, 2, 0, 0)
            assert {event.pid for event in recording.events} == {plain.pid}

    def test_process_with_capabilities_of_its_own_is_nobodys(self, folder: Path, program: Path) -> None:
        capable = ("--inh-caps=+net_admin", "--ambient-caps=+net_admin")
        with (
            daemon_with(folder) as daemon,
            ticker_of(ANNE, program) as plain,
            ticker_of(ANNE, program, *capable) as other,
        ):
            with recorder(ANNE, daemon, program) as recording:
                plain.do("fire 2")
                other.do("fire 3")
                plain.do("fire 1")
            assert figures(recording.finish()) == (3, 3, 0, 0)
            assert {event.pid for event in recording.events} == {plain.pid}
        with daemon_with(folder) as daemon, ticker_of(ANNE, program, *capable):
            assert recorder(ANNE, daemon, program).finish().sites == 0
            with client_of(ANNE, daemon) as client:
                assert not client.list_probes(of(program, ""))

    def test_process_in_roots_user_namespace_is_nobodys(self, folder: Path, program: Path) -> None:
        own = ANNE.command("unshare", "--user", "--map-root-user", "unshare", "--user", "--map-root-user", program)
        with (
            daemon_with(folder) as daemon,
            Ticker(*own) as contained,
            Ticker(*ANNE.in_namespace_of(0, program)) as service,
        ):
            with recorder(ANNE, daemon, program) as recording:
                contained.do("fire 2")
                service.do("fire 3")
            assert figures(recording.finish()) == (2, 2, 0, 0)
            assert {event.pid for event in recording.events} == {contained.pid}
            with client_of(ANNE, daemon) as client:
                assert {pid for probe in client.list_probes(of(program, "")) for pid in probe.pids} == {contained.pid}

    def test_process_that_changes_whose_it_is(self, folder: Path, library: Path) -> None:
        loaded = copied(library, folder / "library.so")
        script = (SYSTEM_PYTHON, TARGETS / "guarded.py", loaded)
        with daemon_with(folder) as daemon, Ticker(*ANNE.command(*script)) as anne, Ticker(*script) as changing:
            recording = recorder(ANNE, daemon, loaded, "called(arg0)")
            anne.do("call 2")
            anne.do("dumpable 0")
            anne.do("call 4")
            anne.do("dumpable 1")
            anne.do("call 3")
            assert wait_for(lambda: len(recording.events) == 5, "her hits")
            changing.do("call 4")
            changing.do(f"become {ANNE.uid}")
            changing.do("call 4")
            changing.do("dumpable 1")
            changing.do("call 1")
            assert figures(recording.finish()) == (6, 6, 0, 0)
        assert [event.pid for event in recording.events] == [anne.pid] * 5 + [changing.pid]

    def test_commands(self, folder: Path, program: Path) -> None:
        with daemon_with(folder) as daemon, ticker_of(ANNE, program) as anne, ticker_of(BERT, program) as bert:
            others = recorder(BERT, daemon, program)
            listed = json.loads(stapsdt(ANNE, daemon, "list", of(program, "tick"), "--json", "--details").stdout)
            assert listed["pids"] == [process["pid"] for process in listed["processes"]] == [anne.pid]
            info = json.loads(stapsdt(ANNE, daemon, "info", "--json").stdout)
            # the command itself may have probes too: CPython's
            assert info["processes"] <= 3
            assert info["subscriptions"] == []
            assert info["access"] == {
                "client": f"uid {ANNE.uid}",
                "role": "user",
                "manage": False,
                "list": [ANNE.uid],
                "trace": [ANNE.uid],
                "trace_restriction": "",
                "functions": False,
            }
            shown = stapsdt(ANNE, daemon, "info").stdout
            assert f"user, as uid {ANNE.uid}" in shown
            assert shown.count(f"processes of uid {ANNE.uid}") == 2
            refused = stapsdt(ANNE, daemon, "trace", of(program, "tick"), "--pid", str(bert.pid))
            assert (refused.returncode, refused.stdout) == (1, "")
            assert refused.stderr == (
                f"stapsdt: role user does not allow tracing process {bert.pid}, only those with the rights of uid "
                f"{ANNE.uid} and no others; run 'stapsdt info' to see your rights\n"
            )
            record = f'subscribe refused client="uid {ANNE.uid}" pid='
            assert record in daemon.log()
            assert f'role=user reason="role user does not allow tracing process {bert.pid},' in daemon.log()
            command = ANNE.command(
                *stapsdt_command(daemon.target, "trace", of(program, "tick"), "--count", "2", "--json")
            )
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
            ) as tracing:
                with Client(daemon.target) as client:
                    wait_for(lambda: sum(held.streaming for held in client.subscriptions()) == 2, "the trace")
                bert.do("fire 5")
                anne.do("fire 2")
                events, _ = tracing.communicate(timeout=30)
            assert [json.loads(line)["pid"] for line in events.splitlines()] == [anne.pid] * 2
            assert figures(others.finish()) == (5, 5, 0, 0)

    def test_watch_command(self, folder: Path, program: Path) -> None:
        with daemon_with(folder) as daemon, ticker_of(BERT, program):
            command = ANNE.command(*stapsdt_command(daemon.target, "watch", of(program, "tick"), "--json"))
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as watching:
                assert watching.stdout is not None
                try:
                    with ticker_of(ANNE, program) as anne:
                        added = json.loads(watching.stdout.readline())
                    removed = json.loads(watching.stdout.readline())
                finally:
                    watching.terminate()
        assert (added["change"], added["pids"]) == ("added", [anne.pid])
        assert removed["change"] == "removed"


class TestRoles:
    def test_another_users_processes(self, folder: Path, program: Path) -> None:
        roles = f'[roles.helper]\nusers = ["{ANNE.uid}"]\nlist = "own"\ntrace = ["{BERT.uid}"]\n'
        with (
            daemon_with(folder, roles) as daemon,
            ticker_of(ANNE, program) as anne,
            ticker_of(BERT, program) as bert,
            client_of(ANNE, daemon) as client,
        ):
            recording = recorder(ANNE, daemon, program)
            anne.do("fire 3")
            bert.do("fire 4")
            assert figures(recording.finish()) == (4, 4, 0, 0)
            assert [probe.pids for probe in client.list_probes(of(program, "tick"))] == [(anne.pid,)]

    def test_nothing(self, folder: Path, program: Path) -> None:
        with (
            daemon_with(folder, '[roles.user]\nlist = "none"\ntrace = "none"\n') as daemon,
            ticker_of(ANNE, program),
            client_of(ANNE, daemon) as client,
        ):
            with pytest.raises(AccessDeniedError, match="role user does not allow tracing"):
                client.subscribe(of(program, "tick"))
            with pytest.raises(AccessDeniedError, match="role user does not allow listing"):
                client.list_probes()
            with pytest.raises(AccessDeniedError, match="role user does not allow listing"):
                list(client.watch_probes())

    def test_group(self, folder: Path, program: Path) -> None:
        roles = f'[roles.operator]\ngroups = ["{OPERATORS}"]\n'
        operator = User(ANNE.uid, (64109, OPERATORS))
        with daemon_with(folder, roles) as daemon, ticker_of(BERT, program) as bert:
            recording = recorder(operator, daemon, program)
            with (
                client_of(ANNE, daemon) as without,
                client_of(BERT, daemon) as other,
                client_of(operator, daemon) as one,
            ):
                assert [len(client.subscriptions()) for client in (without, other, one)] == [0, 0, 1]
                assert (without.info().processes < one.info().processes, one.info().access) == (True, one.info().access)
            bert.do("fire 3")
            assert figures(recording.finish()) == (3, 3, 0, 0)

    def test_ftrace_cannot_tell_processes_apart(self, folder: Path, program: Path) -> None:
        with daemon_with(folder, engine="ftrace") as daemon, ticker_of(ANNE, program) as ticker:
            assert "these roles can trace nothing here: user" in daemon.log()
            with client_of(ANNE, daemon) as client:
                with pytest.raises(AccessDeniedError, match="the ftrace engine cannot tell whose process fires"):
                    client.subscribe([of(program, "text(arg0:str)")])
                access = client.info().access
                assert access is not None
                assert (access.trace, access.list) == ((), (ANNE.uid,))
                assert "the bpf engine can" in access.trace_restriction
                # what is listed is no concern of the engine's
                assert client.list_probes([of(program, "tick")])
            shown = stapsdt(ANNE, daemon, "info").stdout
            assert "nothing: the ftrace engine cannot tell whose process fires" in " ".join(shown.split())
            assert ticker.do("fire 3") == 0


class TestReload:
    ROLES = '[roles.staff]\nusers = ["{}"]\ntrace = "{}"\n'

    def test_who_may_goes_on(self, folder: Path, program: Path) -> None:
        events = 200_000
        with (
            daemon_with(folder, self.ROLES.format(BERT.uid, "own")) as daemon,
            ticker_of(ANNE, program) as anne,
            ticker_of(BERT, program) as bert,
        ):
            staying = recorder(ANNE, daemon, program, kernel_buffer_kib=16384)
            going = recorder(BERT, daemon, program)
            bert.do("fire 3")
            anne.begin(f"fire {events}")
            reload(daemon, self.ROLES.format(BERT.uid, "none"))
            reload(daemon, self.ROLES.format(BERT.uid, "none") + "[roles.user]\nmax_events_per_second = 10000000\n")
            anne.finish()
            bert.do("fire 5")
            assert figures(going.finish()) == (3, 3, 0, 0)
            assert going.end_reason is EndReason.ACCESS_REVOKED
            assert figures(staying.finish()) == (events, events, 0, 0)
            assert staying.end_reason is EndReason.UNSUBSCRIBED
        assert [event.values for event in staying.events] == [(number,) for number in range(events)]

    def test_trace_command_tells_that_it_was_revoked(self, folder: Path, program: Path) -> None:
        with daemon_with(folder) as daemon, ticker_of(ANNE, program):
            command = ANNE.command(*stapsdt_command(daemon.target, "trace", of(program, "tick")))
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as tracing:
                with Client(daemon.target) as client:
                    wait_for(lambda: any(held.streaming for held in client.subscriptions()), "the trace")
                reload(daemon, '[roles.user]\ntrace = "none"\n')
                _, told = tracing.communicate(timeout=30)
        assert tracing.returncode == 1
        assert "the server's policy changed" in told

    def test_broken_configuration_changes_nothing(self, folder: Path, program: Path) -> None:
        (folder / "daemon.toml").write_text("")
        daemon = Daemon(folder, "--engine", "bpf", "--config", str(folder / "daemon.toml"))
        try:
            with ticker_of(ANNE, program) as anne:
                recording = recorder(ANNE, daemon, program)
                for broken in ('[roles.user]\ntrace = "mine"\n', "roles =", '[roles.x]\nusers = ["no such user"]\n'):
                    reload(daemon, broken)
                anne.do("fire 2")
                assert figures(recording.finish()) == (2, 2, 0, 0)
            log = daemon.log()
            assert log.count("the configuration cannot be reloaded, and stays as it was: ") == 3
            assert "there is no user 'no such user' on this host" in log
        finally:
            assert daemon.stop() == 0


class TestQuotas:
    def test_of_what_is_held(self, folder: Path, program: Path) -> None:
        roles = "[roles.user]\nmax_subscriptions = 2\nmax_sites = 3\nmax_queue_bytes = 3000000\n"
        selector = of(program, "")
        with (
            daemon_with(folder, roles) as daemon,
            ticker_of(ANNE, program),
            ticker_of(BERT, program),
            client_of(ANNE, daemon) as client,
            client_of(BERT, daemon) as other,
            ExitStack() as held,
        ):
            first = held.enter_context(client.subscribe(of(program, "tick"), SubscribeOptions(queue_bytes=1_000_000)))
            with pytest.raises(LimitReachedError, match="queues would take 3000001 bytes, and its role allows 3000000"):
                client.subscribe(selector, SubscribeOptions(queue_bytes=2_000_001))
            second = held.enter_context(client.subscribe(selector, SubscribeOptions(queue_bytes=2_000_000)))
            refused = [status for status in second.sites if status.state is SiteState.REFUSED]
            assert [len(first.sites), len(second.sites) - len(refused)] == [1, 2]
            assert {status.reason for status in refused} <= {"your role allows 3 sites at once"}
            with pytest.raises(LimitReachedError, match="has 2 subscriptions, as many as its role allows"):
                client.subscribe(selector, SubscribeOptions(queue_bytes=1))
            # another client has quotas of its own
            held.enter_context(other.subscribe(of(program, "tick"), SubscribeOptions(queue_bytes=3_000_000)))
            first.unsubscribe()
            third = held.enter_context(client.subscribe(of(program, "text"), SubscribeOptions(queue_bytes=1_000_000)))
            assert [status.state for status in third.sites] == [SiteState.ARMED]

    def test_of_events(self, folder: Path, program: Path) -> None:
        with (
            daemon_with(folder, "[roles.user]\nmax_events_per_second = 1000\n") as daemon,
            ticker_of(ANNE, program) as anne,
            ticker_of(BERT, program) as bert,
        ):
            first, second, other = (recorder(user, daemon, program) for user in (ANNE, ANNE, BERT))
            everything = Recorder(daemon.target, of(program, "tick(arg0)"))
            anne.do("fire 20000")
            bert.do("fire 500")
            accounts = [each.finish() for each in (first, second)]
            for account, recording in zip(accounts, (first, second), strict=True):
                assert (account.fired, account.lost) == (20000, account.lost_quota)
                assert account.delivered + account.lost_quota == 20000
                assert len(recording.events) == account.delivered
                assert sum(loss.count for loss in recording.losses) == account.lost_quota
            # both share it, and what a second gives is there at once
            assert 1000 <= sum(account.delivered for account in accounts) < 20000
            assert figures(other.finish()) == (500, 500, 0, 0)
            assert figures(everything.finish()) == (20500, 20500, 0, 0)

    def test_of_requests(self, folder: Path) -> None:
        with (
            daemon_with(folder, "[roles.user]\nmax_requests_per_second = 3\n") as daemon,
            client_of(ANNE, daemon) as client,
            client_of(BERT, daemon) as other,
        ):

            def refused() -> str:
                try:
                    client.subscriptions()
                except LimitReachedError as error:
                    return str(error)
                return ""

            assert wait_for(refused, "too many").endswith("makes more than 3 requests a second; try again later")
            other.subscriptions()
            wait_for(lambda: not refused(), "a second to pass")
            assert f'subscriptions refused client="uid {ANNE.uid}"' in daemon.log()


def test_own_name_of_a_file_that_others_have_too(folder: Path, program: Path) -> None:
    """A link of Anne's is what she sees, not the name that it has for Bert, who was there first."""
    own = folder / "hers"
    os.link(program, own)
    with daemon_with(folder) as daemon, ticker_of(BERT, program), ticker_of(ANNE, own):
        recording = recorder(ANNE, daemon, own)
        assert [status.path for status in recording.sites] == [str(own)]
        other = recorder(ANNE, daemon, program)
        assert other.sites == ()
        with client_of(ANNE, daemon) as client:
            assert [probe.path for probe in client.list_probes(of(own, "tick"))] == [str(own)]
            assert not client.list_probes(of(program, "tick"))
        for each in (recording, other):
            each.finish()
