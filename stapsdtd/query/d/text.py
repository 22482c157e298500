"""D programs as text, with as few blanks as read well and as many parentheses as keep the order."""

from __future__ import annotations

import re

from stapsdtd.query.d.nodes import (
    Aggregation,
    Assignment,
    Binary,
    Branch,
    Call,
    Cast,
    Clause,
    Conditional,
    Declaration,
    Expression,
    Integer,
    Macro,
    Member,
    Program,
    Scope,
    Statement,
    Step,
    String,
    Unary,
    Variable,
)

_PLAIN = re.compile(rb"[ !#-\[\]-~]")
_SIMPLE = (Integer, String, Macro, Variable, Aggregation, Call, Member)


def text_of(program: Program) -> str:
    options = (f"#pragma D option {each.name}{'=' * bool(each.value)}{each.value}\n" for each in program.options)
    declarations = (f"{_declaration(each)}\n" for each in program.declarations)
    return "".join([*options, *declarations, *(f"{text_of_clause(clause)}\n" for clause in program.clauses)])


def text_of_clause(clause: Clause) -> str:
    lines = [",\n".join(map(str, clause.descriptions))]
    if clause.predicate is not None:
        lines.append(f"/{text_of_expression(clause.predicate)}/")
    if clause.statements is not None:
        lines.append(f"{{ {_statements(clause.statements)}}}")
    return "\n".join(lines)


def _declaration(declaration: Declaration) -> str:
    scope = {Scope.GLOBAL: "", Scope.SELF: "self ", Scope.THIS: "this "}[declaration.scope]
    keys = f"[{', '.join(declaration.keys)}]" if declaration.keys else ""
    return f"{scope}{declaration.type} {declaration.name}{keys};"


def _statements(statements: tuple[Statement, ...]) -> str:
    return "".join(f"{_statement(each)} " for each in statements)


def _statement(statement: Statement) -> str:
    if not isinstance(statement, Branch):
        return f"{text_of_expression(statement)};"
    otherwise = f" else {{ {_statements(statement.otherwise)}}}" if statement.otherwise else ""
    return f"if ({text_of_expression(statement.condition)}) {{ {_statements(statement.then)}}}{otherwise}"


def text_of_expression(expression: Expression) -> str:
    match expression:
        case Integer(value, suffix):
            return f"{value}{suffix}"
        case String(value):
            escaped = (chr(byte) if _PLAIN.match(bytes([byte])) else f"\\{byte:03o}" for byte in value)
            return f'"{"".join(escaped)}"'
        case Macro(name):
            return f"${name}"
        case Variable(name, scope, keys):
            return f"{scope.value}{name}{_keys(keys)}"
        case Aggregation(name, keys):
            return f"@{name}{_keys(keys)}"
        case Call(name, arguments):
            return f"{name}({', '.join(map(text_of_expression, arguments))})"
        case Unary(operator, operand):
            return f"{operator}{_within(operand)}"
        case Step(operator, target, is_postfix):
            return f"{_within(target)}{operator}" if is_postfix else f"{operator}{_within(target)}"
        case Binary(operator, left, right):
            return f"{_within(left)} {operator} {_within(right)}"
        case Conditional(condition, then, otherwise):
            return f"{_within(condition)} ? {_within(then)} : {_within(otherwise)}"
        case Assignment(operator, target, value):
            return f"{_within(target)} {operator} {text_of_expression(value)}"
        case Cast(name, operand):
            return f"({name}){_within(operand)}"
        case Member(variable, path):
            return text_of_expression(variable) + path


def _keys(keys: tuple[Expression, ...]) -> str:
    return f"[{', '.join(map(text_of_expression, keys))}]" if keys else ""


def _within(expression: Expression) -> str:
    """Return an expression as an operand."""
    text = text_of_expression(expression)
    return text if isinstance(expression, _SIMPLE) else f"({text})"
