"""With which switches a JVM was started, as far as its command line and its environment tell.

java -XX:+ExtendedDTraceProbes -jar app.jar    DTraceMethodProbes, DTraceAllocProbes, DTraceMonitorProbes

jcmd is not asked: it sends the JVM a SIGQUIT to have it open a socket, which a stopped one never does, and which ends
an old one that was started with -Xrs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_ALL = "ExtendedDTraceProbes"
_EACH = frozenset({"DTraceMethodProbes", "DTraceAllocProbes", "DTraceMonitorProbes"})
_SWITCH = re.compile(r"-XX:(?P<sign>[+-])(?P<name>\w+)")
_WITH_VALUE = frozenset({
    "-cp", "-classpath", "--class-path", "-p", "--module-path", "--upgrade-module-path", "--add-modules",
    "--add-reads", "--add-exports", "--add-opens", "--limit-modules", "--patch-module", "-d", "--describe-module",
    "--source", "--enable-native-access",
})  # fmt: skip
_LAST = frozenset({"-jar", "-m", "--module"})
"""Behind which the program and its own arguments stand."""
_IN_FILES = ("@", "-XX:Flags=", "-XX:VMOptionsFile=")


@dataclass(frozen=True, slots=True)
class Switches:
    """on: those of probes. is_all: whether no others may be in files."""

    on: frozenset[str]
    is_all: bool


def switches_of(command_line: Sequence[str], environment: Mapping[str, str]) -> Switches:
    """Return how a JVM was started. A later option takes precedence."""
    options = [
        *_words(environment.get("JDK_JAVA_OPTIONS", "")),
        *_words(environment.get("JAVA_TOOL_OPTIONS", "")),
        *_of_jvm(command_line[1:]),
        *_words(environment.get("_JAVA_OPTIONS", "")),
    ]
    on: set[str] = set()
    for match in filter(None, map(_SWITCH.fullmatch, options)):
        meant = _EACH if match["name"] == _ALL else _EACH & {match["name"]}
        on = on | meant if match["sign"] == "+" else on - meant
    return Switches(frozenset(on), not any(option.startswith(_IN_FILES) for option in options))


def _of_jvm(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the options before the main class."""
    rest = iter(arguments)
    for argument in rest:
        if argument in _LAST or not argument.startswith(("-", "@")):
            return
        yield argument
        if argument in _WITH_VALUE:
            next(rest, None)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
