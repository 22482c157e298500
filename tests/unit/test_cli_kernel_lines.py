"""What `stapsdt kernel trace` prints of calls."""

from __future__ import annotations

import json

from stapsdtd.cli.kernel_lines import FunctionLines
from stapsdtd.client import CapturedArgument, DescribedSite, EventBatch, EventBlock, Probe, Site
from tests.unit.test_cli_kernel_plan import plan


def entry(*values: int | None) -> EventBatch:
    """An entry of open_it() with these values."""
    site = Site(1, 0, None, "open_it", ())
    captures = tuple(CapturedArgument(index, is_string=False, missing="gone") for index in range(len(values)))
    block = EventBlock(
        1, [1], [1_700_000_000_000_000_000], [10], [11], [0], ["app"], [1],
        {1: DescribedSite(Probe("fbt", "entry", "vmlinux", None, "x86-64", (), (site,)), site, captures)},
        tuple([value] for value in values),
        [{at: "gone" for at, value in enumerate(values) if value is None}],
        realtime_offset_ns=1_700_000_000_000_000_000 - 5,
    )  # fmt: skip
    return EventBatch((block,))


def test_numbers_in_network_byte_order() -> None:
    lines = FunctionLines(plan("open_it(ntohs(file->port), htonl(file->address))"), shows_zeros=False)
    (line,) = lines.text(entry(0xBB01, 0x0100_007F))
    assert line.endswith("open_it(ntohs(file->port) = 443, htonl(file->address) = 2130706433)")
    (record,) = map(json.loads, lines.json(entry(0xBB01, None)))
    assert record["values"] == {"ntohs(file->port)": 443, "htonl(file->address)": None}
    assert record["unavailable"] == {"htonl(file->address)": "gone"}
    assert record["monotonic_ns"] == 5
