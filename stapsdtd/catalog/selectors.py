"""Selectors: how users name probes.

    postgresql:query__start                        provider and name
    query__start                                   a name, of any provider
    postgres:exec_*:query__start                   DTrace's three parts: module, function, name
    postgresql1234:::query-start(arg0:str[256])    DTrace's four: provider and pid, module, function, name
    python:*                                       globs in each part
    libstdcxx:/usr/lib/*:*:throw                   a module pattern with a slash matches the whole path
    ruby:memfd:libstapsdt:X::start                 further colons belong to the module

An empty part matches everything, and `-` and `__` are equivalent in providers and names.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from stapsdtd.errors import InvalidArgumentError
from stapsdtd.globs import Glob
from stapsdtd.model import MAX_STRING_BYTES, Capture, Site, SiteCapture

MAX_SELECTOR_LENGTH = 1024
_LONG_FORM_COLONS = 3
_CAPTURE = re.compile(r"\s*arg(\d{1,3})\s*+(?::\s*(int|hex|str|buf)\s*+(?:\[\s*(\d{1,9})\s*\]\s*)?)?")
_PID_SUFFIX = re.compile(r"(.*?[^\d])(\d{1,9})")
_HYPHEN = re.compile(r"(\[!?\]?[^]]*\])|-")
"""Or a set of a glob, in which a hyphen makes a range."""
_WILDCARD = re.compile(r"[*?[]")


class Pattern:
    """A case-sensitive glob; an empty one matches everything.

    >>> Pattern("query__*").matches("query__start"), Pattern("").matches("query__start")
    (True, True)

    is_glob: it may match several names.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_glob = text == "" or _WILDCARD.search(text) is not None
        self._is_any = text in {"", "*"}
        self._glob = Glob(text)

    def matches(self, text: str) -> bool:
        return self._is_any or (self._glob.matches(text) if self.is_glob else text == self.text)


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector. captures is None if it has no list: all arguments, as the integers that the note declares."""

    text: str
    provider: Pattern
    module: Pattern
    function: Pattern
    name: Pattern
    captures: tuple[Capture, ...] | None
    provider_of_pid: tuple[Pattern, int] | None = None

    @property
    def is_glob(self) -> bool:
        """Whether it may match probes of several names."""
        return self.provider.is_glob or self.name.is_glob

    @property
    def is_any(self) -> bool:
        """Whether it matches every probe of every object."""
        return not any(pattern.text.strip("*") for pattern in (self.provider, self.module, self.function, self.name))

    def matches_provider(self, provider: str) -> bool:
        """Report whether a provider may be meant, with or without a pid in the selector."""
        patterns = [self.provider, *([self.provider_of_pid[0]] if self.provider_of_pid else [])]
        return any(pattern.matches(normalized(provider)) for pattern in patterns)

    def matches_name(self, name: str) -> bool:
        return self.name.matches(normalized(name))

    def matches_module(self, path: str) -> bool:
        return self.module.matches(path if "/" in self.module.text else os.path.basename(path))


@dataclass(frozen=True, slots=True)
class SelectedSite:
    """What to arm at a site, and for which processes; None for all. clause: the one that selects it, by position in its
    subscription. is_both: it would be the end of a span, and a start.
    """

    capture: SiteCapture
    pids: frozenset[int] | None
    clause: int = 0
    is_both: bool = False

    @property
    def key(self) -> tuple[int, Site]:
        """What tells it from an object's others."""
        return self.clause, self.capture.site


def parse(text: str, field: str = "selectors") -> Selector:
    """Raises InvalidArgumentError, which names the field and the column, if text is not a valid selector."""
    check_length(text, field)
    names, parenthesis, rest = text.partition("(")
    captures = _parse_captures(text, len(names) + 1, rest, field) if parenthesis else None
    if not names:
        raise InvalidArgumentError(field, "a selector names no probe; '*:*' selects all", 0, text)
    provider, module, function, name = _parts(names)
    # a provider of the short form is the whole name
    with_pid = _PID_SUFFIX.fullmatch(provider) if names.count(":") >= _LONG_FORM_COLONS else None
    return Selector(
        text,
        Pattern(_normalized_glob(provider)),
        Pattern(module),
        Pattern(function),
        Pattern(_normalized_glob(name)),
        captures,
        (Pattern(_normalized_glob(with_pid[1])), int(with_pid[2])) if with_pid else None,
    )


def check_length(text: str, field: str) -> None:
    if len(text) > MAX_SELECTOR_LENGTH:
        raise InvalidArgumentError(
            field, f"selectors are limited to {MAX_SELECTOR_LENGTH} characters; this one has {len(text)}"
        )


def _parts(names: str) -> tuple[str, str, str, str]:
    """Return provider, module, function and name. As in DTrace, parts are left out from the left.

    Two parts are provider and name, though, which say more about a static probe than DTrace's function and name.
    """
    match names.split(":"):
        case [name]:
            return "", "", "", name
        case [provider, name]:
            return provider, "", "", name
        case [module, function, name]:
            return "", module, function, name
        case [provider, *module, function, name]:
            return provider, ":".join(module), function, name
        case _:
            raise AssertionError(names)


def _parse_captures(text: str, start: int, rest: str, field: str) -> tuple[Capture, ...]:
    inside, parenthesis, trailing = rest.partition(")")
    if not parenthesis:
        raise InvalidArgumentError(field, f"{text!r} lacks a closing parenthesis", len(text), text)
    if trailing.strip():
        raise InvalidArgumentError(field, f"{text!r} has text after its capture list", start + len(inside) + 1, text)
    captures = []
    column = start
    for part in inside.split(",") if inside.strip() else []:
        place = column + len(part) - len(part.lstrip())
        try:
            captures.append(parse_capture(part))
        except ValueError as error:
            raise InvalidArgumentError(field, str(error), place, text) from None
        column += len(part) + 1
    return tuple(captures)


def parse_capture(text: str) -> Capture:
    """Parse one element of a capture list. Raises ValueError."""
    match = _CAPTURE.fullmatch(text)
    if match is None:
        captures = "arg0, arg0:int, arg0:hex, arg0:str, arg0:str[256] or arg0:buf[16]"
        raise ValueError(f"{text.strip()!r} is not a capture; write {captures}")
    index, kind, digits = match.groups()
    max_bytes = int(digits) if digits else None
    if max_bytes is not None and (kind not in {"str", "buf"} or not 1 <= max_bytes <= MAX_STRING_BYTES):
        raise ValueError(f"{text.strip()!r}: only str and buf take a length, 1 to {MAX_STRING_BYTES} bytes")
    if kind == "buf" and max_bytes is None:
        raise ValueError(f"{text.strip()!r}: buf needs a length, as in arg{index}:buf[16]")
    return Capture(int(index), kind == "str", max_bytes, kind == "hex", kind == "buf")


def normalized(name: str) -> str:
    """Return a provider or name with DTrace's hyphens as a note has them: `query__start` for `query-start`."""
    return name.replace("-", "__")


def _normalized_glob(glob: str) -> str:
    """As normalized, but a hyphen within a set makes a range.

    >>> _normalized_glob("query-[a-z]*")
    'query__[a-z]*'
    """
    # behind the last bracket there is no set, and looking for its end at each [ would take quadratic time
    sets, bracket, rest = glob.rpartition("]")
    return _HYPHEN.sub(lambda match: match[1] or "__", sets + bracket) + normalized(rest)


def captures_at(selector: Selector, site: Site) -> tuple[Capture, ...]:
    """Return what to capture at a site. A glob's captures leave out the arguments that a site lacks."""
    if selector.captures is None:
        return tuple(Capture(index) for index in range(len(site.arguments)))
    if selector.is_glob:
        return tuple(capture for capture in selector.captures if not _is_beyond(capture, site))
    return selector.captures


def missing_argument(selected: SiteCapture) -> str | None:
    """Return why a capture list does not fit a site; None if it does."""
    count = len(selected.site.arguments)
    beyond = [capture.subject for capture in selected.captures if _is_beyond(capture, selected.site)]
    has = "1 argument" if count == 1 else f"{count} arguments"
    return f"it has {has}, so there is no arg{beyond[0]}" if beyond else None


def _is_beyond(capture: Capture, site: Site) -> bool:
    return isinstance(capture.subject, int) and capture.subject >= len(site.arguments)
