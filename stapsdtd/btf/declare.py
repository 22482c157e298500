"""Print types as C declares them: `int (*compare)(const void *, const void *)`, `char __user *buf`, `u8 mac[6]`."""

from __future__ import annotations

from stapsdtd.btf.types import (
    Array,
    Enum,
    Float,
    Forward,
    Function,
    Int,
    Pointer,
    Prototype,
    Qualified,
    Record,
    Typedef,
    TypeId,
    Types,
    Void,
)


def declare(types: Types, ident: TypeId, declarator: str = "") -> str:
    """Return the declaration of a name of this type, or the type alone. Records without a name are `struct {...}`."""
    match types.get(ident):
        case Void():
            return _joined("void", declarator)
        case Int(name) | Float(name) | Typedef(name):
            return _joined(name, declarator)
        case Enum(name):
            return _joined(f"enum {name or '{...}'}", declarator)
        case Record(keyword, name) | Forward(keyword, name):
            return _joined(f"{keyword} {name or '{...}'}", declarator)
        case Pointer(target):
            # [] and () bind stronger than *
            is_of_suffixed = isinstance(_unqualified(types, target), Array | Prototype)
            return declare(types, target, f"(*{declarator})" if is_of_suffixed else f"*{declarator}")
        case Array(element, count):
            return declare(types, element, f"{declarator}[{count or ''}]")
        case Prototype() as prototype:
            return declare(types, prototype.result, f"{declarator}({_parameters(types, prototype)})")
        case Function(name, prototype):
            return declare(types, prototype, declarator or name)
        case Qualified(word, target):
            if word.startswith("__") or isinstance(_unqualified(types, target), Pointer):
                return declare(types, target, _joined(word, declarator))
            return f"{word} {declare(types, target, declarator)}"


def _parameters(types: Types, prototype: Prototype) -> str:
    shown = [declare(types, parameter.type, parameter.name) for parameter in prototype.parameters]
    return ", ".join([*shown, "..."] if prototype.is_variadic else shown) or "void"


def _unqualified(types: Types, ident: TypeId) -> object:
    """Return the type without its qualifiers; a typedef is its own type to C's syntax."""
    found = types.get(ident)
    while isinstance(found, Qualified):
        found = types.get(found.target)
    return found


def _joined(base: str, declarator: str) -> str:
    return f"{base} {declarator}" if declarator and not declarator.startswith("[") else f"{base}{declarator}"
