"""Members of what arguments and results of kernel functions point to: `args[0]->f_path.dentry->d_name.name`.

args[0]->f_pos      at fbt::vfs_read:entry     file->f_pos, a value that the server is asked for
args[4], where it is behind the function's own arguments

A member that is an array of bytes is a string: copyinstr(args[4]).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from stapsdtd.query.d.errors import DError
from stapsdtd.query.d.kernel_functions import ELSEWHERE, ENTRY, PROVIDER, RETURN
from stapsdtd.query.d.nodes import Call, Clause, Description, Expression, Integer, Member, Program, Variable, walk
from stapsdtd.query.d.rewriting import rewritten

_RESULT = 1
"""Of args[] at a return, as D numbers them."""


class Function(NamedTuple):
    """What has to be known of a function. arguments: their names. values: texts of those that the server was asked for.

    texts: of the values that are arrays of bytes. has_result: it does not return void.
    """

    name: str
    arguments: Sequence[str]
    values: Sequence[str] = ()
    texts: Container[str] = ()
    has_result: bool = True


FindFunctions = Callable[[Description], Sequence[Function]]


def has_members(clause: Clause) -> bool:
    """Report whether a clause of kernel functions mentions members. Others may not, which the checker says."""
    return all(each.provider == PROVIDER for each in clause.descriptions) and any(_members(clause))


def values_of(clause: Clause, find: FindFunctions) -> Iterator[tuple[Description, str]]:
    """Yield the values that members of a clause are, as the server takes them. Raises DError."""
    for description in clause.descriptions:
        for function in find(description):
            for member in _members(clause):
                yield description, _value(member, description, function)


def with_values(clause: Clause, find: FindFunctions) -> Clause:
    """Return a clause whose members are arguments behind the functions' own. find: with the values. Raises DError."""
    made: set[int] = set()

    def replaced(given: Expression) -> Expression:
        match given:
            case Member():
                found = [(each, function) for each in clause.descriptions for function in find(each)]
                places = {_place(given, each, function) for each, function in found}
                if len(places) > 1:
                    raise DError("these functions have different arguments; write a clause for each", given.at)
                # without a function that matches, the checker says so
                position, is_text = places.pop() if places else (0, False)
                made.add(position)
                variable = Variable("args", keys=(Integer(position),), at=given.at)
                return Call("copyinstr", (variable,), at=given.at) if is_text else variable
            case Call("stringof", (Call("copyinstr") as text,)):
                return text
            case Call("stringof", (Variable("args", keys=(Integer(position),)),)) if position in made:
                return replace(given, name="copyinstr")
            case _:
                return given

    return rewritten(clause, replaced)


def mentions_members(program: Program) -> bool:
    return any(map(has_members, program.clauses))


def _members(clause: Clause) -> Iterator[Member]:
    roots = [*([] if clause.predicate is None else [clause.predicate]), *(clause.statements or ())]
    for root in roots:
        yield from (node for node, _ in walk(root) if isinstance(node, Member))


def _value(member: Member, description: Description, function: Function) -> str:
    number = _number(member)
    if description.name == RETURN:
        if number != _RESULT:
            raise DError("at a return, only the result is available: args[1]", member.at)
        return f"return{member.path}"
    if description.name != ENTRY:
        raise DError(ELSEWHERE, member.at)
    if number >= len(function.arguments) or not function.arguments[number]:
        raise DError(f"{function.name} has no argument {number} with a name", member.at)
    return f"{function.arguments[number]}{member.path}"


def _number(member: Member) -> int:
    match member.variable:
        case Variable("args", keys=(Integer(number),)):
            return number
        case _:
            raise DError("only args[N] has members", member.at)


def _place(member: Member, description: Description, function: Function) -> tuple[int, bool]:
    """Return which argument a member is, behind those of its entry or its return, and whether it is text."""
    value = _value(member, description, function)
    is_return = description.name == RETURN
    alike = [each for each in function.values if (each.partition("-")[0].partition(".")[0] == "return") is is_return]
    own = int(function.has_result) if is_return else len(function.arguments)
    return own + alike.index(value), value in function.texts
