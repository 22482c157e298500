"""`-- COMMAND`: a program is traced from its first instruction, and otherwise runs as a shell would have it run."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest

from stapsdtd.cli.options import LEASE_SECONDS
from stapsdtd.client import Client
from tests.support import (
    TICKER,
    Daemon,
    Ticker,
    children,
    is_dead,
    running_daemon,
    stapsdt,
    stapsdt_command,
    wait_for,
)
from tests.users import ANNE, public_folder

pytestmark = pytest.mark.kernel

_PROGRAMS = 100
_HITS = 10
TICK = f"{TICKER}:tick(arg0)"


def copies(program: Path, folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    return [Path(shutil.copy(program, folder / f"program{number}")) for number in range(count)]


def traced(daemon: Daemon, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """Trace, with the events and the summary as JSON."""
    return stapsdt(daemon.target, "trace", TICK, "--json", *map(str, arguments), check=False)


def test_first_and_only_runs_are_seen_completely(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    """Each program is new, runs for some ms, once, as a child of the command."""
    programs = copies(ticker_program, tmp_path / "bin", _PROGRAMS)
    script = "\n".join(f"{program} {_HITS}" for program in programs)
    done = traced(daemon, "--file", tmp_path / "bin", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    counts = Counter(json.loads(line)["path"] for line in done.stdout.splitlines())
    assert counts == dict.fromkeys(map(str, programs), _HITS)
    summary = json.loads(done.stderr.splitlines()[-1])
    assert summary == {"delivered": _PROGRAMS * _HITS, "filtered": 0, "lost": 0, "sites": _PROGRAMS}


def test_program_needs_no_file(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    for program in copies(ticker_program, tmp_path / "bin", 5):
        with Ticker(ticker_program) as stranger:
            done = traced(daemon, "--", program, str(_HITS))
            assert stranger.semaphore == 0
        assert [json.loads(line)["args"] for line in done.stdout.splitlines()] == [[each] for each in range(_HITS)]
        assert json.loads(done.stderr.splitlines()[-1])["delivered"] == _HITS


@pytest.mark.parametrize(
    ("options", "more"), [((), ""), (("--where", "arg0 >= 0"), " and satisfied --where")], ids=["scope", "filter"]
)
def test_hits_of_others_alone_are_told_of(
    daemon: Daemon, ticker_program: Path, options: tuple[str, ...], more: str
) -> None:
    with Ticker(ticker_program) as stranger:
        counting = stapsdt_command(
            daemon.target, "count", f"{TICKER}:tick", "--file", str(ticker_program), *options, "--", "cat"
        )
        with subprocess.Popen(counting, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_for(lambda: stranger.semaphore == 1, "the site to be armed")
            stranger.do("fire 3")
            _, told = process.communicate(timeout=60)
    assert told.splitlines()[-2:] == [
        f"stapsdt: every hit was filtered: none was of cat or what it started{more}",
        "stapsdt: 0 events aggregated, 3 filtered, 0 lost, 1 site",
    ]


def test_command_in_one_argument(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    """As DTrace takes it."""
    (program,) = copies(ticker_program, tmp_path / "a folder", 1)
    done = traced(daemon, "-c", f"'{program}' {_HITS}")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, _HITS), done.stderr
    for arguments, message in [
        (("-c", "true", "--", "true"), "give one command, either with -c or after '--'"),
        (("-c", " "), "invalid value for '-c' / '--command': names no command"),
        (("-c", "echo 'a"), "no closing quotation"),
    ]:
        failed = traced(daemon, *arguments)
        assert failed.returncode == 2
        assert message in failed.stderr


@pytest.mark.parametrize(
    "first_line", ["#!/bin/sh", "#!/usr/bin/env sh", ""], ids=["interpreter", "env", "none, as shells allow"]
)
def test_script(daemon: Daemon, ticker_program: Path, tmp_path: Path, first_line: str) -> None:
    script = tmp_path / "script"
    script.write_text(f'{first_line}\n"$1" "$2"\nexit 9\n')
    script.chmod(0o755)
    done = traced(daemon, "--file", ticker_program, "--", script, ticker_program, "3")
    assert done.returncode == 9, done.stderr
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("kill -INT $$", 130)]
)
def test_exit_code_is_the_commands(daemon: Daemon, ticker_program: Path, script: str, code: int) -> None:
    done = traced(daemon, "--file", ticker_program, "--", "sh", "-c", f"{ticker_program} 1; {script}")
    assert (done.returncode, len(done.stdout.splitlines())) == (code, 1), done.stderr


@pytest.mark.parametrize("name", ["trace", "top"])
def test_exit_code_is_the_commands_even_if_it_has_no_probe(daemon: Daemon, name: str) -> None:
    done = stapsdt(daemon.target, name, "nosuch:probe", "--", "sh", "-c", "exit 7", check=False)
    assert done.returncode == 7
    note = "no probe of what ran was found; name files of programs that end within milliseconds with --file"
    assert f"stapsdt: {note}\n" in done.stderr
    assert "0 events delivered" in done.stderr


def test_nothing_runs_if_a_probe_is_required(daemon: Daemon, tmp_path: Path) -> None:
    made = tmp_path / "made"
    done = stapsdt(daemon.target, "trace", "nosuch:probe", "--no-wait", "--", "touch", str(made), check=False)
    assert done.returncode == 1
    assert not made.exists()


def outlived(daemon: Daemon, folder: Path, before: str, *arguments: Path | str) -> tuple[int, str]:
    """Trace a command that goes on until its trace is over. Return the exit code, and what was told until then."""
    go = folder / "go"
    os.mkfifo(go)
    command = stapsdt_command(
        daemon.target, *map(str, arguments), "--", "sh", "-c", f"{before}; read line < {go}; exit 4"
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        told = ""
        for line in tracer.stderr:
            told += line
            if "waiting for it" in line:
                go.write_text("go\n")
        return tracer.wait(30), told


@pytest.mark.parametrize("name", ["trace", "top"])
def test_command_outlives_an_output_that_is_full(
    daemon: Daemon, ticker_program: Path, tmp_path: Path, name: str
) -> None:
    files = ("--file", ticker_program, "-o", "/dev/full")
    code, told = outlived(daemon, tmp_path, f"{ticker_program} 5", name, TICK, *files)
    assert code == 1
    assert ": No space left on device\n" in told
    assert told.endswith("stapsdt: sh goes on untraced; waiting for it\n")


def test_command_outlives_the_duration(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    files = ("--file", ticker_program, "--duration", "0.2")
    code, told = outlived(daemon, tmp_path, f"{ticker_program} 1", "trace", TICK, *files)
    assert code == 4
    assert told.endswith("stapsdt: sh goes on untraced; waiting for it\n")


def test_command_that_cannot_be_executed(tmp_path: Path) -> None:
    """That is found out before the server is asked for anything."""
    nowhere = f"unix:{tmp_path / 'nobody.sock'}"
    for name, code, reason in [
        ("no-such-program", 127, "no-such-program: command not found"),
        ("/etc/passwd", 126, "/etc/passwd: cannot be executed: Permission denied"),
    ]:
        done = stapsdt(nowhere, "trace", TICK, "--", name, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", f"stapsdt: {reason}\n")


def test_nothing_runs_if_nothing_can_be_traced(tmp_path: Path) -> None:
    made = tmp_path / "made"
    done = stapsdt(f"unix:{tmp_path / 'nobody.sock'}", "trace", TICK, "--", "touch", str(made), check=False)
    assert done.returncode == 1
    assert not made.exists()


def children_called(name: str, parent: int) -> list[int]:
    """Return those that execute a program; another child is the loader, asked for its libraries."""
    named = []
    for child in children(parent):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{child}/comm").read_text() == f"{name}\n":
                named.append(child)
    return named


def test_held_command_ends_with_whoever_holds_it(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        command = stapsdt_command(f"unix:{tmp_path / 'silent.sock'}", "trace", TICK, "--", "touch", str(made))
        with subprocess.Popen(command) as tracer:
            (held,) = wait_for(lambda: children_called("touch", tracer.pid), "the command to be executed")
            tracer.kill()
        wait_for(lambda: is_dead(held), "the command to be killed")
    assert not made.exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_command_goes_on_without_its_tracer(daemon: Daemon, tmp_path: Path, signum: signal.Signals, code: int) -> None:
    go, made = tmp_path / "go", tmp_path / "made"
    os.mkfifo(go)
    script = f"echo running; read line < {go}; echo $line > {made}"
    command = stapsdt_command(daemon.target, "trace", TICK, "--", "sh", "-c", script)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdout.readline() == "running\n"
        (running,) = children(tracer.pid)
        tracer.send_signal(signum)
        assert tracer.wait(30) == code
        assert not is_dead(running)
        go.write_text("done\n")
        wait_for(lambda: made.exists() and made.read_text() == "done\n", "the command to go on")
        if signum == signal.SIGKILL:
            with Client(daemon.target) as client:
                wait_for(lambda: not client.subscriptions(), "the lease to expire", seconds=2 * LEASE_SECONDS)
        if signum == signal.SIGTERM:
            assert f"sh goes on untraced, as process {running}" in tracer.communicate()[1]


def test_terminal_and_its_signals_belong_to_the_command(daemon: Daemon, ticker_program: Path) -> None:
    trap = f'trap "echo caught; {ticker_program} 2; exit 5" INT'
    script = f"{trap}; test -t 0 && echo ready; while :; do sleep 0.02; done"
    command = stapsdt_command(
        daemon.target, "trace", TICK, "--json", "--file", str(ticker_program), "--", "sh", "-c", script
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], list(command))
    shown = ""
    with closing(os.fdopen(terminal, "r", errors="replace")) as reading:
        for line in reading:
            shown += line
            if "ready" in line:
                break
        os.write(terminal, b"\x03")
        while '"delivered"' not in shown:
            shown += reading.readline()
        assert "caught" in shown
        assert '"delivered": 2' in shown
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 5


def test_standard_input_belongs_to_the_command(daemon: Daemon, ticker_program: Path) -> None:
    command = stapsdt_command(daemon.target, "trace", TICK, "--json", "--", str(ticker_program))
    done = subprocess.run(command, input="fire 3\nquit\n", capture_output=True, text=True, check=True, timeout=60)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["args"] for each in events] == [[0], [1], [2]]
    assert "fire 3 1" in done.stdout


def test_summary_tells_of_objects_that_appeared_later(daemon: Daemon, ticker_program: Path, library: Path) -> None:
    command = stapsdt_command(daemon.target, "trace", "*:*", "--", str(ticker_program))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as tracer:
        assert tracer.stdin is not None
        assert tracer.stderr is not None
        assert "whoever else runs" in tracer.stderr.readline()
        assert "armed; stops when ticker ends" in tracer.stderr.readline()
        tracer.stdin.write(f"open {library}\n")
        tracer.stdin.flush()
        assert "armed" in tracer.stderr.readline()
        tracer.stdin.write("call 3\nquit\n")
        tracer.stdin.close()
        assert "; 1 object appeared later, armed at most " in tracer.stderr.readline()
        assert tracer.wait(30) == 0


def test_summary_without_a_command_tells_of_them_too(daemon: Daemon, ticker_program: Path, tmp_path: Path) -> None:
    other = shutil.copy(ticker_program, tmp_path / "other")
    command = stapsdt_command(daemon.target, "trace", f"{TICKER}:tick", "--execname", "other", "--count", "1")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        assert tracer.stderr.readline()
        with subprocess.Popen([other], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as program:
            assert program.stdin is not None
            while "armed" not in tracer.stderr.readline():
                pass
            program.communicate("fire 1\nquit\n", timeout=60)
        assert "; 1 object appeared later, armed at most " in tracer.stderr.read()


def test_top_counts_what_a_command_fires(daemon: Daemon, ticker_program: Path) -> None:
    done = stapsdt(daemon.target, "top", f"{TICKER}:*", "--json", "--", str(ticker_program), "500")
    (last,) = [json.loads(line) for line in done.stdout.splitlines()][-1:]
    assert last["total"] == 500


@pytest.mark.parametrize("engine", ["bpf"])
def test_users_trace_their_own_commands(engine: str, ticker_program: Path) -> None:
    """A program that gets rights by being executed would not get them here, and so is refused."""
    with public_folder() as folder, running_daemon(folder, "--engine", engine) as daemon:
        os.chmod(daemon.target.removeprefix("unix:"), 0o666)
        own, privileged = Path(shutil.copy(ticker_program, folder / "own")), folder / "privileged"
        shutil.copy(ticker_program, privileged)
        privileged.chmod(0o4755)
        script = f"{own} 2; {privileged} 2; exit 4"
        command = stapsdt_command(daemon.target, "trace", TICK, "--json", "--file", str(folder), "--")
        done = subprocess.run(
            ANNE.command(*command, "sh", "-c", script), capture_output=True, text=True, check=False, timeout=60
        )
        assert [json.loads(line)["path"] for line in done.stdout.splitlines()] == [str(own)] * 2, done.stderr
        assert done.returncode == 4
        refused = subprocess.run(ANNE.command(*command, privileged), capture_output=True, text=True, check=False)
        assert (refused.returncode, refused.stdout) == (126, "")
        assert "privileged: runs with other rights than yours, and so cannot be traced" in refused.stderr
        own.chmod(0o711)
        unreadable = subprocess.run(ANNE.command(*command, own), capture_output=True, text=True, check=False)
        assert (unreadable.returncode, unreadable.stdout) == (126, "")
        assert unreadable.stderr == f"stapsdt: {own}: you may not read it, so it cannot be traced\n"
