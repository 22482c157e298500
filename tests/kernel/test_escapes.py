"""What a traced program chose reaches no terminal as it is, whatever the command."""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from stapsdtd.cli.stapsdt import cli
from stapsdtd.client import Client
from tests.support import COMMANDS, Daemon, Ticker, compile_target, require, wait_for
from tests.terminal import run_on_terminal

PATIENCE_SECONDS = 60

pytestmark = pytest.mark.kernel

NAME = "esc\x1b[7;35m\n\u202e[bold red]x\x9b7m"
"""Of the program's file."""

OWN = re.compile(r"\x1b\[(?:[0-2]|3[0-7])m|\x1b\[\?(?:7|25)[lh]|\x1b\[2J|\x1b\[[HKJ]")
"""The escape sequences of stapsdt: click's and Rich's styles, and the screen of `top`."""

SHOWS_NAMES = {
    "list", "list, details", "list, file", "trace", "count", "top", "d, printf", "d, trace", "d, aggregations",
    "d, list",
}  # fmt: skip
FAILING = {"list, unknown", "trace, unknown", "d, wrong", "signatures"}
HOST_DECIDES = {"kernel trace"}
"""Not every host lets functions of the kernel be traced."""
COMMANDS_TO_RUN = {
    "list": "list 'evil*:*'",
    "list, details": "list --details 'evil*:*'",
    "list, file": "list --file FILE",
    "list, json": "list --json 'evil*:*'",
    "list, unknown": "list 'evil:nothing'",
    "watch": "watch 'evil*:*'",
    "watch, json": "watch --json 'evil*:*'",
    "trace": "trace 'evil*:*(arg0:str, arg1)' 'evil*:*' --pid PID --duration 1",
    "trace, json": "trace 'evil*:*(arg0:str)' --json --pid PID --duration 1",
    "trace, file": "trace 'evil:*' --file FILE --duration 1",
    "trace, command": "trace 'evil*:*(arg0:str)' -- FILE < /dev/null",
    "trace, unknown": "trace 'evil:nothing' --file FILE --duration 1",
    "count": "count 'evil*:*' --by name,execname,arg0:str --pid PID --duration 1",
    "count, json": "count 'evil*:*' --by execname,arg0:str --json --pid PID --duration 1",
    "stats": "stats evil:begin arg1 --by execname,arg0:str --pid PID --duration 1",
    "hist": "hist evil:begin arg1 --by execname,arg0:str --pid PID --duration 1",
    "latency": "latency evil:begin evil:end --by execname,arg0:str --pid PID --duration 1",
    "spans": "spans 'evil:begin(arg0:str)' 'evil:end(arg0:str)' --pid PID --duration 1",
    "top": "top 'evil*:*' --duration 2",
    "info": "info",
    "info, json": "info --json",
    "doctor": "doctor",
    "d, printf": 'd -q -p PID -n \'evil*::: { printf("%s %s %s %s %s %c\\n\\t|", probeprov, probename, probefunc,'
    " execname, copyinstr(arg0), 0x9b); } tick-1s { exit(0); }'",
    "d, trace": "d -p PID -n 'evil*::: { trace(copyinstr(arg0)); trace(execname); tracemem(copyin(arg0, 60), 60); }"
    " tick-1s { exit(0); }'",
    "d, aggregations": "d -p PID -n 'evil*::: { @[probename, execname, copyinstr(arg0)] = count(); @q[execname] ="
    ' quantize(arg1); } tick-1s { printa(@); printa("%s %s %s %@d\\n", @); exit(0); }\'',
    "d, fault": "d -p PID -n 'evil*::: { trace(copyinstr(arg1)); } tick-1s { exit(0); }'",
    "d, list": "d -lv -n 'evil*:::'",
    "d, explain": "d --explain -n 'evil*::: { @[execname] = count(); }'",
    "d, wrong": "d -n 'evil*::: { nonsense(copyinstr(arg0)); }'",
    "kernel info": "kernel info vfs_read",
    "kernel trace": "kernel trace ksys_write --duration 1",
    "completion": "completion bash",
    "completion of selectors": "completion bash > /dev/null; _STAPSDT_COMPLETE=bash_complete COMP_LINE='stapsdt trace"
    " evil' COMP_POINT=18 COMP_WORD=evil " + shlex.quote(str(COMMANDS / "stapsdt")),
    "signatures": "signatures import FILE",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(platform.machine() == "x86_64", "an x86-64 machine")
    folder = tmp_path_factory.mktemp("escapes")
    return compile_target("escapes.c", folder / "escapes").rename(folder / NAME)


@pytest.fixture
def evil(program: Path) -> Iterator[Ticker]:
    with Ticker(program) as running:
        yield running


def foreign(text: str) -> set[str]:
    """Return what stapsdt does not write by itself."""
    return {character for character in OWN.sub("", text) if not character.isprintable() and character not in "\n\t"}


def shell_command(command: str, program: Path, pid: int) -> str:
    first, *rest = command.replace("FILE", shlex.quote(str(program))).replace("PID", str(pid)).split("; ", 1)
    return "; ".join([f"{shlex.quote(str(COMMANDS / 'stapsdt'))} {first}", *rest])


def watching(daemon: Daemon) -> int:
    return daemon.log().count("watch allowed")


def interrupted(command: str, daemon: Daemon, program: Path) -> Callable[[subprocess.Popen[bytes]], None]:
    """Return what goes on while a command runs twice: one that does not end by itself is interrupted."""
    before = watching(daemon)

    def meanwhile(process: subprocess.Popen[bytes]) -> None:
        if not command.startswith("watch"):
            return
        wait_for(lambda: watching(daemon) == before + 2, "both to watch")
        with Ticker(program) as one_more, Client(daemon.target) as client:
            wait_for(lambda: any(one_more.pid in probe.pids for probe in client.list_probes(["evil*:*"])), "it")
        os.killpg(process.pid, signal.SIGINT)

    return meanwhile


@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
@pytest.mark.parametrize("name", COMMANDS_TO_RUN)
def test_nothing_is_written_that_a_terminal_obeys(name: str, daemon: Daemon, program: Path, evil: Ticker) -> None:
    command = COMMANDS_TO_RUN[name]
    line = shell_command(command, program, evil.pid)
    environment = os.environ | {"STAPSDT_SERVER": daemon.target, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with Client(daemon.target) as client:
        wait_for(lambda: any(evil.pid in probe.pids for probe in client.list_probes(["evil*:*"])), "its probes")
    meanwhile = interrupted(command, daemon, program)
    with subprocess.Popen(
        ["/bin/sh", "-c", line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as piped:
        on_terminal = run_on_terminal(line, environment, meanwhile, columns=400)
        if command.startswith("watch"):
            os.killpg(piped.pid, signal.SIGINT)
        in_pipe = piped.communicate(timeout=PATIENCE_SECONDS)[0].decode()
    assert on_terminal
    assert foreign(on_terminal) == set(), on_terminal
    assert foreign(in_pipe) == set(), in_pipe
    assert "\x1b" not in in_pipe
    assert not [line for line in (on_terminal + in_pipe).split("\n") if line.startswith("forged")]
    # the shell that runs it is interrupted, too
    assert piped.returncode in {int(name in FAILING), int(name in HOST_DECIDES), -signal.SIGINT}, in_pipe
    if name in SHOWS_NAMES:
        assert "[bold red]x" in on_terminal
        assert r"\x1b[7;35m" in on_terminal


def test_every_command_is_run() -> None:
    with click.Context(cli) as context:
        assert {name.split(",")[0].split()[0] for name in COMMANDS_TO_RUN} == set(cli.list_commands(context))


def test_what_is_foreign_is_found() -> None:
    assert foreign("\x1b[1mbold\x1b[0m\n\t") == set()
    assert foreign("\x1b[7m") == {"\x1b"}
    assert foreign("\x9b7m\u202e\r\x07\u2028") == {"\x9b", "\u202e", "\r", "\x07", "\u2028"}


@pytest.mark.parametrize("engine", ["bpf"], indirect=True)
def test_the_daemons_log_is_of_whole_lines(daemon: Daemon, evil: Ticker) -> None:
    assert evil.pid
    lines = daemon.log().split("\n")
    assert [line for line in lines if not line.isprintable() or not (line[:2] == "20" or not line)] == []
