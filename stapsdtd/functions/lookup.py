"""Look kernel functions up: symbols and types as the kernel tells them now, kept for no longer than the lookup.

kallsyms ──► which of them there are, in which modules ──► BTF of these ──► KernelFunction
             available_filter_functions, kprobes' blacklist ──► whether each can be attached to
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Protocol, Self

from stapsdtd.arch.record import Architecture
from stapsdtd.btf.declare import declare
from stapsdtd.btf.types import (
    BtfError,
    Function,
    Pointer,
    Prototype,
    Record,
    TypeId,
    Types,
    is_signed,
    size_of,
    stripped,
)
from stapsdtd.errors import KernelFeatureError
from stapsdtd.functions.attaching import Shape, Symbols, Way, attachability
from stapsdtd.functions.model import Found, FoundNames, FunctionArgument, KernelFunction, Unfound
from stapsdtd.functions.passing import passed_arguments, passed_result
from stapsdtd.functions.selectors import RESULT, VMLINUX, FunctionSelector, ValuePath
from stapsdtd.functions.shapes import ShapeTable
from stapsdtd.functions.symbols import SymbolTable, Wanted, matches, modules_of, near_names
from stapsdtd.functions.values import ResolvedValue, resolve
from stapsdtd.kernel.btf import Btf
from stapsdtd.kernel.function_tables import Symbol

MAX_FUNCTIONS, MAX_TRACED = 1000, 4000
"""Of one answer, and of one subscription."""
_MAX_SUGGESTIONS = 4


class Kernel(Protocol):
    """As functions.kernel.RunningKernel."""

    def symbols(self, *, only_modules: bool = False) -> Iterator[Symbol]: ...

    def traceable(self) -> Iterator[Symbol] | None: ...

    def blacklisted(self) -> frozenset[str]: ...

    def modules(self) -> Sequence[str]: ...

    def open_btf(self, module: str, base: Btf | None) -> Btf: ...


@dataclass(frozen=True, slots=True)
class _Typed:
    symbol: Symbol
    types: Btf
    ident: TypeId


class _Selection:
    """The functions that one answer has: those named without a glob first, then by name.

    left_out: how many there are beyond these. unmatched: the selectors that name none.
    """

    def __init__(self, typed: Iterable[_Typed], wanted: Wanted, most: int) -> None:
        self._wanted = wanted
        self._unmatched = dict.fromkeys(wanted.selectors)
        self._count = 0
        self.functions = nsmallest(
            most,
            self._counted(typed),
            key=lambda each: (each.symbol.name not in wanted.exact, each.symbol.name),
        )
        self.left_out = self._count - len(self.functions)
        self.unmatched = tuple(self._unmatched)

    def _counted(self, typed: Iterable[_Typed]) -> Iterator[_Typed]:
        for each in typed:
            self._count += 1
            if self._unmatched:
                for selector in self._wanted.naming(each.symbol):
                    self._unmatched.pop(selector, None)
            yield each


class Lookup:
    """One lookup, whose BTF is closed when it ends. A context manager."""

    def __init__(self, kernel: Kernel, architecture: Architecture | None, ways: Sequence[Way]) -> None:
        self._kernel = kernel
        self._architecture = architecture
        self._ways = ways
        self._opened = ExitStack()
        self._btf: dict[str, Btf | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def names(self, selectors: Sequence[FunctionSelector]) -> FoundNames:
        """Return the names of functions with types. Raises KernelFeatureError and OSError."""
        wanted = Wanted(selectors)
        selection = _Selection(self._typed(wanted), wanted, MAX_FUNCTIONS)
        names = sorted({each.symbol.name for each in selection.functions})
        return FoundNames(tuple(names), selection.left_out)

    def functions(
        self, selectors: Sequence[FunctionSelector], *, with_shapes: bool = False, most: int | None = None
    ) -> Found:
        """with_shapes: of the values. most: how many functions are returned, MAX_FUNCTIONS by default.

        Raises KernelFeatureError, OSError and, for values that there are not, InvalidArgumentError.
        """
        wanted = Wanted(selectors)
        selection = _Selection(self._typed(wanted), wanted, MAX_FUNCTIONS if most is None else most)
        names = {each.symbol.name for each in selection.functions}
        table = SymbolTable(names | wanted.exact, self._kernel.symbols())
        traceable = self._traceable({each.symbol for each in selection.functions})
        blacklisted = self._kernel.blacklisted() if names else frozenset()
        shapes = ShapeTable() if with_shapes else None
        functions = []
        for each in selection.functions:
            symbol = each.symbol
            is_traceable = None if traceable is None else symbol in traceable
            variants = tuple(table.variants.get(symbol.name, ()))
            symbols = Symbols(table.copies[symbol], is_traceable, symbol.name in blacklisted, variants)
            functions.append(self._function(each, symbols, _paths(each.symbol, wanted), shapes))
        # each suggestion takes a look at all symbols
        suggesting = len(selection.unmatched) <= _MAX_SUGGESTIONS
        unfound = tuple(self._unfound(each, table, suggesting=suggesting) for each in selection.unmatched)
        return Found(tuple(functions), unfound, selection.left_out, tuple(self._ways), shapes.shapes if shapes else ())

    def _typed(self, wanted: Wanted) -> Iterator[_Typed]:
        """Yield the functions that selectors name and BTF describes, once for each module."""
        modules = modules_of(wanted, self._kernel.symbols(only_modules=True)).intersection(self._kernel.modules())
        for module in (VMLINUX, *sorted(modules)):
            if not any(selector.matches_module(module) for selector in wanted.selectors):
                continue
            types = self._types(module)
            if types is None:
                continue
            for name, ident in _named(types, module, wanted):
                yield _Typed(Symbol(module, name), types, ident)

    def _types(self, module: str) -> Btf | None:
        """Return None if a module's BTF does not fit the kernel's, or the module is gone."""
        if module not in self._btf:
            base = None if module == VMLINUX else self._types(VMLINUX)
            try:
                self._btf[module] = self._opened.enter_context(self._kernel.open_btf(module, base))
            except KernelFeatureError:
                if module == VMLINUX:
                    raise
                self._btf[module] = None
        return self._btf[module]

    def _traceable(self, asked: set[Symbol]) -> set[Symbol] | None:
        """Return those that ftrace can patch; None if that cannot be known."""
        found = self._kernel.traceable() if asked else None
        return None if found is None else asked.intersection(found)

    def _function(
        self, each: _Typed, symbols: Symbols, paths: Iterable[tuple[ValuePath, str]], shapes: ShapeTable | None
    ) -> KernelFunction:
        types = each.types
        prototype = _prototype(types, each.ident)
        passed = passed_arguments(types, prototype, self._architecture)
        arguments = tuple(
            FunctionArgument(
                parameter.name,
                declare(types, parameter.type),
                size_of(types, parameter.type),
                passed[position],
                is_signed(types, parameter.type),
                _record_size(types, parameter.type),
            )
            for position, parameter in enumerate(prototype.parameters)
        )
        shape = Shape(
            prototype.is_variadic,
            isinstance(stripped(types, prototype.result), Record),
            tuple(argument.name or "an argument" for argument in arguments if argument.passed.refused),
        )
        return KernelFunction(
            each.symbol.name,
            each.symbol.module,
            declare(types, each.ident),
            arguments,
            FunctionArgument(
                RESULT,
                declare(types, prototype.result),
                size_of(types, prototype.result),
                passed_result(types, prototype, self._architecture),
                is_signed(types, prototype.result),
                _record_size(types, prototype.result),
            ),
            attachability(symbols, shape, self._ways),
            tuple(_value(types, prototype, path, text, shapes) for path, text in paths),
        )

    def _unfound(self, selector: FunctionSelector, table: SymbolTable, *, suggesting: bool) -> Unfound:
        name = selector.name.text
        if selector.name.is_glob:
            return Unfound(selector.text, "no function of the kernel's BTF matches")
        modules = [symbol.module for symbol in table.copies if matches(selector, symbol)]
        if modules:
            return Unfound(selector.text, f"BTF of {modules[0]} has no type of it")
        if elsewhere := sorted({symbol.module for symbol in table.copies if symbol.name == name}):
            return Unfound(selector.text, f"it is a function of {', '.join(elsewhere)}")
        if variants := table.variants.get(name):
            reason = f"the compiler made {', '.join(sorted(variants)[:3])} of it, whose arguments BTF does not tell"
            return Unfound(selector.text, reason)
        reason = "there is no such function, or it is inlined wherever it is called"
        return Unfound(selector.text, reason, near_names(name, self._kernel.symbols()) if suggesting else ())


def _named(types: Btf, module: str, wanted: Wanted) -> Iterator[tuple[str, TypeId]]:
    """Yield the functions of a BTF that selectors name, in a pass over all of its types only where there are globs."""
    selectors = [selector for selector in wanted.selectors if selector.matches_module(module)]
    if any(selector.name.is_glob for selector in selectors):
        found = {name: ident for name, ident in types.functions() if wanted.has_symbol(Symbol(module, name))}
        yield from found.items()
        return
    for name in dict.fromkeys(selector.name.text for selector in selectors):
        ident = types.function(name)
        if ident is not None:
            yield name, ident


def _paths(symbol: Symbol, wanted: Wanted) -> list[tuple[ValuePath, str]]:
    """Return the values that selectors want of a function, each once with a selector."""
    paths: dict[str, tuple[ValuePath, str]] = {}
    for selector in wanted.naming(symbol):
        for path in selector.values:
            paths.setdefault(path.text, (path, selector.text))
    return list(paths.values())


def _record_size(types: Types, ident: TypeId) -> int:
    found = stripped(types, ident)
    target = stripped(types, found.target) if isinstance(found, Pointer) else None
    return target.size if isinstance(target, Record) else 0


def _value(types: Types, prototype: Prototype, path: ValuePath, text: str, shapes: ShapeTable | None) -> ResolvedValue:
    value = resolve(types, prototype, path, text)
    return replace(value, shape=shapes.add(types, value.type)) if shapes else value


def _prototype(types: Types, ident: TypeId) -> Prototype:
    function = types.get(ident)
    prototype = types.get(function.prototype) if isinstance(function, Function) else None
    if not isinstance(prototype, Prototype):
        raise BtfError(f"type {ident} is no function with a prototype")
    return prototype
