"""Options of dtrace(1) that `stapsdt d` has not, which it says rather than `no such option`."""

from __future__ import annotations

from collections.abc import Callable

import click

_PREPROCESSOR = "here no preprocessor runs; give what it makes: cpp -P FILE | stapsdt d -s /dev/stdin"
_BOOT = "here programs run only while the command does; start it from a systemd unit"
_DEFINITIONS = "here programs declare probes by <sys/sdt.h>, and systemtap's dtrace makes headers of definitions"
_REFUSED = {
    "-w": ("permits programs to change what they trace", "here that is never allowed; leave out such actions"),
    "-C": ("runs the C preprocessor on programs", _PREPROCESSOR),
    "-D NAME": ("defines a name for the C preprocessor", _PREPROCESSOR),
    "-U NAME": ("undefines a name for the C preprocessor", _PREPROCESSOR),
    "-I PATH": ("names a directory of the C preprocessor's", _PREPROCESSOR),
    "-H": ("shows what the C preprocessor includes", _PREPROCESSOR),
    "-X MODE": ("says how the C preprocessor takes ISO C", _PREPROCESSOR),
    "-F": ("indents hits by the calls that they are in", "here print them in order, by printf()"),
    "-L PATH": ("names a directory of D libraries", "here there are none; give what you need by another -s"),
    "-i ID": ("takes a probe by its number", "here numbers last for one command; name the probe by -n"),
    "-S": ("shows the code that a program is compiled to", "here --explain says what the server does of it"),
    "-V": ("tells the version", "here 'stapsdt --version' does"),
    "-G": ("makes an object file of definitions of probes", _DEFINITIONS),
    "-A": ("makes a program that is run while the host boots", _BOOT),
    "-a": ("takes what was traced while the host booted", _BOOT),
    "-32": ("compiles for 32 bits", "here arguments have the size that each probe's note says; leave it out"),
    "-64": ("compiles for 64 bits", "here arguments have the size that each probe's note says; leave it out"),
}  # fmt: skip
"""What each does with DTrace, and what to do here."""


def refused_options() -> list[click.Option]:
    """Return these options, which a command does not receive."""
    options = []
    for usage, (meaning, instead) in _REFUSED.items():
        name, _, value = usage.partition(" ")
        options.append(
            click.Option(
                [name, f"refused{name.replace('-', '_')}"],
                is_flag=not value,
                hidden=True,
                expose_value=False,
                is_eager=True,
                callback=_refusing(f"{name} {meaning} with DTrace; {instead}"),
            )
        )
    return options


def _refusing(reason: str) -> Callable[[click.Context, click.Parameter, object], None]:
    def refuse(context: click.Context, parameter: click.Parameter, value: object) -> None:
        del parameter
        if value:
            raise click.UsageError(reason, context)

    return refuse
