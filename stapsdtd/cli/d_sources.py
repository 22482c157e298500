"""The options of `stapsdt d` that say what to run: -n, -P, -m, -f and -s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from stapsdtd.cli.d_refused import refused_options
from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.nodes import NOWHERE, Option, Part, Program
from stapsdtd.query.d.parse import parse
from stapsdtd.runtime.text import escape

_PARTS = {
    "names": Part.NAME,
    "providers": Part.PROVIDER,
    "modules": Part.MODULE,
    "functions": Part.FUNCTION,
    "scripts": None,
}
"""Of descriptions, what the last part is, by the options' names."""


class CompileError(click.ClickException):
    """A program that cannot run. Nothing was armed."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Source:
    """What one option has. part: what its descriptions' last part is; None of a script. what: it is, for messages."""

    text: str
    part: Part | None
    what: str

    def parsed(self, settings: Sequence[Option]) -> Program:
        """settings: options that hold besides those of the program. Raises DError."""
        is_script = self.part is None
        program = parse(self.text, self.part or Part.NAME, is_script=is_script, settings=settings)
        if not (program.clauses or program.declarations):
            raise DError("the program is empty", NOWHERE)
        return program

    def failed(self, error: DError) -> CompileError:
        place = f"line {error.at.line}, column {error.at.column}: " if error.at.line else ""
        return CompileError(escape(f"failed to compile {self.what}: {place}{error.reason}"))


class WithSources(click.Command):
    """A command with options of these names, each of which may be repeated. It receives `sources` instead: pairs of a
    name and a value, in the order of the command line, which is the order in which clauses run.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *refused_options()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click tells each option its values, and this who came after whom
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        values = {name: iter(ctx.params.pop(name)) for name in _PARTS}
        ctx.params["sources"] = tuple((each.name, next(values[each.name])) for each in order if each.name in values)
        return rest


def source(name: str, value: str) -> Source:
    """Return what an option has. Raises OSError for a script that cannot be read."""
    if (part := _PARTS[name]) is not None:
        return Source(value, part, f"'{value}'")
    with open(value, encoding="utf-8", errors="surrogateescape") as file:
        return Source(file.read(), None, f"script {value}")
