"""A command that is held before its first instruction, and what can be known of it then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from stapsdtd.cli.command import CommandNotExecutableError, CommandNotFoundError, UntilInterrupted, started
from stapsdtd.cli.following import set_on_signals
from stapsdtd.cli.stapsdt import run
from stapsdtd.subscribe_options import SubscribeOptions
from tests.support import SYSTEM_PYTHON, children, compile_once, is_dead, wait_for

SERVER = "unix:/nowhere"


def expected_files(*arguments: str) -> set[str]:
    async def expected() -> set[str]:
        with started(arguments, SERVER) as held:
            return set(held.in_scope(SubscribeOptions()).expected_files)

    return asyncio.run(expected())


def mapped_by(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if " r-xp " in line and "/" in line}


def test_expected_files_are_those_that_it_maps() -> None:
    with subprocess.Popen([SYSTEM_PYTHON, "-S", "-c", "input()"], stdin=subprocess.PIPE) as running:
        wait_for(lambda: any("libc.so" in path for path in mapped_by(running.pid)), "the libraries to be mapped")
        mapped = mapped_by(running.pid)
    assert mapped <= set(map(os.path.realpath, expected_files(SYSTEM_PYTHON, "-S", "-c", "input()")))


def test_program_behind_env_is_expected() -> None:
    assert os.path.realpath(SYSTEM_PYTHON) in expected_files("env", "-i", "A=B", SYSTEM_PYTHON, "-c", "pass")


def test_loader_finds_libraries_where_the_program_says(tmp_path: Path) -> None:
    """By $ORIGIN, which only the loader knows how to follow."""
    for name, text in ("library", "void called(void) {}"), ("program", "void called(void); int main() { called(); }"):
        (tmp_path / f"{name}.c").write_text(text)
    library = compile_once(tmp_path / "library.c", tmp_path / "liblate.so", ["gcc", "-shared", "-fPIC"])
    flags = [f"-L{tmp_path}", "-llate", "-Wl,-rpath,$ORIGIN"]
    program = compile_once(tmp_path / "program.c", tmp_path / "program", ["gcc"], flags)
    assert {str(program), str(library)} <= expected_files(str(program))


def test_statically_linked_program_is_all_that_is_expected(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text("int main() { return 0; }")
    program = compile_once(tmp_path / "program.c", tmp_path / "program", ["gcc", "-static"])
    assert expected_files(str(program)) == {str(program)}


def test_named_files_are_all_that_is_traced() -> None:
    async def options() -> SubscribeOptions:
        with started(["true"], SERVER) as held:
            return held.in_scope(SubscribeOptions(files=["/a"], where="arg0"))

    made = asyncio.run(options())
    assert (made.files, made.expected_files, made.follow, made.where) == (["/a"], (), True, "arg0")


def test_it_is_killed_if_it_is_not_released(tmp_path: Path) -> None:
    made = tmp_path / "made"

    async def hold() -> int:
        before = children()
        with started(["touch", str(made)], SERVER) as held:
            (pid,) = held.in_scope(SubscribeOptions()).pids
            assert children() - before == {pid}
        return pid

    assert is_dead(asyncio.run(hold()))
    assert not made.exists()


@pytest.mark.parametrize(
    ("arguments", "code"), [(["true"], 0), (["sh", "-c", "exit 3"], 3), (["sh", "-c", "kill $$"], 143)]
)
def test_exit_code(arguments: list[str], code: int) -> None:
    async def released(failure: str | None) -> int:
        stop = asyncio.Event()
        with started(arguments, SERVER) as held:
            held.release(stop)
            await stop.wait()
            return await held.exit_code(failure)

    assert asyncio.run(released(None)) == code
    assert asyncio.run(released("the server is gone")) == 1


def test_its_signals_are_as_a_shell_would_leave_them() -> None:
    """Python ignores SIGPIPE, and traps SIGINT."""
    script = "while read name value; do case $name in Sig[BI]*) echo $value;; esac; done < /proc/self/status"
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    code = f"""
import asyncio
from stapsdtd.cli.command import started
async def run():
    with started(["sh", "-c", {script!r}], "unix:/nowhere") as held:
        held.release(asyncio.Event())
        return await held.exit_code(None)
asyncio.run(run())
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == shown


def test_signals_meanwhile_do_not_keep_it_from_being_held() -> None:
    """They reach all of a foreground job: the child between fork and exec, too."""
    code = """
from stapsdtd.cli.command import started
for _ in range(20):
    with started(["true"], "unix:/nowhere"):
        pass
"""
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as holding:
        try:
            wait_for(lambda: children(holding.pid), "the first command to be started")

            def has_ended() -> bool:
                for _ in range(100):
                    os.killpg(holding.pid, signal.SIGWINCH)
                return holding.poll() is not None

            wait_for(has_ended, "every command to be held")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(holding.pid, signal.SIGKILL)
    assert holding.returncode == 0


def test_signal_waits_until_it_is_released() -> None:
    """What arrives before its first instruction is delivered then."""

    async def interrupted() -> int:
        stop = asyncio.Event()
        with started(["sh", "-c", "exit 0"], SERVER) as held:
            (pid,) = held.in_scope(SubscribeOptions()).pids
            os.kill(pid, signal.SIGINT)
            held.release(stop)
            await stop.wait()
            return await held.exit_code(None)

    assert asyncio.run(interrupted()) == 130


def test_signals_are_for_the_trace_once_it_has_ended() -> None:
    async def interrupted() -> None:
        stop, ended = asyncio.Event(), asyncio.Event()
        with set_on_signals(stop), started(["true"], SERVER) as held:
            held.release(ended)
            await ended.wait()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(stop.wait(), 5)

    asyncio.run(interrupted())


def test_ignored_interrupt_stays_ignored() -> None:
    """As of the jobs that a script starts in the background."""
    code = """
import asyncio, sys
from stapsdtd.cli.command import started
from stapsdtd.cli.following import set_on_signals
async def run():
    stop = asyncio.Event()
    with set_on_signals(stop), started(["sh", "-c", "kill -INT $$ $PPID; exit 3"], "unix:/nowhere") as held:
        held.release(asyncio.Event())
        code = await held.exit_code(None)
        return 1 if stop.is_set() else code
sys.exit(asyncio.run(run()))
"""
    done = subprocess.run(["sh", "-c", 'trap "" INT; exec "$@"', "-", sys.executable, "-c", code], check=False)
    assert done.returncode == 3


def test_no_command() -> None:
    with started([], SERVER) as without:
        assert isinstance(without, UntilInterrupted)
        options = SubscribeOptions(pids=[1])
        assert without.in_scope(options) is options


def test_what_cannot_be_executed(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandNotFoundError, match="nosuch: command not found") as not_found,
        started(["nosuch"], SERVER),
    ):
        pass
    assert not_found.value.exit_code == 127
    with pytest.raises(CommandNotExecutableError) as not_executable, started([str(tmp_path)], SERVER):
        pass
    assert not_executable.value.exit_code == 126
    with pytest.raises(CommandNotFoundError, match="'': command not found"), started([""], SERVER):
        pass


def test_missing_interpreter_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter -x\n")
    script.chmod(0o755)
    with (
        pytest.raises(CommandNotExecutableError, match="script: its interpreter /no/such/interpreter does not exist"),
        started([str(script)], SERVER),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["trace", "a:b", "--"], "a command has to follow '--'"),
        (["trace", "--", "true"], "missing argument 'SELECTOR...'"),
        (["trace", "a:b", "--pid", "1", "--", "true"], "give either --pid or a command, whose processes are traced"),
        (["trace", "a:b", "--follow", "--", "true"], "a command is followed anyway; leave --follow out"),
        (["top", "--follow"], "--follow needs the process to follow: give --pid, too"),
    ],
)
def test_wrong_usage(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trace", "top"])
def test_usage_tells_of_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert "[-- COMMAND [ARG]...]" in capsys.readouterr().out


def test_command_runs_where_the_server_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A server elsewhere would trace another process that has the same pid there."""
    assert run(["--server", "tcp:elsewhere:4711", "trace", "a:b", "--", "true"]) == 2
    assert "a command runs on this host, where the server is not; trace it there" in capsys.readouterr().err
    assert run(["--server", "tcp:127.0.0.1:1", "trace", "a:b", "--", "true"]) == 1
