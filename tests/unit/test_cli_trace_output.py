from __future__ import annotations

import io
from contextlib import redirect_stdout

from stapsdtd.cli.render import write_lines


class ShortWriter(io.RawIOBase):
    """Standard output under PYTHONUNBUFFERED, whose writes signals cut short."""

    def __init__(self) -> None:
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        written = bytes(memoryview(data)[:7])  # type: ignore[arg-type]
        self.content += written
        return len(written)


def test_writes_that_are_cut_short_lose_nothing() -> None:
    raw = ShortWriter()
    stdout = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)  # type: ignore[type-var]
    with redirect_stdout(stdout):
        write_lines(['{"seq": 1, "comm": "näive"}', '{"seq": 2}'])
    assert raw.content.decode() == '{"seq": 1, "comm": "näive"}\n{"seq": 2}\n'
