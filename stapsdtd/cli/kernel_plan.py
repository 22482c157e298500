"""What `stapsdt kernel trace` subscribes to: which functions there are, and a clause for what is wanted of them."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import click

from stapsdtd.cli.function_selectors import ENTRY, PROVIDER, RETURN
from stapsdtd.cli.function_text import why_unknown
from stapsdtd.cli.kernel_selectors import RESULT, TracedFunction, TracedValue
from stapsdtd.cli.render import abbreviate, plural
from stapsdtd.client import KernelFunction
from stapsdtd.globs import matches
from stapsdtd.query.byte_order import SIZES
from stapsdtd.subscribe_options import Clause, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stapsdtd.client import AsyncClient, FunctionListing, KernelValue

_MAX_VALUES = 12
"""Of a function, as the server has it."""
_NUMBER_BYTES = frozenset([1, 2, 4, 8])
_MAX_FUNCTIONS = 64
_MAX_STACK = 16
"""As the server has it."""
_SHORTEST_STACK = 2
_MAX_COMPARISONS = 64
"""Of a clause, as the server has it."""
_WORD = re.compile(r'"[^"]*"|\b[A-Za-z_]\w*')
_CONSTANTS = {name: number for number, name in errno.errorcode.items()} | {"NULL": 0, "true": 1, "false": 0}
_SHOWN_ENUMERATORS = 8


@dataclass(frozen=True, slots=True)
class Shown:
    """A value of a function. known: its type, and where it lies. argument: what the server calls it, as in `arg4`."""

    wanted: TracedValue
    known: KernelValue
    argument: int

    @property
    def capture(self) -> str:
        return f"arg{self.argument}:str" if self.wanted.is_string else f"arg{self.argument}"

    @property
    def is_text(self) -> bool:
        """Whether it is compared as text, as an array of bytes is to a string."""
        return self.wanted.is_string or (self.known.is_text and '"' in self.wanted.test)

    @property
    def condition(self) -> str:
        """Return what is to hold of it, in the server's language; empty if nothing is. Raises click.UsageError."""
        if not self.wanted.test:
            return ""
        function = "str" if self.is_text else self.wanted.turned
        operand = f"{function}(arg{self.argument})" if function else f"arg{self.argument}"
        return f"{operand} {_WORD.sub(self._number, self.wanted.test)}"

    def _number(self, word: re.Match[str]) -> str:
        """Return the number of an enumerator, or of a name that every type has. Raises click.UsageError."""
        if word[0].startswith('"'):
            return word[0]
        number = self.known.enumerators.get(word[0], _CONSTANTS.get(word[0]))
        if number is None:
            names = abbreviate(list(self.known.enumerators), _SHOWN_ENUMERATORS)
            known = f"which has {names}" if names else "which is no enum"
            raise click.UsageError(f"{self.wanted.path}: {word[0]} is no value of {self.known.type}, {known}")
        return str(number)


class _End(NamedTuple):
    """An entry or a return. test: a filter that rejects hits of this one alone, with so many comparisons; or empty."""

    selector: str
    test: str
    comparisons: int


@dataclass(frozen=True, slots=True)
class Traced:
    """A function with the values that are shown of it. at_entry, at_return: None if nothing is shown there."""

    function: KernelFunction
    at_entry: tuple[Shown, ...] | None
    at_return: tuple[Shown, ...] | None

    @property
    def is_awaited(self) -> bool:
        """Whether a call is shown only if something holds at its return."""
        return any(each.wanted.test for each in self.at_return or ())

    @property
    def is_paired(self) -> bool:
        """Whether what there is at the entry is shown only if something holds at the return."""
        return bool(self.at_entry) and self.is_awaited

    @property
    def is_entered_first(self) -> bool:
        """Whether the return is shown only if something held at the entry, which is shown by itself."""
        has_condition = any(each.wanted.test for each in self.at_entry or ())
        return has_condition and self.at_return is not None and not self.is_paired

    @property
    def text(self) -> str:
        return f"{self.function.module}:{self.function.name}"

    def selector(self, where: str, *, has_captures: bool = True) -> str:
        """Return the selector of its entry or its return, with what is captured there."""
        shown = (self.at_entry if where == ENTRY else self.at_return) or ()
        captures = ", ".join(each.capture for each in shown if has_captures)
        return f"{PROVIDER}:{self.function.module}:{self.function.name}:{where}({captures})"

    def ends(self, *, both: bool = False) -> Iterator[_End]:
        """Yield its entry and its return, as wanted by themselves. both: also the one of which nothing is shown."""
        ends = {ENTRY: self.at_entry, RETURN: self.at_return}
        wanted = [where for where in ends if both or ends[where] is not None]
        if self.is_entered_first and not both:
            wanted.remove(RETURN)
        for where in wanted:
            conditions = [each.condition for each in ends[where] or () if each.condition]
            others = [f'function != "{self.function.name}"', *([f'name != "{where}"'] if len(wanted) > 1 else [])]
            test = f"({' || '.join([*others, _all(conditions)])})" if conditions else ""
            yield _End(self.selector(where), test, len(others) + len(conditions) if conditions else 0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of the functions of a name. is_implied: entry and return are shown, whatever there is of them."""

    name: str
    values: Sequence[TracedValue]
    is_implied: bool = False

    @property
    def text(self) -> str:
        """Return how a subscription names them."""
        paths = dict.fromkeys(each.path for each in self.values)
        return f"{self.name}({', '.join(paths)})" if paths else self.name


@dataclass(frozen=True, slots=True)
class Plan:
    """functions: as a subscription names them, with their values. is_stack: calls are wanted that led to each other."""

    traced: tuple[Traced, ...]
    functions: tuple[str, ...]
    is_stack: bool = False

    def clauses(self) -> list[Clause]:
        """Return one for all entries and returns, which come in the order of time, and one for each function whose
        returns depend on entries.

        Raises click.UsageError.
        """
        paired = [] if self.is_stack else [each for each in self.traced if each.is_paired]
        entered = [] if self.is_stack else [each for each in self.traced if each.is_entered_first]
        single = [end for each in self.traced if each not in paired for end in each.ends(both=self.is_stack)]
        tested = [end.test for end in single if end.test]
        if sum(end.comparisons for end in single) > _MAX_COMPARISONS:
            raise click.UsageError(
                f"conditions at {len(tested)} entries and returns are too many for one command; list fewer: each takes "
                f"one comparison, and one or two with names, of {_MAX_COMPARISONS}"
            )
        chain = tuple(each.text for each in self.traced) if self.is_stack else ()
        selectors = [end.selector for end in single]
        made = [Clause(selectors=selectors, where=" && ".join(tested), chain=chain, tag="calls")]
        return [*(made if single else []), *map(_paired, paired), *map(_entered, entered)]


def _all(conditions: Iterable[str]) -> str:
    return " && ".join(f"({each})" for each in conditions if each)


def _paired(traced: Traced) -> Clause:
    """The end of each call ends its span, whatever it returns. So what is to hold is about pairs, as `elapsed` is.

    elapsed < 0 never holds.
    """
    start, end = traced.selector(ENTRY), traced.selector(RETURN)
    span = Span(start_selectors=[start], start_where=_all(each.condition for each in traced.at_entry or ()))
    where = f"elapsed < 0 || ({_all(each.condition for each in traced.at_return or ())})"
    return Clause(selectors=[end], where=where, span=span, tag=end)


def _entered(traced: Traced) -> Clause:
    """Of each call, the server knows whether what is to hold of its entry did."""
    start, end = traced.selector(ENTRY, has_captures=False), traced.selector(RETURN)
    span = Span(start_selectors=[start], start_where=_all(each.condition for each in traced.at_entry or ()))
    return Clause(selectors=[end], span=span, tag=end)


async def planned(client: AsyncClient, wanted: Sequence[TracedFunction], *, is_stack: bool = False) -> Plan:
    """is_stack: see `Plan`. Raises click.UsageError and ClientError."""
    if is_stack:
        _check_stack(wanted)
    explicit = [each for each in wanted if each.values is not None]
    implied = [each for each in wanted if each.values is None]
    listing = await client.kernel_functions([each.name for each in implied]) if implied else None
    if listing is not None:
        _check(listing)
    asked = [_Asked(each.name, each.values or ()) for each in explicit]
    for function in listing or ():
        is_glob = not any(not each.is_glob and _is_named(each.name, function) for each in implied)
        values = tuple(_implied(function, is_glob=is_glob))
        asked.append(_Asked(f"{function.module}:{function.name}", values, is_implied=True))
    if len(asked) > _MAX_FUNCTIONS:
        raise click.UsageError(
            f"{plural(len(asked), 'function')} match, and values of {_MAX_FUNCTIONS} are shown at most; "
            "'stapsdt count' counts calls of more"
        )
    _check_distinct([each.name.rpartition(":")[2] for each in asked])
    texts = tuple(each.text for each in asked)
    typed = await client.kernel_functions(texts, types=True)
    _check(typed)
    traced = [_traced(function, each) for each in asked for function in typed if _is_named(each.name, function)]
    _check_distinct([each.function.name for each in traced])
    if is_stack:
        _check_conditions(traced)
        # in the order in which they lead to each other
        by_name = {each.function.name: each for each in traced}
        traced = [by_name[each.name.rpartition(":")[2]] for each in wanted]
    return Plan(tuple(traced), texts, is_stack)


def _check_stack(wanted: Sequence[TracedFunction]) -> None:
    """Raises click.UsageError."""
    if not _SHORTEST_STACK <= len(wanted) <= _MAX_STACK or any(each.is_glob for each in wanted):
        raise click.UsageError(
            f"--stack takes {_SHORTEST_STACK} to {_MAX_STACK} functions, and no globs: the first leads to the second"
        )


def _check_conditions(traced: Iterable[Traced]) -> None:
    """Strings are compared when the kernel has told calls apart: a return could be another call's than the entry.

    Raises click.UsageError.
    """
    for each in traced:
        if each.is_awaited and any(shown.wanted.test and shown.is_text for shown in each.at_entry or ()):
            raise click.UsageError(
                f"--stack takes no condition on a string of {each.function.name} together with one on what it returns"
            )


def _is_named(text: str, function: KernelFunction) -> bool:
    module, _, name = text.rpartition(":")
    return matches(function.name, name) and (not module or matches(function.module, module))


def _implied(function: KernelFunction, *, is_glob: bool) -> Iterator[TracedValue]:
    """Yield what is shown of a function if nothing is said: its arguments, what they point to, and its result."""
    room = _MAX_VALUES - 1
    for argument in function.arguments:
        if argument.name and not argument.refused and room:
            yield TracedValue(argument.name)
            room -= 1
            if argument.record_size and room and not is_glob:
                yield TracedValue(f"{argument.name}[0]")
                room -= 1
    if function.result.size and not function.result.refused:
        yield TracedValue(RESULT)


def _check_turned(shown: Shown) -> None:
    """Raises click.UsageError if a value is none that its function of byte order could turn."""
    wanted, known = shown.wanted, shown.known
    if wanted.turned and (known.size not in _NUMBER_BYTES or known.size < SIZES[wanted.turned] or known.bits):
        fitting = next((name for name, size in SIZES.items() if size == known.size and not known.bits), "")
        hint = f"; write {fitting}({wanted.path})" if fitting else ""
        raise click.UsageError(
            f"{wanted.name}: it turns {SIZES[wanted.turned]} bytes, and {wanted.path} is of type {known.type}{hint}"
        )


def _traced(function: KernelFunction, asked: _Asked) -> Traced:
    entries = [each.text for each in function.values if each.argument is not None]
    returns = [each.text for each in function.values if each.argument is None]
    known = {each.text: each for each in function.values}
    first_of_entry, first_of_return = len(function.arguments), 1 if function.result.size else 0
    at_entry, at_return = [], []
    for value in asked.values:
        if value.is_of_return:
            at_return.append(Shown(value, known[value.path], first_of_return + returns.index(value.path)))
        else:
            at_entry.append(Shown(value, known[value.path], first_of_entry + entries.index(value.path)))
    for shown in at_entry + at_return:
        _check_turned(shown)
    none = () if asked.is_implied else None
    return Traced(function, tuple(at_entry) or none, tuple(at_return) or none)


def _check(listing: FunctionListing) -> None:
    for unknown in listing.unknown:
        raise click.UsageError(why_unknown(unknown))
    if listing.left_out:
        raise click.UsageError(f"{plural(listing.left_out, 'function')} too many match; name fewer")


def _check_distinct(names: Sequence[str]) -> None:
    """Functions are told apart by their names alone, in filters as well."""
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(
                f"{name} is named twice, or in two modules; list its values once, or name one module"
            )
