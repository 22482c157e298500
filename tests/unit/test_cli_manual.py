from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from stapsdtd.cli import manual, stapsdt, stapsdtd
from tests.support import require

PAGES = dict(manual.pages())


def command_of(name: str) -> click.Command:
    if name == "stapsdtd":
        return stapsdtd.command
    command = stapsdt.cli.get_command(click.Context(stapsdt.cli), name.removeprefix("stapsdt-"))
    return command or stapsdt.cli


def test_every_command_has_a_page(tmp_path: Path) -> None:
    commands = stapsdt.cli.list_commands(click.Context(stapsdt.cli))
    manual.main(str(tmp_path / "man1"))
    written = {path.name for path in (tmp_path / "man1").iterdir()}
    assert written == {"stapsdt.1", "stapsdtd.1", *(f"stapsdt-{name}.1" for name in commands)}


@pytest.mark.parametrize("name", PAGES)
def test_page_has_every_option(name: str) -> None:
    options = [each for each in command_of(name).params if isinstance(each, click.Option)]
    for option in [*(opt for each in options for opt in each.opts), "--help"]:
        assert option.replace("-", r"\-") in PAGES[name]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_formatted_without_warnings(name: str) -> None:
    require(shutil.which("groff") is not None, "groff")
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-rLL=78n"],
        input=PAGES[name],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    text = re.sub(r"\x1b\[\d+m|.\x08", "", done.stdout)
    headings = [line for line in text.splitlines() if re.fullmatch(r"[A-Z ]+", line)]
    assert headings[:4] == ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"]
    assert headings[-2:] == ["EXIT STATUS", "SEE ALSO"]


def test_examples_keep_their_lines() -> None:
    assert ".nf\nstapsdt trace postgresql:query__start\nstapsdt trace " in PAGES["stapsdt-trace"]


def test_what_roff_would_interpret_is_escaped() -> None:
    assert manual.escaped(".so x\n'y\n-a \\n") == "\\&.so x\n\\&'y\n\\-a \\en"


def test_pages_of_what_runs_commands_tell_their_exit_codes() -> None:
    telling = {name for name, page in PAGES.items() if "127 if there is no such command" in page}
    assert telling == {f"stapsdt-{name}" for name in ("trace", "top", "count", "stats", "hist", "latency", "spans")}
