"""The command line itself: help, usage errors, what is imported, completion scripts."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from stapsdtd import __version__
from stapsdtd.cli import stapsdt


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "stapsdt: error: missing command; see 'stapsdt --help'\n"),
        (["dance"], "stapsdt: error: no such command 'dance'; see 'stapsdt --help'\n"),
        (["trace"], "stapsdt: error: missing argument 'SELECTOR...'; see 'stapsdt trace --help'\n"),
        (["trace", "--xyzzy"], "stapsdt: error: no such option '--xyzzy'; see 'stapsdt trace --help'\n"),
        (
            ["count", "a:b", "--interval", "1e9"],
            "1000000000.0 is not in the range 0.01<=x<=4000000; see 'stapsdt count --help'\n",
        ),
        (["count", "a:b", "--interval", "nan"], "'nan' is not a number of seconds; see 'stapsdt count --help'\n"),
        (
            ["latency", "a:b", "a:c", "--timeout", "nan"],
            "'nan' is not a number of seconds; see 'stapsdt latency --help'\n",
        ),
        (["trace", "a:b", "--duration", "nan"], "'nan' is not a number of seconds; see 'stapsdt trace --help'\n"),
        (["top", "--interval", "nan"], "'nan' is not a number of seconds; see 'stapsdt top --help'\n"),
        (["completion", "cmd"], "see 'stapsdt completion --help'\n"),
        (
            ["--server", "/run/x.sock", "list"],
            "'/run/x.sock' is not of the form unix:PATH or tcp:HOST:PORT; see 'stapsdt --help'\n",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STAPSDT_SERVER", raising=False)
    assert stapsdt.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(told)
    assert err.count("\n") == 1


def test_the_server_comes_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAPSDT_SERVER", "unix:/nowhere/else")
    assert stapsdt.run(["info"]) == 1
    assert capsys.readouterr().err.startswith("stapsdt: cannot connect to unix:/nowhere/else: start the server with")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["--version"]) == 0
    assert capsys.readouterr().out == f"stapsdt {__version__}\n"


def test_help_of_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in stapsdt.cli.list_commands(click.Context(stapsdt.cli)):
        assert f"  {name} " in overview
        assert stapsdt.run([name, "--help"]) == 0
        assert f"stapsdt {name}" in capsys.readouterr().out


def test_help_is_fast() -> None:
    script = "import sys; from stapsdtd.cli.stapsdt import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not {"grpc", "numpy", "rich", "google.protobuf"} & set(done.stderr.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["completion", shell]) == 0
    assert "_STAPSDT_COMPLETE" in capsys.readouterr().out
