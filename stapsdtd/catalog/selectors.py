"""Selectors: how users name probes.

    postgresql:query__start                        provider and name
    query__start                                   a name, of any provider
    postgres:exec_*:query__start                   DTrace's three parts: module, function, name
    postgresql1234:::query-start(arg0:str[256])    DTrace's four: provider and pid, module, function, name
    python:*                                       globs in each part
    libstdcxx:/usr/lib/*:*:throw                   a module pattern with a slash matches the whole path
    ruby:memfd:libstapsdt:X::start                 further colons belong to the module
    ns:"std::vector<int>::push_back"               a part in quotes matches this text alone, see `selector_text`

An empty part matches everything, and `-` and `__` are equivalent in providers and names that are not in quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from stapsdtd.catalog.selector_text import Part, if_of_name, parts_of, quoted
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.globs import Glob
from stapsdtd.model import MAX_STRING_BYTES, Capture, Site, SiteCapture

MAX_SELECTOR_LENGTH = 1024
"""In characters, apart from parts in quotes: names and paths may be longer, and cost no more than to be looked up."""
_LONG_FORM_PARTS = 4
_CAPTURE = re.compile(r"\s*arg(\d{1,3})\s*+(?::\s*(int|hex|str|buf)\s*+(?:\[\s*(\d{1,9})\s*\]\s*)?)?")
_PID_SUFFIX = re.compile(r"(.*?[^\d])(\d{1,9})")
_HYPHEN = re.compile(r"(\[!?\]?[^]]*\])|-")
"""Or a set of a glob, in which a hyphen makes a range."""
_WILDCARD = re.compile(r"[*?[]")


class Pattern:
    """A case-sensitive glob, of which an empty one matches everything; or a text in quotes, which matches itself.

    >>> Pattern("query__*").matches("query__start"), Pattern("").matches("query__start")
    (True, True)
    >>> Pattern("a*", is_quoted=True).matches("ab"), Pattern("query-*", joins_hyphens=True).matches("query__start")
    (False, True)

    joins_hyphens: `-` and `__` are the same, in the pattern and in what it matches, unless it is in quotes. is_glob: it
    may match several names. is_any: it matches everything.
    """

    def __init__(self, text: str, *, is_quoted: bool = False, joins_hyphens: bool = False) -> None:
        self._joins_hyphens = joins_hyphens and not is_quoted
        self.text = _normalized_glob(text) if self._joins_hyphens else text
        self.is_quoted = is_quoted
        self.is_any = not is_quoted and not text.strip("*")
        self.is_glob = not is_quoted and (text == "" or _WILDCARD.search(text) is not None)
        self._glob = Glob(self.text)

    def __str__(self) -> str:
        """Return it as a part of a selector."""
        return quoted(self.text) if self.is_quoted else self.text

    def compared(self, text: str) -> str:
        """Return a text as the pattern compares it."""
        return normalized(text) if self._joins_hyphens else text

    def matches(self, text: str) -> bool:
        if self.is_any:
            return True
        compared = self.compared(text)
        return self._glob.matches(compared) if self.is_glob else compared == self.text


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
        return all(pattern.is_any for pattern in (self.provider, self.module, self.function, self.name))

    def matches_provider(self, provider: str) -> bool:
        """Report whether a provider may be meant, with or without a pid in the selector."""
        patterns = [self.provider, *([self.provider_of_pid[0]] if self.provider_of_pid else [])]
        return any(pattern.matches(provider) for pattern in patterns)

    def matches_name(self, name: str) -> bool:
        return self.name.matches(name)

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
    parts, end = parts_of(text, field)
    _check_length(text, parts, field)
    captures = _parse_captures(text, end + 1, text[end + 1 :], field) if end < len(text) else None
    if not end:
        raise InvalidArgumentError(field, "a selector names no probe; '*:*' selects all", 0, text)
    provider, module, function, name = _four(text, parts, field)
    # a provider of the short form is the whole name, and so is one in quotes
    may_have_pid = len(parts) >= _LONG_FORM_PARTS and not provider.is_quoted
    with_pid = _PID_SUFFIX.fullmatch(provider.text) if may_have_pid else None
    return Selector(
        text,
        Pattern(provider.text, is_quoted=provider.is_quoted, joins_hyphens=True),
        Pattern(module.text, is_quoted=module.is_quoted),
        Pattern(function.text, is_quoted=function.is_quoted),
        Pattern(name.text, is_quoted=name.is_quoted, joins_hyphens=True),
        captures,
        (Pattern(with_pid[1], joins_hyphens=True), int(with_pid[2])) if with_pid else None,
    )


def _check_length(text: str, parts: Sequence[Part], field: str) -> None:
    length = len(text) - sum(len(part.text) for part in parts if part.is_quoted)
    if length > MAX_SELECTOR_LENGTH:
        limit = f"limited to {MAX_SELECTOR_LENGTH} characters apart from parts in quotes"
        raise InvalidArgumentError(field, f"selectors are {limit}; this one has {length}", MAX_SELECTOR_LENGTH, text)


_NO_PART = Part("", 0)


def _four(text: str, parts: Sequence[Part], field: str) -> tuple[Part, Part, Part, Part]:
    """Return provider, module, function and name. As in DTrace, parts are left out from the left.

    Two parts are provider and name, though, which say more about a static probe than DTrace's function and name.
    """
    match parts:
        case [name]:
            return _NO_PART, _NO_PART, _NO_PART, name
        case [provider, name]:
            return provider, _NO_PART, _NO_PART, name
        case [module, function, name]:
            return _NO_PART, module, function, name
        case [provider, module, function, name]:
            return provider, module, function, name
    provider, *of_module, function, name = parts
    for each in of_module:
        if each.is_quoted:
            raise InvalidArgumentError(field, "quotes go around all of the module, colons included", each.column, text)
    return provider, Part(":".join(each.text for each in of_module), of_module[0].column), function, name


def _parse_captures(text: str, start: int, rest: str, field: str) -> tuple[Capture, ...]:
    inside, parenthesis, trailing = rest.partition(")")
    if not parenthesis:
        raise InvalidArgumentError(field, f"{text!r} lacks a closing parenthesis", len(text), text)
    if trailing.strip():
        reason = f"{text!r} has text after its capture list{if_of_name(text)}"
        raise InvalidArgumentError(field, reason, start + len(inside) + 1, text)
    captures = []
    column = start
    for part in inside.split(",") if inside.strip() else []:
        place = column + len(part) - len(part.lstrip())
        try:
            captures.append(parse_capture(part))
        except ValueError as error:
            hint = "" if part.strip().startswith("arg") else if_of_name(text)
            raise InvalidArgumentError(field, f"{error}{hint}", place, text, capture=len(captures)) from None
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
