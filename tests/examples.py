"""The examples in README.md, docs/ and the package's docstrings, and what their output is compared with.

Each fenced block of a document is run by a test of its language, or says why it cannot be:

    <!-- skip: next "it installs packages" -->
    ```sh

A command of a `console` block goes on to the next line while a quote is open. It may name a `d` block that begins with

    /* transactions.d: what it is about */

In the output of a `console` block

    …             stands for any text, and alone on a line for any lines
    4711          a number stands for any number, and so do times and addresses; digits in a word are literal: int32
    1.5 ms        a duration stands for any, in whatever unit
    0 lost        means none
    two  blanks   are like one
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from sybil import Document
from sybil.document import PythonDocStringDocument
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.support import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
MODULES = tuple(sorted(path for path in (ROOT / "stapsdtd").rglob("*.py") if path.parent.name != "v1"))

_FENCED = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
_SKIPPED = re.compile(r'<!-- skip: next "(?P<reason>[^"\n]+)" -->\n\Z')
_INDENTED = re.compile(r"(?:^    .*\n?|^\n(?=    ))+", re.MULTILINE)
_WILD = re.compile(
    r'(?P<literal>\b0 lost\b|"lost": 0\b)|(?P<text>…)|'
    r"(?P<number>(?<!\w)(?:0x[0-9a-f]+|\d[\d,.:]*)(?P<unit> ?[num]?s\b)?)"
)


@dataclass(frozen=True, slots=True)
class Example:
    """A fenced block of a document, or an indented one of a docstring. line: where it begins.

    skipped: why it is not run; empty where it is.
    """

    path: Path
    line: int
    language: str
    source: str
    skipped: str = ""

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Return the commands of a console block, each with its output."""
        _, *parts = re.split(r"^\$ ", self.source, flags=re.MULTILINE)
        return [_with_output(part) for part in parts]

    @property
    def file_name(self) -> str:
        """Return how a D program's first comment calls it, or nothing."""
        named = re.search(r"^/\* (\S+\.d): ", self.source, re.MULTILINE)
        return named[1] if named else ""


def _with_output(part: str) -> tuple[str, str]:
    """Split what follows a prompt where its quotes are closed."""
    lines = part.splitlines(keepends=True)
    command = next(text for text in accumulate(lines) if _is_closed(text))
    return command.rstrip("\n"), part[len(command) :]


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def in_documents(language: str | None = None) -> list[Example]:
    """Return the examples of all documents, or those in one language that are not skipped."""
    examples = [example for path in DOCUMENTS for example in in_markdown(path.read_text(), path)]
    return [each for each in examples if language is None or (each.language == language and not each.skipped)]


def in_markdown(text: str, path: Path) -> Iterator[Example]:
    for region in _FENCED(Document(text, str(path))):
        skipped = _SKIPPED.search(text, 0, region.start)
        line = text.count("\n", 0, region.start) + 1
        language, source = region.lexemes["language"], region.lexemes["source"]
        yield Example(path, line, language.strip(), source, skipped["reason"] if skipped else "")


def in_docstrings() -> list[Example]:
    """Return the Python programs in the package's docstrings: indented, and beginning with an import."""
    return [example for path in MODULES for example in _in_module(path)]


def _in_module(path: Path) -> Iterator[Example]:
    text = path.read_text()
    for start, _, docstring in PythonDocStringDocument.extract_docstrings(text):
        for block in _INDENTED.finditer(inspect.cleandoc(docstring)):
            source = inspect.cleandoc(block[0])
            if source.startswith(("from ", "import ")):
                yield Example(path, text.count("\n", 0, start) + 1, "python", source + "\n")


def agrees(expected: str, output: str) -> bool:
    """Report whether the output of a command is what a document shows."""
    lines = [_pattern(line) for line in expected.rstrip("\n").split("\n")]
    shown = "".join(" ".join(line.split()) + "\n" for line in output.rstrip("\n").split("\n"))
    return re.fullmatch("".join(lines), shown) is not None


def _pattern(line: str) -> str:
    line = " ".join(line.split())
    if line == "…":
        return r"(?:.*\n)*?"
    pattern, end = "", 0
    for wild in _WILD.finditer(line):
        pattern += re.escape(line[end : wild.start()])
        if wild["literal"]:
            pattern += re.escape(wild["literal"])
        else:
            pattern += ".*" if wild["text"] else r"(?:0x[0-9a-f]+|\d[\d,.:]*)"
            pattern += r" ?[num]?s\b" if wild["unit"] else ""
        end = wild.end()
    return pattern + re.escape(line[end:]) + r"\n"
