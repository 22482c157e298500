"""What clauses print, in DTrace's layout.

CPU     ID                    FUNCTION:NAME
  0  73192                      main:query__start   select 1
  1      1                           :BEGIN

A line has what a hit's clause traced and printed. Quiet programs print only that, without a line's start and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stapsdtd.query.d.values import Integer, Type, Value, shown, signed, unsigned

_TITLE = f"{'CPU':>3} {'ID':>6} {'FUNCTION:NAME':>32}\n"
_DIGITS = "0123456789abcdef"
_BYTES_IN_LINE = 16
_SIGNED_COLUMNS = {8: 3, 16: 5, 32: 10, 64: 19}
_UNSIGNED_COLUMNS = {8: 3, 16: 5, 32: 10, 64: 20}


class Records:
    """Writes records: a start, what its actions say, and an end. write: takes text, of parts of lines or many.

    A record is written as a whole when it ends, since a clause that fails has none.
    """

    def __init__(self, write: Callable[[str], None], *, is_quiet: bool) -> None:
        self._write = write
        self._is_quiet = is_quiet
        self._has_title = False
        self._record: list[str] | None = None

    def start(self, cpu: int, probe_id: int, function: str, name: str) -> None:
        """Begin what a clause says. For BEGIN, END and tick-1s, function is empty."""
        self._record = [] if self._is_quiet else [f"{cpu:3} {probe_id:6} {shown(f'{function}:{name}'):>32} "]

    def text(self, text: str) -> None:
        """Write what printf() or printa() made."""
        if self._record is None:
            self._write(text)
        else:
            self._record.append(text)

    def trace(self, kind: Type, value: Value) -> None:
        self.text(traced(kind, value, is_quiet=self._is_quiet))

    def end(self) -> None:
        record, self._record = "".join(self._record or ()), None
        if self._is_quiet:
            self._write(record)
            return
        self._write(f"{record}\n" if self._has_title else f"{_TITLE}{record}\n")
        self._has_title = True

    def discard(self) -> None:
        """Write nothing of the record that has begun."""
        self._record = None


def traced(kind: Type, value: Value, *, is_quiet: bool) -> str:
    """Return what trace() writes."""
    if isinstance(value, bytes):
        return raw_bytes(value)
    if isinstance(value, str):
        return shown(value) if is_quiet else f"  {shown(value):<33}"
    bits = kind.bits if isinstance(kind, Integer) else 64
    is_signed = isinstance(kind, Integer) and kind.is_signed
    number = signed(value, bits) if is_signed else unsigned(value, bits)
    columns = (_SIGNED_COLUMNS if is_signed else _UNSIGNED_COLUMNS)[bits]
    return str(number) if is_quiet else f" {number:{columns}}"


def raw_bytes(data: bytes) -> str:
    """Return bytes in hexadecimal and as characters, after a line end; nothing for none."""
    return "".join(_byte_lines(data)) if data else ""


def _byte_lines(data: bytes) -> Iterator[str]:
    yield f"\n{'':11}{''.join(f'  {digit}' for digit in _DIGITS)}  {_DIGITS}\n"
    for offset in range(0, len(data), _BYTES_IN_LINE):
        part = data[offset : offset + _BYTES_IN_LINE]
        codes = "".join(f" {byte:02x}" for byte in part)
        characters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        yield f"{offset:10x}:{codes:<48}  {characters}\n"
