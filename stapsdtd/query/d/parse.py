"""Parse D programs.

    #pragma D option quiet
    int last[string];                                    a declaration
    postgresql*:::query-start, postgresql*:::query-done  descriptions
    /pid == $target/                                     a predicate
    { self->began = timestamp; }                         statements

What stands where is told by the first character of each part. A slash ends a predicate if a brace follows, which may
be after blanks and comments, or if nothing but that follows in its line; so `/arg0 / arg1 > 2/ {` has one that divides.
What an option has, as `-n BEGIN`, may end with descriptions alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import cast

from stapsdtd.query.d.errors import DSyntaxError
from stapsdtd.query.d.nodes import (
    Clause,
    Declaration,
    Description,
    Expression,
    Option,
    Part,
    Position,
    Program,
    Scope,
    Statement,
)
from stapsdtd.query.d.options import options_of
from stapsdtd.query.d.statements import StatementParser

MAX_LENGTH = 1 << 16

_SPACE = re.compile(r"(?:\s|/\*.*?\*/)*", re.DOTALL)
_OPENED_COMMENT = re.compile(r"/\*")
_LINE = re.compile(r"#([^\n]*)")
_PRAGMA = re.compile(r"\s*pragma\s+D\s+option\s+(\w+)(?:\s*=\s*(\S+))?\s*")
_DESCRIPTION = re.compile(r"[^\s,{};/\"'()]+")
# possessive: a comment must not be matched again with a later end
_NEXT_DESCRIPTION = re.compile(r"(?:\s|/\*.*?\*/)*+,(?:\s|/\*.*?\*/)*+", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_OPAQUE = re.compile(r"""/\*.*?\*/|"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'""", re.DOTALL)
_UNCLOSED = {
    "/*": "end-of-file encountered before the end of the comment",
    '"': "the string has no closing quote",
    "'": "the character constant has no closing quote",
}
_DECLARES = re.compile(
    r"(?:self|this|unsigned|signed|char|short|int|long|string|void|u?int(?:8|16|32|64)_t|[a-z]+_t)"
    r"(?=(?:\s|/\*.*?\*/)++[\w*;]|;)",
    re.DOTALL,
)
_DECLARATION = re.compile(
    r"(?:(self|this)\s+)?((?:\w+\s+)+(?:\*\s*)*|\w+\s*(?:\*\s*)+)(\w+)\s*(?:\[([^]]*)\])?\s*", re.DOTALL
)
_REFUSED = re.compile(r"(struct|union|enum|typedef|translator|inline|provider|extern|const|volatile)(?=[\s{;]|/\*)")
_SCOPES = {None: Scope.GLOBAL, "self": Scope.SELF, "this": Scope.THIS}


def parse(text: str, last: Part = Part.NAME, *, is_script: bool = False, settings: Sequence[Option] = ()) -> Program:
    """Parse a script, or what an option has. last: the part of a probe that the last part of a description names.
    settings: options that hold besides those of the program.

    Raises DError.
    """
    if len(text) > MAX_LENGTH:
        raise DSyntaxError(f"programs are limited to {MAX_LENGTH} characters; this one has {len(text)}", Position(1, 1))
    return _Reader(text, last, settings, is_script=is_script).program()


class _Reader:
    def __init__(self, text: str, last: Part, settings: Sequence[Option], *, is_script: bool) -> None:
        self._text = text
        self._last = last
        self._is_script = is_script
        self._settings = settings
        self._options: list[Option] = []
        self._offset = 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def program(self) -> Program:
        clauses: list[Clause] = []
        declarations: list[Declaration] = []
        while not self._is_at_end():
            if line := self._taken(_LINE):
                self._options += self._directive(line)
            elif match := _REFUSED.match(self._text, self._offset):
                raise DSyntaxError(f"{match[1]} declarations are not supported", self._at())
            elif _DECLARES.match(self._text, self._offset):
                declarations.append(self._declaration())
            elif not self._taken(re.compile(";")):
                clauses.append(self._clause())
        return Program(tuple(clauses), tuple(declarations), tuple(self._options))

    def _is_at_end(self) -> bool:
        self._skip_space()
        return self._offset == len(self._text)

    def _skip_space(self) -> None:
        self._taken(_SPACE)
        if _OPENED_COMMENT.match(self._text, self._offset):
            raise DSyntaxError(_UNCLOSED["/*"], self._at())

    def _taken(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return what stands here and go on behind it, or None if it is something else."""
        match = pattern.match(self._text, self._offset)
        if match:
            self._offset = match.end()
        return match

    def _at(self, offset: int | None = None) -> Position:
        where = self._offset if offset is None else offset
        line = bisect_right(self._starts, where)
        return Position(line, where - self._starts[line - 1] + 1)

    def _directive(self, line: re.Match[str]) -> Iterator[Option]:
        at = self._at(line.start())
        if pragma := _PRAGMA.fullmatch(line[1]):
            yield Option(pragma[1], pragma[2] or "", at)
        elif line[1].strip().startswith("pragma"):
            raise DSyntaxError("this pragma is not supported; '#pragma D option NAME' is", at)
        elif line[1].startswith("!"):
            if line.start():
                raise DSyntaxError("#! belongs into the first line", at)
        elif line[1].strip():
            raise DSyntaxError(f"#{line[1].split()[0]} needs a preprocessor, which is not run", at)

    def _declaration(self) -> Declaration:
        at = self._at()
        end = next(self._outside(";", self._offset), len(self._text))
        match = _DECLARATION.fullmatch(_COMMENT.sub(" ", self._text[self._offset : end]))
        if match is None or end == len(self._text):
            raise DSyntaxError("syntax error in a declaration, such as 'int counts[string];'", at)
        self._offset = end + 1
        scope, type_name, name, keys = match.groups()
        if keys is not None and not keys.strip():
            raise DSyntaxError(f"{name}[] has no types of keys; write 'int {name}[string];'", at)
        key_types = () if keys is None else tuple(" ".join(key.split()) for key in keys.split(","))
        return Declaration(name, " ".join(type_name.split()), _SCOPES[scope], key_types, at)

    def _clause(self) -> Clause:
        at = self._at()
        descriptions = [self._description()]
        while self._taken(_NEXT_DESCRIPTION):
            descriptions.append(self._description())
        self._skip_space()
        predicate = self._predicate() if self._text.startswith("/", self._offset) else None
        self._skip_space()
        if self._text.startswith("{", self._offset):
            return Clause(tuple(descriptions), predicate, self._statements(), at)
        if predicate is not None:
            raise DSyntaxError("expected actions { } following the predicate", self._at())
        if self._is_script:
            raise DSyntaxError("expected a predicate or actions { } following the probe description", self._at())
        if not self._is_at_end():
            raise self._unexpected()
        return Clause(tuple(descriptions), None, None, at)

    def _description(self) -> Description:
        at = self._at()
        match = self._taken(_DESCRIPTION)
        if match is None:
            raise self._unexpected()
        parts = match[0].split(":")
        if len(parts) > self._last:
            plural = "" if self._last == 1 else "s"
            raise DSyntaxError(f"probe description {match[0]} has more than {self._last} part{plural}", at)
        provider, module, function, name = [""] * (self._last - len(parts)) + parts + [""] * (Part.NAME - self._last)
        return Description(provider, module, function, name, at)

    def _unexpected(self) -> DSyntaxError:
        rest = self._text[self._offset :].split(maxsplit=1)
        return DSyntaxError(
            f'syntax error near "{rest[0][:20]}"' if rest else "syntax error near end of input", self._at()
        )

    def _predicate(self) -> Expression:
        begin = self._offset + 1
        for slash in self._outside("/", begin):
            behind = _SPACE.match(self._text, slash + 1)
            end = behind.end() if behind else slash + 1
            if self._text.startswith("{", end) or "\n" in self._text[slash:end] or end == len(self._text):
                self._offset = slash + 1
                return self._expression(begin, slash)
        raise DSyntaxError("the predicate has no closing slash", self._at())

    def _statements(self) -> tuple[Statement, ...]:
        begin, depth = self._offset + 1, 0
        for brace in self._outside("{}", self._offset):
            depth += 1 if self._text[brace] == "{" else -1
            if not depth:
                self._offset = brace + 1
                return self._parsed(begin, brace)
        raise DSyntaxError("the clause has no closing brace", self._at())

    def _outside(self, characters: str, begin: int) -> Iterator[int]:
        """Yield where characters are, from begin on, outside strings and comments."""
        found = re.compile(f"{_OPAQUE.pattern}|(/\\*|[\"'])|([{re.escape(characters)}])", re.DOTALL)
        for match in found.finditer(self._text, begin):
            if match[1]:
                raise DSyntaxError(_UNCLOSED[match[1]], self._at(match.start()))
            if match[2]:
                yield match.start()

    def _expression(self, begin: int, end: int) -> Expression:
        at = self._at(begin)
        statements = self._parsed(begin, end)
        if len(statements) != 1 or ";" in _OPAQUE.sub("", self._text[begin:end]):
            raise DSyntaxError("a predicate is one expression", at)
        return cast("Expression", statements[0])

    def _parsed(self, begin: int, end: int) -> tuple[Statement, ...]:
        string_bytes = options_of([*self._options, *self._settings]).string_bytes
        return StatementParser(self._text, begin, end, self._at, string_bytes).parse()
