r"""Writes man pages of the commands from what their --help says: `python -m stapsdtd.cli.manual DIRECTORY`.

.TH STAPSDT\-LIST 1 "" "stapsdtd 1.0" "User Commands"
.SH NAME
stapsdt\-list \- Show the probes in running programs and the libraries they load
.SH OPTIONS
.TP
\-p, \-\-pid PID
Only this process. Repeatable.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stapsdtd import __version__
from stapsdtd.cli import stapsdt, stapsdtd
from stapsdtd.cli.command_line import WithCommandLine

if TYPE_CHECKING:
    from collections.abc import Iterator

_AS_IT_IS = "\b\n"
"""click's mark of a paragraph whose lines are not to be filled."""
_EXAMPLES = "Examples:\n"
_WHOLE = 1000
_EXIT_STATUS = "0 for success, 1 for failure, 2 for wrong usage."
_EXIT_STATUS_OF_COMMAND = (
    " With a COMMAND: the command's, 128 and a signal's number if that killed it, 1 if tracing failed, 127 if there is "
    "no such command, 126 if it cannot be executed."
)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name of each page and its text."""
    root = stapsdt.cli
    context = click.Context(root, info_name="stapsdt", **root.context_settings)
    names = root.list_commands(context)
    yield "stapsdt", _page("stapsdt", root, context, ["stapsdtd", *(f"stapsdt-{name}" for name in names)])
    for name in names:
        subcommand = root.get_command(context, name)
        if subcommand is not None:
            child = click.Context(subcommand, context, info_name=name)
            yield f"stapsdt-{name}", _page(f"stapsdt-{name}", subcommand, child, ["stapsdt"])
    daemon = stapsdtd.command
    context = click.Context(daemon, info_name="stapsdtd", **daemon.context_settings)
    yield "stapsdtd", _page("stapsdtd", daemon, context, ["stapsdt"])


def _page(name: str, command: click.Command, context: click.Context, related: list[str]) -> str:
    title = command.get_short_help_str(limit=_WHOLE).removesuffix(".")
    first, *others = _paragraphs(command.help or "")
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    options = [
        record
        for each in command.get_params(context)
        if isinstance(each, click.Option) and (record := each.get_help_record(context))
    ]
    sections = {
        "NAME": [f"{escaped(name)} \\- {escaped(title)}"],
        "SYNOPSIS": [escaped(usage)],
        "DESCRIPTION": [first, *(f".PP\n{paragraph}" for paragraph in others)],
        "OPTIONS": [f".TP\n{escaped(names)}\n{escaped(text)}" for names, text in options],
        "COMMANDS": _commands(command, context),
        "EXAMPLES": [f".PP\n{paragraph}" for paragraph in _paragraphs(command.epilog or "")],
        "EXIT STATUS": [_EXIT_STATUS + (_EXIT_STATUS_OF_COMMAND if isinstance(command, WithCommandLine) else "")],
        "SEE ALSO": [", ".join(f"{escaped(page)}(1)" for page in related)],
    }
    header = f'.TH {escaped(name.upper())} 1 "" "stapsdtd {escaped(__version__)}" "User Commands"'
    body = (f".SH {heading}\n" + "\n".join(lines) for heading, lines in sections.items() if lines)
    return "\n".join([header, *body]) + "\n"


def _commands(command: click.Command, context: click.Context) -> list[str]:
    if not isinstance(command, click.Group):
        return []
    return [
        f".TP\n{escaped(name)}\n{escaped(child.get_short_help_str(limit=_WHOLE))}"
        for name in command.list_commands(context)
        if (child := command.get_command(context, name))
    ]


def _paragraphs(text: str) -> list[str]:
    """Return paragraphs as roff, those whose lines click leaves alone too."""
    cleaned = inspect.cleandoc(text).replace(_AS_IT_IS + _EXAMPLES, _AS_IT_IS)
    return [
        f".nf\n{escaped(inspect.cleandoc(part.removeprefix(_AS_IT_IS)))}\n.fi"
        if part.startswith(_AS_IT_IS)
        else escaped(" ".join(part.split()))
        for part in re.split(r"\n{2,}", cleaned)
        if part.strip()
    ]


def escaped(text: str) -> str:
    """Return the text with what roff would interpret escaped: backslashes, hyphens, and dots that begin a line."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)


def main(directory: str) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (Path(directory) / f"{name}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stapsdtd.cli.manual DIRECTORY")
    main(sys.argv[1])
