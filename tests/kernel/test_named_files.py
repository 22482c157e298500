"""Files that are traced before anybody runs them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from stapsdtd.client import Client, RequestFailedError, SiteState, SubscribeOptions
from stapsdtd.errors import FileRefusedError
from stapsdtd.procs.file_opener import COMMAND, FileOpener
from stapsdtd.procs.named_files import Credentials, NamedFiles
from tests.support import (
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    running_daemon,
    stapsdt,
    stapsdt_command,
    wait_for,
)
from tests.unit.test_objects import parse_here
from tests.users import ANNE, BERT, public_folder

pytestmark = pytest.mark.kernel

_PROGRAMS = 100
_HITS = 10
TICK = f"{TICKER}:tick"


def copy(program: Path, path: Path) -> Path:
    return Path(shutil.copy(program, path))


def run(*paths: Path | str) -> None:
    for path in paths:
        subprocess.run([path, str(_HITS)], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        yield made


def test_first_and_only_runs_are_seen_completely(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    paths = [copy(ticker_program, tmp_path / f"program{number}") for number in range(_PROGRAMS)]
    with Recorder(daemon.target, TICK, files=[str(tmp_path)]) as recorder:
        assert len(recorder.armed()) == _PROGRAMS
        run(*paths)
    assert recorder.account is not None
    assert recorder.account.fired == recorder.account.delivered == len(recorder.events) == _PROGRAMS * _HITS
    assert recorder.losses == []
    sites = {status.site_id: status.path for status in recorder.statuses}
    counts = Counter(event.probe.path for event in recorder.events)
    assert counts == dict.fromkeys(map(str, paths), _HITS)
    assert len(sites) == _PROGRAMS


def test_list_without_a_process(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    path = copy(ticker_program, tmp_path / "program")
    with Client(daemon.target) as client:
        (probe,) = client.list_probes(TICK, files=[str(path)])
        assert (probe.path, probe.pids) == (str(path), ())
        with Ticker(path) as running:
            (probe,) = client.list_probes(TICK, files=[str(path)])
            assert probe.pids == (running.pid,)


def test_semaphore_is_up_from_the_first_instruction(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    path = copy(ticker_program, tmp_path / "program")
    with Recorder(daemon.target, TICK, files=[str(path)]), Ticker(path) as first:
        assert first.semaphore == 1
        with Recorder(daemon.target, TICK), Ticker(path) as second:
            # one attachment serves both
            assert second.semaphore == 1
    with Ticker(path) as later:
        # nobody waits for a file that no process maps
        wait_for(lambda: later.semaphore == 0, "the file to be disarmed")


def test_file_replaced_before_the_run(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    path = copy(ticker_program, tmp_path / "program")
    with Recorder(daemon.target, TICK, files=[str(path)]) as recorder:
        copy(ticker_program, tmp_path / "new").rename(path)
        with Ticker(path) as running:
            wait_for(lambda: running.semaphore, "the new file to be armed")
            running.do("fire 3")
        wait_for(
            lambda: SiteState.DISARMED in {status.state for status in recorder.statuses},
            "the old file, which nobody can run any more, to be disarmed",
        )
    assert [event.values[0] for event in recorder.events] == [0, 1, 2]


def links_of(pid: int) -> list[str]:
    links = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(entry.path))
    return links


def test_deleted_file_is_closed(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    path = copy(ticker_program, tmp_path / "program")

    def held() -> list[str]:
        links = [
            os.readlink(entry.path) for entry in os.scandir(f"/proc/{daemon.pid}/fd") if os.path.lexists(entry.path)
        ]
        return [link for link in links if link.startswith(str(path))]

    with Recorder(daemon.target, TICK, files=[str(path)]):
        assert held()
        path.unlink()
        wait_for(lambda: not held(), "the file to be closed")


def test_file_of_another_mount_namespace(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    script = 'mount -t tmpfs none "$1" && cp "$2" "$1/hidden" && exec "$2"'
    with Ticker("unshare", "-m", "sh", "-ec", script, "sh", tmp_path, ticker_program) as inside:
        path = f"/proc/{inside.pid}/root{tmp_path}/hidden"
        assert not (tmp_path / "hidden").exists()
        with Recorder(daemon.target, TICK, files=[path]) as recorder:
            assert [status.state for status in recorder.sites] == [SiteState.ARMED]
            run(path)
    assert len(recorder.events) == _HITS


def test_overlay(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    copy(ticker_program, tmp_path / "lower" / "program")
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    with mounted("-t", "overlay", "-o", options, "none", str(tmp_path / "merged")):
        merged, lower = tmp_path / "merged" / "program", tmp_path / "lower" / "program"
        with Recorder(daemon.target, TICK, files=[str(merged), str(lower)]) as recorder:
            # one inode, armed once
            assert len(recorder.armed()) == 1
            run(merged, lower)
        assert len(recorder.events) == 2 * _HITS
        assert len(recorder.armed()) == 1


@contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    made = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"mount: {made.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", arguments[-1]], check=True)


@pytest.fixture
def public_daemon(folder: Path, engine: str) -> Iterator[Daemon]:
    """One whose socket every user reaches."""
    with running_daemon(folder, "--engine", engine) as started:
        yield started


@pytest.mark.parametrize("engine", ["bpf"])
def test_user_names_only_what_the_user_may_read(public_daemon: Daemon, ticker_program: Path, folder: Path) -> None:
    readable, secret = copy(ticker_program, folder / "readable"), copy(ticker_program, folder / "secret")
    secret.chmod(0o711)
    (folder / "closed").mkdir(mode=0o700)
    within = copy(ticker_program, folder / "closed" / "program")
    with ANNE.connecting(public_daemon.target) as target, Client(target) as client:
        for path in (secret, within):
            with pytest.raises(RequestFailedError, match=f"^{path}: not readable by you$"):
                client.list_probes(files=[str(path)])
        assert {probe.path for probe in client.list_probes(files=[str(folder)])} == {str(readable)}
        with pytest.raises(RequestFailedError, match="not readable by you"):
            client.list_probes(files=[f"/proc/{public_daemon.pid}/root/etc/passwd"])
    # root may
    with Client(public_daemon.target) as client:
        assert len(client.list_probes(TICK, files=[str(secret), str(within)]).probes) == 2


def test_capabilities_do_not_open_what_the_user_may_not_read(folder: Path, ticker_program: Path) -> None:
    """A server that is not root has them apart from its user id."""
    path = copy(ticker_program, folder / "secret")
    path.chmod(0o711)
    kept = "+setuid,+setgid,+dac_read_search"
    as_server = BERT.command(*COMMAND, options=[f"--inh-caps={kept}", f"--ambient-caps={kept}"])

    def opened(uid: int) -> NamedFiles:
        with closing(FileOpener(parse_here, command=as_server)) as opener:
            return asyncio.run(opener.open([str(path)], Credentials("client", uid, frozenset({uid}), os.getpid())))

    assert len(opened(BERT.uid).files) == 1
    with pytest.raises(FileRefusedError, match="not readable by you"):
        opened(ANNE.uid)


def test_file_is_traced_for_its_users_own_processes(
    public_daemon: Daemon, engine: str, ticker_program: Path, folder: Path
) -> None:
    path = copy(ticker_program, folder / "program")
    with ANNE.connecting(public_daemon.target) as target:
        if engine == "ftrace":
            with Client(target) as client, pytest.raises(RequestFailedError, match="does not allow tracing"):
                client.subscribe(TICK, SubscribeOptions(files=[str(path)]))
            return
        with Recorder(target, TICK, files=[str(path)]) as recorder:
            assert len(recorder.armed()) == 1
            run(path)
            subprocess.run(BERT.command(path, str(_HITS)), check=True, stdout=subprocess.DEVNULL)
            subprocess.run(ANNE.command(path, "3"), check=True, stdout=subprocess.DEVNULL)
    assert [event.values[0] for event in recorder.events] == [0, 1, 2]
    assert recorder.account is not None
    assert recorder.account.fired == 3


@pytest.mark.parametrize("engine", ["bpf"])
def test_killed_daemon_leaves_nothing_armed(tmp_path: Path, engine: str, ticker_program: Path) -> None:
    (tmp_path / "programs").mkdir()
    path = copy(ticker_program, tmp_path / "programs" / "program")
    with running_daemon(tmp_path, "--engine", engine) as daemon:
        with Client(daemon.target) as client:
            client.subscribe(TICK, SubscribeOptions(files=[str(path)]))
            daemon.kill()
        daemon.restart()
        with Ticker(path) as running:
            assert running.semaphore == 0


def test_trace_command(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    path = copy(ticker_program, tmp_path / "program")
    command = stapsdt_command(daemon.target, "trace", TICK, "--file", path.name, "--json", "--count", str(_HITS))
    with Client(daemon.target) as client:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for(lambda: any(each.streaming for each in client.subscriptions()), "the trace to stream")
            run(path)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert [json.loads(line)["args"][0] for line in out.splitlines()] == list(range(_HITS))
    assert json.loads(err.splitlines()[-1]) == {"delivered": _HITS, "filtered": 0, "lost": 0, "sites": 1}


def test_commands_say_what_is_wrong_with_a_file(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    copy(ticker_program, tmp_path / "program")
    listed = stapsdt(daemon.target, "list", TICK, "--file", str(tmp_path))
    assert listed.stdout.startswith(f"{TICK}\t1\tyes\t\t{tmp_path}/program\t")
    for command in (["list"], ["trace", TICK], ["top", TICK]):
        failed = stapsdt(daemon.target, *command, "--file", "/etc/passwd", check=False)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert failed.stderr.splitlines()[-1].endswith("/etc/passwd: not an ELF file")
    unmatched = stapsdt(daemon.target, "trace", f"{TICKER}:tock", "--file", str(tmp_path), "--no-wait", check=False)
    assert f"did you mean {TICKER}:tick?" in unmatched.stderr or f"{TICKER}:tock: no such probe" in unmatched.stderr
