"""Which of the kernel's 100,000 symbols selectors name. None is kept but those that an answer needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches

from stapsdtd.functions.selectors import FunctionSelector
from stapsdtd.kernel.function_tables import Symbol

_SUGGESTIONS, _SIMILARITY = 3, 0.75
_NEAR_LENGTH, _NEAR_BEGINNING = 3, 3


class Wanted:
    """The names that selectors ask for. exact: those of selectors that are no globs."""

    def __init__(self, selectors: Sequence[FunctionSelector]) -> None:
        self.selectors = selectors
        self._by_name: dict[str, list[FunctionSelector]] = {}
        self._globs = [selector for selector in selectors if selector.name.is_glob]
        for selector in selectors:
            if not selector.name.is_glob:
                self._by_name.setdefault(selector.name.text, []).append(selector)
        self.exact = frozenset(self._by_name)

    def has(self, name: str) -> bool:
        return name in self.exact or any(selector.name.matches(name) for selector in self._globs)

    def has_symbol(self, symbol: Symbol) -> bool:
        return self.has(symbol.name) and any(self.naming(symbol))

    def naming(self, symbol: Symbol) -> Iterator[FunctionSelector]:
        """Yield the selectors that name a symbol. Of those without globs, the symbol's alone are looked at."""
        for selector in self._by_name.get(symbol.name, ()):
            if selector.matches_module(symbol.module):
                yield selector
        for selector in self._globs:
            if matches(selector, symbol):
                yield selector


def matches(selector: FunctionSelector, symbol: Symbol) -> bool:
    return selector.matches_module(symbol.module) and selector.name.matches(symbol.name)


def modules_of(wanted: Wanted, symbols: Iterable[Symbol]) -> frozenset[str]:
    """Return the modules that have symbols which selectors want."""
    return frozenset(symbol.module for symbol in symbols if wanted.has(symbol.name))


class SymbolTable:
    """Symbols of some names, and what compilers made of them.

    copies: how many there are of each. variants: by the name in the source, such as `vfs_read`, those of functions
    whose arguments the compiler changed, or of which it split off a part: `vfs_read.isra.0`.
    """

    def __init__(self, names: AbstractSet[str], symbols: Iterable[Symbol]) -> None:
        self.copies: Counter[Symbol] = Counter()
        self.variants: dict[str, list[str]] = {}
        for symbol in symbols:
            name, dot, _ = symbol.name.partition(".")
            if name not in names:
                continue
            if dot:
                self.variants.setdefault(name, []).append(symbol.name)
            else:
                self.copies[symbol] += 1


def near_names(name: str, symbols: Iterable[Symbol]) -> tuple[str, ...]:
    """Return names that are like one that there is not."""
    start, length = name[:_NEAR_BEGINNING], len(name)
    candidates = {
        symbol.name
        for symbol in symbols
        if symbol.name.startswith(start) and abs(len(symbol.name) - length) <= _NEAR_LENGTH and "." not in symbol.name
    }
    return tuple(get_close_matches(name, sorted(candidates), _SUGGESTIONS, _SIMILARITY))
