"""What D programs print, in tests/conformance/output.

NAME.d       a program, which needs nothing but BEGIN
NAME.toml    what it does, step by step, for those parts that print
NAME.out     what it prints
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stapsdtd.query.d.aggregations import Aggregation, Function
from stapsdtd.query.d.formats import check_printa, check_printf, parse
from stapsdtd.query.d.print_aggregations import Sorting, printed, remaining
from stapsdtd.query.d.printing import Printer
from stapsdtd.query.d.records import Records
from stapsdtd.query.d.scales import Scale, llquantize, lquantize, quantize
from stapsdtd.query.d.values import Bytes, Integer, Pointer, String, Type, Value

FOLDER = Path(__file__).parent / "output"

_INTEGERS: list[Type] = [Integer(bits, is_signed=is_signed) for bits in (8, 16, 32, 64) for is_signed in (True, False)]
_TYPES: dict[str, Type] = {str(kind): kind for kind in (*_INTEGERS, String(), Pointer(), Bytes())}
_SCALES: dict[str, Callable[..., Scale]] = {"quantize": quantize, "lquantize": lquantize, "llquantize": llquantize}


class Program:
    """Takes the steps, each a method's name and its arguments, and collects what is printed."""

    def __init__(self, name: str) -> None:
        case = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        options = dict(option.partition("=")[::2] for option in case["options"])
        self._sorting = Sorting(
            by_key="aggsortkey" in options,
            is_reverse="aggsortrev" in options,
            position=int(options.get("aggsortpos", "0")),
            key_position=int(options.get("aggsortkeypos", "0")),
        )
        self._aggregations = {name: _aggregation(name, **one) for name, one in case.get("aggregations", {}).items()}
        self._steps: list[list[Any]] = case["steps"]
        self._printed: list[str] = []
        self._records = Records(self._printed.append, is_quiet="quiet" in options)

    def output(self) -> str:
        for name, *arguments in self._steps:
            getattr(self, f"_do_{name}")(*arguments)
        self._printed.append("\n" + remaining(self._aggregations.values(), self._sorting))
        return "".join(self._printed)

    def _do_start(self, cpu: int, probe_id: int, function: str, name: str) -> None:
        self._records.start(cpu, probe_id, function, name)

    def _do_end(self) -> None:
        self._records.end()

    def _do_add(self, name: str, key: list[Value], value: int = 0, increment: int = 1) -> None:
        self._aggregations[name].add(tuple(key), value, increment)

    def _do_clear(self, name: str) -> None:
        self._aggregations[name].clear()

    def _do_trunc(self, name: str, *count: int) -> None:
        self._aggregations[name].truncate(*count)

    def _do_normalize(self, name: str, normal: int) -> None:
        self._aggregations[name].normalize(normal)

    def _do_denormalize(self, name: str) -> None:
        self._aggregations[name].denormalize()

    def _do_printa(self, names: list[str], text: str | None = None) -> None:
        aggregations = [self._aggregations[name] for name in names]
        printer = None
        if text is not None:
            printer = Printer(parse(text), aggregations[0].key)
            check_printa(printer.format, printer.types)
        self._records.text(printed(aggregations, self._sorting, printer))

    def _do_printf(self, text: str, *arguments: list[Any]) -> None:
        printer = Printer(parse(text), tuple(_TYPES[kind] for kind, _ in arguments))
        check_printf(printer.format, printer.types)
        self._records.text(printer.text([value for _, value in arguments]))

    def _do_trace(self, kind: str, value: Value) -> None:
        is_bytes = isinstance(_TYPES[kind], Bytes) and isinstance(value, str)
        self._records.trace(_TYPES[kind], bytes.fromhex(str(value)) if is_bytes else value)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.out"))


def expected(name: str) -> str:
    return (FOLDER / f"{name}.out").read_text()


def _aggregation(name: str, function: str, key: tuple[str, ...] = (), scale: tuple[int, ...] = ()) -> Aggregation:
    kind = Function(function)
    made = _SCALES[function](*scale) if function in _SCALES else None
    return Aggregation(name, kind, tuple(_TYPES[each] for each in key), made)
