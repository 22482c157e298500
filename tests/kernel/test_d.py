"""D programs on the real kernel, as a user of DTrace runs them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import TICKER, Daemon, Ticker, compile_target, running_daemon, stapsdt, stapsdt_command, wait_for
from tests.users import ANNE, public_folder

pytestmark = pytest.mark.kernel

ARGUMENTS = TICKER.replace("ticker", "arguments")


@pytest.fixture(scope="session")
def arguments_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("targets") / "arguments"
    return compile_target("arguments.c", output, f"-DPROVIDER={ARGUMENTS}")


def run(daemon: Daemon, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return stapsdt(daemon.target, "d", *arguments, check=check)


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.strip()]


def test_arguments_of_each_number(daemon: Daemon, arguments_program: Path) -> None:
    program = f"""
        {ARGUMENTS}$target:::none {{ printf("none\\n"); }}
        {ARGUMENTS}$target:::one {{ printf("%d\\n", arg0); }}
        {ARGUMENTS}$target:::three {{ printf("%d %d %d %d\\n", arg0, arg1, arg2, arg3); }}
        {ARGUMENTS}$target:::ten {{ printf("%d %d\\n", arg0, arg9); }}
        {ARGUMENTS}$target:::twelve {{ printf("%d %d %d\\n", args[0], args[10], args[11]); }}
    """
    done = run(daemon, "-q", "-n", program, "-c", str(arguments_program))
    # the probe `one` has two sites; an argument that a probe lacks is 0
    assert rows(done.stdout) == [
        ["none"], ["100"], ["300", "301", "302", "0"], ["1000", "1009"], ["1200", "1210", "1211"], ["7"],
    ]  # fmt: skip


def test_what_matches_is_listed(daemon: Daemon, arguments_program: Path) -> None:
    listed = rows(run(daemon, "-l", "-n", f"{ARGUMENTS}$target:::t*", "-c", str(arguments_program)).stdout)
    assert listed[0] == ["ID", "PROVIDER", "MODULE", "FUNCTION", "NAME"]
    assert {(line[1].rstrip("0123456789"), *line[2:]) for line in listed[1:]} == {
        (ARGUMENTS, "arguments", "fire", name) for name in ("ten", "three", "twelve", "two")
    }


def test_the_types_of_arguments_are_listed(daemon: Daemon, arguments_program: Path) -> None:
    output = run(daemon, "-lvP", f"{ARGUMENTS}$target", "-c", str(arguments_program)).stdout
    described = dict(re.findall(r" (\w+)\n\n\tArgument Types\n((?:\t\t.*\n)+)\n", output))
    assert set(described) == {"none", "one", "two", "three", "six", "ten", "twelve"}
    assert described["none"] == "\t\tNone\n"
    assert described["two"] == "\t\targs[0]: int32_t\n\t\targs[1]: int32_t\n"
    assert described["twelve"].splitlines()[11:] == ["\t\targs[11]: int32_t"]


@pytest.mark.parametrize(
    ("options", "hits"),
    [
        (("-P", f"{ARGUMENTS}$target /arg0 == 300/ {{ trace(probename); }}"), ["three"]),
        (("-m", 'arguments /probename == "one" && pid == $target/ { trace(arg0); }'), ["100", "7"]),
        (("-m", f'{ARGUMENTS}$target:argum* /probename == "none"/ {{ trace(probefunc); }}'), ["fire"]),
        (("-f", f"{ARGUMENTS}$target::main {{ trace(arg0); }}"), ["7"]),
        (("-f", "arguments:main /pid == $target/ { trace(arg0); }"), ["7"]),
        # clauses run in the order in which they were given
        (("-n", "none { trace(1); }", "-f", 'fire /probename == "none"/ { trace(2); }', "-n", "none { trace(3); }"),
         ["123"]),
    ],
)  # fmt: skip
def test_options_name_probes_by_one_part(
    daemon: Daemon, arguments_program: Path, options: tuple[str, ...], hits: list[str]
) -> None:
    done = run(daemon, "-q", *options, "-c", str(arguments_program))
    assert "".join(done.stdout.split()) == "".join(hits)


def test_the_default_action_is_a_line(daemon: Daemon, arguments_program: Path) -> None:
    done = run(daemon, "-n", f"{ARGUMENTS}$target:::six,{ARGUMENTS}$target:::none", "-c", str(arguments_program))
    title, *lines = rows(done.stdout)
    assert title == ["CPU", "ID", "FUNCTION:NAME"]
    assert [line[2] for line in lines] == ["fire:none", "fire:six"]
    assert done.stderr == "stapsdt: matched 2 probes\n"


def test_aggregations_and_variables(daemon: Daemon, ticker_program: Path) -> None:
    program = f"""
        {TICKER}$target:::tick {{ @names[copyinstr(arg2)] = count(); @sum = sum(arg1); self->last = arg0; n++; }}
        {TICKER}$target:::tick /self->last % 4 == 0/ {{ @[arg0 / 4] = quantize(arg0); }}
        END {{ printf("%d\\n", n); printa("%s %@d\\n", @names); printa(@sum); }}
    """
    done = run(daemon, "-q", "-n", program, "-c", f"{ticker_program} 16")
    lines = rows(done.stdout)
    assert lines[:3] == [["16"], ["tick", "16"], [str(-sum(range(16)))]]
    assert sum(line[-1] == "1" and "|@" in "".join(line) for line in lines) == 4


def test_what_the_server_adds_up_is_what_the_command_would(daemon: Daemon, ticker_program: Path) -> None:
    tick = f"{TICKER}$target:::tick /arg1 < -1/"
    what = (
        "@[copyinstr(arg2), execname] = count(); @s = sum(arg1); @a = avg(arg1); @l = min(arg1); @q = quantize(arg1);"
        "@d[execname] = stddev(arg1); @w = lquantize(arg1, -70, -10, 7); @g = llquantize(arg1, 4, 1, 2, 8);"
    )
    printed = [
        run(daemon, "-q", "-n", f"{tick} {{ {what} {more} }}", "-c", f"{ticker_program} 100").stdout
        for more in ("", "x = 1;")
    ]
    assert printed[0] == printed[1]
    assert rows(printed[0])[0] == ["tick", ticker_program.name, "98"]
    plans = [
        run(daemon, "--explain", "-n", f"{tick} {{ {what} {more} }}", "-c", f"{ticker_program} 100").stdout
        for more in ("", "x = 1;")
    ]
    assert "  the server adds up: values, sum of arg1 where arg1 < -1\n" in plans[0]
    assert "this command runs it" not in plans[0]
    assert plans[1].endswith("  this command runs it for each hit: it does more than add up\n")


def test_predicates_on_the_process_and_its_user(daemon: Daemon, ticker: Ticker, engine: str) -> None:
    with subprocess.Popen(
        [*stapsdt_command(daemon.target, "d"), "-q", "-p", str(ticker.pid), "-n",
         f'{TICKER}$target:::tick /pid == $target && arg0 > 1/ {{ printf("%d %s\\n", arg0, execname); }}'],
        stdout=subprocess.PIPE, text=True,
    ) as tracing:  # fmt: skip
        wait_for(lambda: ticker.semaphore, "the probe to be armed")
        ticker.do("fire 4")
        assert tracing.stdout is not None
        assert [tracing.stdout.readline().split() for _ in range(2)] == [["2", "ticker"], ["3", "ticker"]]
        # it ends with the process that is its target
        ticker.kill()
        assert tracing.wait(20) == 0
    if engine == "bpf":
        done = run(daemon, "-q", "-n", f"{TICKER}*:::tick /uid == 0/ {{ exit(uid + 5); }}", "-Z", "-c", "true")
        assert done.returncode == 0


def test_ctrl_c_prints_what_there_is(daemon: Daemon, ticker: Ticker) -> None:
    with subprocess.Popen(
        [*stapsdt_command(daemon.target, "d"), "-n", f"{TICKER}:::tick {{ @ = count(); }} END {{ trace(5); }}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as tracing:  # fmt: skip
        wait_for(lambda: ticker.semaphore, "the probe to be armed")
        ticker.do("fire 3")
        tracing.send_signal(signal.SIGINT)
        output, errors = tracing.communicate(timeout=20)
    assert rows(output)[-1] == ["3"]
    assert [line[-1] for line in rows(output)[:2]] == ["FUNCTION:NAME", "5"]
    assert errors == "stapsdt: matched 1 probe\n"
    assert ticker.semaphore == 0


def test_exit_ends_the_program_with_its_status(daemon: Daemon, ticker_program: Path) -> None:
    tick = f"{TICKER}$target:::tick"
    program = f"{tick} {{ trace(arg0); }} {tick} /arg0 == 2/ {{ exit(9); }} END {{ trace(7); }}"
    done = run(daemon, "-q", "-n", program, "-c", f"{ticker_program} 100", check=False)
    assert (done.returncode, done.stdout.split()) == (9, ["0127"])


def test_floating_point_numbers_are_told_to_be_that(daemon: Daemon, tmp_path: Path) -> None:
    program = compile_target("fractions.c", tmp_path / "fractions")
    values = "fractions$target:::values"
    done = run(daemon, "-q", "-n", f"{values} {{ trace(arg0); }} {values} {{ @ = sum(arg0); }}", "-c", f"{program} 1")
    assert done.stdout.split() == []
    assert done.stderr.count("arg0: a floating-point number, which D has none of\n") == 2


def test_what_cannot_be_written_fails(daemon: Daemon) -> None:
    command = stapsdt_command(daemon.target, "d", "-n", "BEGIN { trace(1); exit(0); }")
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert "cannot write: No space left on device" in done.stderr
    assert done.returncode == 1


def test_timers(daemon: Daemon) -> None:
    program = "BEGIN { n = 3; } tick-20ms { trace(n--); } tick-20ms /n == 0/ { exit(0); }"
    assert run(daemon, "-q", "-n", program).stdout.split() == ["321"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-n", "nosuch_provider:::a"], 1, "probe description nosuch_provider:::a does not match any probes"),
        (
            ["-n", "BEGIN { x = ; }"],
            1,
            "failed to compile 'BEGIN { x = ; }': line 1, column 13: syntax error near \";\"",
        ),
        (["-n", "syscall::read:entry"], 1, "stapsdt has static probes of programs, and kernel functions as fbt"),
        (["-n", "BEGIN { trace($1); }"], 1, "macro argument $1 is not defined"),
        (["-n", "BEGIN x = 1;"], 1, 'line 1, column 7: syntax error near "x"'),
        (
            ["-n", "BEGIN { x = 1; }", "-n", "BEGIN { x; y; }"],
            1,
            "failed to compile 'BEGIN { x; y; }': line 1, column 12: failed to resolve y",
        ),
        (["-n", ";"], 1, "failed to compile ';': the program is empty"),
        (["-P", "a:b"], 1, "line 1, column 1: probe description a:b has more than 1 part"),
        (
            ["-w", "-n", "BEGIN"],
            2,
            "-w permits programs to change what they trace with DTrace; here that is never allowed",
        ),
        (
            ["-C", "-D", "A=1", "-n", "BEGIN"],
            2,
            "-C runs the C preprocessor on programs with DTrace; here no preprocessor",
        ),
        (["-DA", "-n", "BEGIN"], 2, "-D defines a name for the C preprocessor with DTrace; here no preprocessor runs"),
        (["-qFn", "BEGIN"], 2, "-F indents hits by the calls that they are in with DTrace; here print them in order"),
        (["-i", "5"], 2, "-i takes a probe by its number with DTrace; here numbers last for one command"),
        (["-32", "-n", "BEGIN"], 2, "-32 compiles for 32 bits with DTrace; here arguments have the size"),
        (["-V"], 2, "-V tells the version with DTrace; here 'stapsdt --version' does"),
        (["-b", "x y", "-n", "BEGIN"], 1, "invalid value for option bufsize: x y"),
        (["-x", "flowindent", "-n", "BEGIN"], 1, "option flowindent: hits are not indented by the calls"),
        (
            ["-n", "proc:::exec-success"],
            1,
            "provider proc: stapsdt has static probes of programs, and kernel functions",
        ),
        (["-v", "-n", "BEGIN"], 2, "-v goes with -l"),
        (["-n", "BEGIN", "-p", "1", "-c", "true"], 2, "-p and -c exclude each other"),
        ([], 2, "give a program, by -n, -P, -m, -f or -s"),
        (["-x", "nosuch", "-n", "BEGIN"], 1, "invalid option or value: nosuch"),
    ],
)
def test_errors(daemon: Daemon, arguments: list[str], code: int, message: str) -> None:
    done = run(daemon, *arguments, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""


def test_a_script_says_where_it_is_wrong(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "wrong.d"
    script.write_text("#!/usr/bin/env -S stapsdt d -s\n\nBEGIN\n{\n\ttrace(nothing);\n}\n")
    done = run(daemon, "-s", str(script), check=False)
    assert done.returncode == 1
    assert (
        f"failed to compile script {script}: line 5, column 8: failed to resolve nothing: unknown variable name"
        in done.stderr
    )


def test_a_script_runs_by_itself(daemon: Daemon, tmp_path: Path) -> None:
    command, *options = stapsdt_command(daemon.target, "d")
    script = tmp_path / "right.d"
    script.write_text('#pragma D option quiet\nBEGIN { printf("%s %d\\n", $$1, $2 * 2); exit(0); }\n')
    assert run(daemon, "-s", str(script), "a word", "21").stdout == "a word 42\n\n"
    assert command
    assert options


@pytest.mark.parametrize("engine", ["bpf"])
def test_a_user_traces_own_programs(engine: str, ticker_program: Path) -> None:
    with public_folder() as folder, running_daemon(folder, "--engine", engine) as daemon:
        program = shutil.copy(ticker_program, folder / "own")
        os.chmod(daemon.target.removeprefix("unix:"), 0o666)
        text = f"{TICKER}$target:::tick {{ @ = sum(arg0); }}"
        command = stapsdt_command(daemon.target, "d", "-q", "-n", text, "-c", f"{program} 5")
        done = subprocess.run(ANNE.command(*command), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10"]
