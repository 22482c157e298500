"""Numbers with the units that people would choose, and bars."""

from __future__ import annotations

import math

UNITS = ("ns", "us", "ms", "s", "bytes")

_NANOSECONDS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_BINARY = ("", "K", "M", "G", "T", "P", "E")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_DIGITS = 3
_LEAST_FRACTION = 1e-4
"""Written without an exponent."""


def format_quantity(value: float | None, unit: str = "") -> str:
    """Return `1.50 ms` for 1500 us, `4 KiB` for 4096 bytes, `1,500` without a unit, and `-` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if unit in _NANOSECONDS:
        return _duration(value * _NANOSECONDS[unit])
    if unit == "bytes":
        return _bytes(value)
    return f"{value:,}" if isinstance(value, int) else _fraction(value)


def format_bound(value: int, unit: str = "") -> str:
    """Return the bound of a bucket: as a quantity, but powers of two as `64K`."""
    if unit or abs(value) < 1 << 10 or value & (abs(value) - 1) & ~(1 << 63):
        return format_quantity(value, unit)
    exponent = min((abs(value).bit_length() - 1) // 10, len(_BINARY) - 1)
    return f"{value >> (10 * exponent)}{_BINARY[exponent]}"


def bar(part: float, cells: int) -> str:
    """Return a bar of eighths of cells. part: of the whole width, from 0 to 1; a small one shows at least an eighth."""
    eighths = max(round(part * cells * 8), 1) if part > 0 else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "")


def _duration(nanoseconds: float) -> str:
    for name, size in reversed(_NANOSECONDS.items()):
        if abs(nanoseconds) >= size:
            return f"{_significant(nanoseconds / size)} {name}"
    return f"{_significant(nanoseconds)} ns"


def _bytes(value: float) -> str:
    exponent = min(max(int(abs(value)).bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    name = f"{_BINARY[exponent]}iB" if exponent else "B"
    return f"{_significant(value / (1 << (10 * exponent)))} {name}"


def _fraction(value: float) -> str:
    """Return at least one decimal, and as many as three digits take: a share of 0.0123 is not 0."""
    if abs(value) >= 10 or not value:
        return f"{value:,.1f}"
    if abs(value) < _LEAST_FRACTION:
        return f"{value:.{_DIGITS}g}"
    decimals = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    whole, _, digits = f"{value:.{decimals}f}".partition(".")
    return f"{whole}.{digits.rstrip('0') or '0'}"


def _significant(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    whole = len(str(int(abs(value))))
    return f"{value:,.{max(_DIGITS - whole, 0)}f}"
