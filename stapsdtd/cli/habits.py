"""What users of bpftrace, dtrace and the like type, and what to type here: told where an option does not exist.

stapsdt -l 'usdt:/bin/app:*'   to list probes: stapsdt list --file /bin/app
stapsdt -p 4711 trace a:b      options stand behind the command: stapsdt trace -p 4711 a:b
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

_OF_BPFTRACE = re.compile(r"usdt:(?P<path>/[^:]*):(?P<probe>[^:\s]+(?::[^:\s]+)?)")
_KIND_OF_BPFTRACE = re.compile(
    r"\s*(BEGIN|END|usdt|uprobe|uretprobe|kprobe|kretprobe|kfunc|fentry|fexit|tracepoint|rawtracepoint|profile|interval)"
    r"\b[^{]*\{.*",
    re.DOTALL,
)
_OF_OTHERS = {
    **dict.fromkeys(
        ("kprobe", "kretprobe", "kfunc", "kretfunc", "fentry", "fexit"),
        "for functions of the kernel, type: stapsdt kernel trace {name}",
    ),
    **dict.fromkeys(
        ("uprobe", "uretprobe", "ufunc"),
        "stapsdt has static probes of programs; for any function of a program use bpftrace's uprobe",
    ),
    **dict.fromkeys(
        ("tracepoint", "rawtracepoint", "syscall"),
        "stapsdt has static probes of programs; for system calls and tracepoints use bpftrace or perf",
    ),
}
"""What to do instead of selecting probes of these kinds, by what others' selectors begin with."""
_OF_DTRACE = frozenset({"-n", "-P", "-m", "-f", "-i", "-s"})


def of_bpftrace(selector: str) -> tuple[str, str] | None:
    """Return path and probe of `usdt:PATH:PROBE`, None if it is something else."""
    found = _OF_BPFTRACE.fullmatch(selector)
    return (found["path"], found["probe"]) if found else None


def of_others(selector: str) -> str | None:
    """Return what to do instead of `kprobe:vfs_read` and the like, None if a selector is of no such kind."""
    kind, _, rest = selector.partition(":")
    instead = _OF_OTHERS.get(kind)
    return instead.format(name=shlex.quote(rest.rpartition(":")[2] or "FUNCTION")) if instead else None


@dataclass(frozen=True, slots=True)
class _Typed:
    """before, after: the arguments on both sides of an option. value: what follows it, or empty. command: for which it
    was typed, or which is behind it; empty if there is none. options: those that the command has.
    """

    option: str
    before: Sequence[str]
    after: Sequence[str]
    value: str
    command: str
    options: Collection[str]

    @property
    def rest(self) -> Sequence[str]:
        """What is behind the option's value."""
        return self.after[1:]

    def of_d(self) -> str | None:
        """Return the D program that is given by another option, or None."""
        given = [self.option, *self.after]
        return next((text for option, text in itertools.pairwise(given) if option in {"-e", "-n"}), None)


_Hint = tuple[str, Sequence[str]] | None
"""Why, and the arguments to type; None if the habit is another one."""


def _lists(typed: _Typed) -> _Hint:
    if not _OF_DTRACE.isdisjoint(typed.after):
        return "with D programs, that is an option of stapsdt d", ["d", "-l", *typed.after]
    selectors = [each for argument in typed.after for each in _selector(argument)]
    return "to list probes", ["list", *selectors]


def _selector(argument: str) -> Iterator[str]:
    found = of_bpftrace(argument)
    if found is None:
        yield argument
        return
    path, probe = found
    if probe != "*":
        yield probe if ":" in probe else f"*:{probe}"
    yield from ("--file", path)


def _runs_program(typed: _Typed) -> _Hint:
    text = typed.of_d()
    if not text or not ("{" in text or ":" in text):
        return None
    scope = [*_given(typed, "-p"), *_given(typed, "-c")]
    if _KIND_OF_BPFTRACE.fullmatch(text) is None:
        return "programs are in D", ["d", *scope, "-n", text]
    found = _OF_BPFTRACE.match(text.strip())
    *provider, name = found["probe"].split(":") if found else ["PROVIDER", "NAME"]
    described = f"{provider[0] if provider else ''}*:::{name}"
    return "programs are in D, not bpftrace's language", ["d", *scope, "-n", f"{described} {{ trace(arg0); }}"]


def _given(typed: _Typed, option: str) -> Sequence[str]:
    given = [*typed.before, typed.option, *typed.after]
    return given[given.index(option) :][:2] if option in given else ()


def _runs_d(typed: _Typed) -> _Hint:
    return "programs in D have a command of their own", ["d", typed.option, *typed.after]


def _of_process(typed: _Typed) -> _Hint:
    if typed.of_d() is not None:
        return _runs_program(typed)
    if typed.command:
        return "options stand behind the command", [typed.command, typed.option, typed.value, *typed.rest[1:]]
    selectors = [each for argument in typed.rest for each in _selector(argument)]
    return "to list the probes of a process", ["list", typed.option, typed.value or "PID", *selectors]


def _of_command(typed: _Typed) -> _Hint:
    if typed.of_d() is not None:
        return _runs_program(typed)
    given = ["-c", typed.value or "COMMAND"]
    if typed.command:
        return "options stand behind the command", [typed.command, *typed.rest[1:], *given]
    return "to trace a program from its start", ["trace", *(typed.rest or ["SELECTOR"]), *given]


def _tells_version(typed: _Typed) -> _Hint:
    del typed
    return "to see the version", ["--version"]


def _is_named(name: str) -> Callable[[_Typed], _Hint]:
    """Return what tells of an option that has another name here."""
    return lambda typed: (f"it is {name} here", [*typed.before, name, *typed.after]) if name in typed.options else None


def _counts(typed: _Typed) -> _Hint:
    return _is_named("--count")(typed) if typed.value.isdecimal() else _runs_program(typed)


_OF_ALL: dict[str, Callable[[_Typed], _Hint]] = {
    "-l": _lists, "--list": _lists,
    "-e": _runs_program,
    "-n": _runs_d, "-s": _runs_d, "-P": _runs_d, "-m": _runs_d, "-f": _runs_d,
    "-p": _of_process, "--pid": _of_process,
    "-c": _of_command,
    "-v": _tells_version, "-V": _tells_version,
}  # fmt: skip
"""Behind `stapsdt` itself."""

_OF_COMMANDS: dict[str, Callable[[_Typed], _Hint]] = {
    "-e": _runs_program,
    "-n": _counts,
    "-d": _is_named("--duration"), "-t": _is_named("--duration"), "--timeout": _is_named("--duration"),
    "-i": _is_named("--interval"),
    "-u": _is_named("--uid"), "--user": _is_named("--uid"),
    "--comm": _is_named("--execname"),
    "-f": _is_named("--where"), "--filter": _is_named("--where"),
}  # fmt: skip
"""Behind a command, as far as it has the option that is named instead."""


def hint(
    arguments: Sequence[str], option: str, command: str, options: Collection[str], commands: Collection[str]
) -> str | None:
    """Return why an option does not exist, and the command to type in its place, or None if no habit is known.

    arguments: all that was typed behind `stapsdt`. command: has no such option; empty for `stapsdt` itself. options:
    those that it has. commands: all there are.
    """
    at = next((at for at, each in enumerate(arguments) if each == option or _is_joined(each, option)), None)
    habit = (_OF_COMMANDS if command else _OF_ALL).get(option)
    if at is None or habit is None:
        return None
    joined = arguments[at].removeprefix(option).removeprefix("=")
    after = [*([joined] if joined and habit not in {_lists, _tells_version} else []), *arguments[at + 1 :]]
    behind = next((each for each in after[1:2] if each in commands), "")
    # options of stapsdt itself, such as --server, stay in front
    own = () if command else arguments[:at]
    before = arguments[:at] if command else ()
    told = habit(_Typed(option, before, after, after[0] if after else "", command or behind, options))
    if told is None:
        return None
    why, typed = told
    return f"{why}: {shlex.join(['stapsdt', *own, *typed])}"


def _is_joined(argument: str, option: str) -> bool:
    """Report whether an argument is an option with its value, as `-p123` or `--pid=123`."""
    return argument.startswith(f"{option}=") if option.startswith("--") else argument.startswith(option)
