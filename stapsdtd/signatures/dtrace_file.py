"""Signatures from a provider's file, as `dtrace -h -s` takes it.

    #define ForkNumber int

    provider postgresql {
        /* when a page is wanted */
        probe buffer__read__start(ForkNumber, unsigned int block, const char *name);
    };

A type that is not C's own, nor defined in the file, is taken for an integer: how large it is stands in a header. Probes
named like `query__start` and `query__done` are taken for the two ends of something.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from stapsdtd.signatures.files import SignatureFileError

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([\w \t*]+?)[ \t]*$", re.MULTILINE)
_TYPEDEF = re.compile(r"\btypedef\s+([^;{}]+?)\s*(\w+)\s*;")
_DIRECTIVE = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
_PROVIDER = re.compile(r"\bprovider\s+(\w+)\s*\{(.*?)\}", re.DOTALL)
_PROBE = re.compile(r"\bprobe\s+([\w-]+)\s*\(([^)]*)\)[^;]*;?", re.DOTALL)
_WORDS = re.compile(r"\w+|\*|\[[^]]*\]")
_QUALIFIERS = {"const", "volatile", "register", "struct", "union", "enum", "signed"}
_SIZED = re.compile(r"(u?)int(8|16|32|64)_t")
_C_WORDS = {
    "void",
    "char",
    "short",
    "int",
    "long",
    "unsigned",
    "float",
    "double",
    "bool",
    "_Bool",
    "boolean_t",
    "string",
}
_ENDS = {"start": ("done", "end", "stop"), "begin": ("end",), "entry": ("return", "exit")}
_MOST_EXPANSIONS = 8
_MOST_WORDS = 64
"""Definitions may refer to others, or to themselves."""


def import_dtrace(path: Path) -> str:
    """Return a provider's file as a file of signatures, in TOML. Raises SignatureFileError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SignatureFileError(str(path), "", error.strerror or str(error)) from error
    text = _COMMENT.sub(" ", text)
    types = dict(_DEFINE.findall(text)) | {name: meaning for meaning, name in _TYPEDEF.findall(text)}
    providers = _PROVIDER.findall(_DIRECTIVE.sub("", text))
    if len(providers) != 1:
        raise SignatureFileError(str(path), "", f"declares {len(providers)} providers, where one is expected")
    ((provider, body),) = providers
    return "\n".join(_lines(path, provider, body, types))


def _lines(path: Path, provider: str, body: str, types: dict[str, str]) -> Iterator[str]:
    yield f'provider = "{provider}"'
    yield f"source = {json.dumps(path.name, ensure_ascii=False)}"
    yield 'versions = "those of the source"'
    probes = [(name.replace("-", "__"), parameters) for name, parameters in _PROBE.findall(body)]
    names = {name for name, _ in probes}
    if not probes:
        yield "probes = []"
    for name, parameters in probes:
        arguments = [_declared(index, each, types) for index, each in enumerate(_split(parameters))]
        yield ""
        yield "[[probes]]"
        yield f'name = "{name}"'
        yield 'text = ""'
        yield f"arguments = {json.dumps(_distinct(arguments))}"
        begun, _, what = name.rpartition("__")
        if ends := [end for word in _ENDS.get(what, ()) if (end := f"{begun}__{word}") in names]:
            yield f'ends_with = "{ends[0]}"'


def _split(parameters: str) -> list[str]:
    return [] if parameters.strip() in {"", "void"} else parameters.split(",")


def _declared(index: int, parameter: str, types: dict[str, str]) -> str:
    """Return `string query` for `const char *query`, and `integer value1` for the second argument, `int`."""
    words = [word for word in _WORDS.findall(parameter) if word not in _QUALIFIERS]
    plain = [word for word in words if word.isidentifier()]
    # the last word is a name unless it is the type
    has_name = len(plain) > 1 and plain[-1] not in _C_WORDS and plain[-1] not in types
    name = plain[-1] if has_name else f"value{index}"
    if re.fullmatch(r"arg\d+", name):
        name = f"value{index}"
    kind = [word for word in words if not has_name or word != plain[-1]]
    return f"{_type(kind, types)} {name}"


def _type(words: list[str], types: dict[str, str]) -> str:
    for _ in range(_MOST_EXPANSIONS):
        parts = (part for word in words for part in _WORDS.findall(types.get(word, word)))
        words = [part for part in islice(parts, _MOST_WORDS) if part not in _QUALIFIERS]
    pointers = sum(word == "*" or word.startswith("[") for word in words)
    names = [word for word in words if word.isidentifier()]
    if names == ["string"] or (pointers == 1 and names == ["char"]):
        return "string"
    if pointers:
        return "pointer"
    if set(names) & {"bool", "_Bool", "boolean_t"}:
        return "bool"
    if set(names) & {"float", "double"}:
        return "float"
    sized = _SIZED.fullmatch(names[0]) if len(names) == 1 else None
    return f"{sized[1]}int{sized[2]}" if sized else "integer"


def _distinct(arguments: list[str]) -> list[str]:
    names = [argument.partition(" ")[2] for argument in arguments]
    return [
        argument if names.count(name) == 1 else f"{argument}_{index}"
        for index, (argument, name) in enumerate(zip(arguments, names, strict=True))
    ]
