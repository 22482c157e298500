from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from stapsdtd.cli.event_json import json_lines
from stapsdtd.client import CapturedArgument, CutText, DescribedSite, EventBatch, EventBlock, Probe, Site


def described(site_id: int, name: str, path: str = "/usr/bin/app", function: str | None = "main") -> DescribedSite:
    site = Site(site_id, 0x1000 + site_id, None, function, ())
    return DescribedSite(Probe("app", name, path, None, "x86-64", (), (site,)), site, ())


SITES = {1: described(1, "a"), 2: described(2, 'b"\x1b'), 3: described(3, "c", "/memfd:libapp (deleted)", None)}


def block(seqs: list[int], site_ids: list[int], *values: list[Any], **more: Any) -> EventBlock:
    count = len(seqs)
    fields: dict[str, Any] = {
        "time_ns": [1_700_000_000_000_000_000 + seq for seq in seqs],
        "pid": [10] * count,
        "tid": [10 + seq for seq in seqs],
        "cpu": [0] * count,
        "comm": ["app"] * count,
        "unavailable": None,
    }
    return EventBlock(count=count, seq=seqs, site_id=site_ids, values=values, **(fields | {"sites": SITES} | more))


def test_line_has_every_field() -> None:
    (line,) = json_lines(EventBatch((block([7], [1], [-5]),)))
    assert json.loads(line) == {
        "seq": 7, "time_ns": 1_700_000_000_000_000_007, "pid": 10, "tid": 17, "cpu": 0, "comm": "app",
        "provider": "app", "name": "a", "path": "/usr/bin/app", "module": "app", "function": "main", "offset": 0x1001,
        "args": [-5],
    }  # fmt: skip


def test_line_has_the_monotonic_time_if_the_server_tells_it() -> None:
    told = block([7, 8], [1, 1], realtime_offset_ns=1_700_000_000_000_000_000)
    lines = [json.loads(line) for line in json_lines(EventBatch((told,)))]
    assert [(line["time_ns"], line["monotonic_ns"]) for line in lines] == [
        (1_700_000_000_000_000_007, 7), (1_700_000_000_000_000_008, 8),
    ]  # fmt: skip
    assert [event.monotonic_ns for event in told.events()] == [7, 8]
    assert [event.monotonic_ns for event in block([7, 8], [1, 1]).events()] == [None, None]


def test_site_is_the_events_own() -> None:
    lines = map(json.loads, json_lines(EventBatch((block([1, 2, 3, 4], [2, 1, 3, 2]),))))
    assert [(line["name"], line["module"], line["function"], line["offset"]) for line in lines] == [
        ('b"\x1b', "app", "main", 0x1002),
        ("a", "app", "main", 0x1001),
        ("c", "memfd:libapp", None, 0x1003),
        ('b"\x1b', "app", "main", 0x1002),
    ]


def test_strings_that_were_cut_are_named() -> None:
    captures = (
        CapturedArgument(1, True, ""),
        CapturedArgument(0, True, "", of_start=True),
        CapturedArgument(0, True, "", field="uid"),
    )
    sites = {1: replace(SITES[1], captures=captures)}
    texts = [CutText("a"), "b", "c"], ["d", "e", CutText("f")], ["g", "h", CutText("i")]
    cut = block([1, 2, 3], [1, 1, 1], *map(list, texts), sites=sites, cut=(0, 1, 2))
    lines = [json.loads(line) for line in json_lines(EventBatch((cut,)))]
    assert [line.get("truncated") for line in lines] == [["arg1"], None, ["start.arg0", "uid"]]


def test_values_of_every_type() -> None:
    values = block(
        [1, 2], [1, 1], [-1, 2**64 - 1], [1.5, float("nan")], ["%s \x1b", 'a"b'], [b"\x00\xff", b""], [None, 3],
        comm=["50%", "é"], unavailable=[{4: "not in memory"}, {}],
    )  # fmt: skip
    first, second = map(json.loads, json_lines(EventBatch((values,))))
    assert (first["comm"], first["args"]) == ("50%", [-1, 1.5, "%s \x1b", "00ff", None])
    assert (second["comm"], second["args"]) == ("é", [2**64 - 1, "nan", 'a"b', "", 3])
    assert (first["unavailable"], "unavailable" in second) == ({"4": "not in memory"}, False)


def test_blocks_of_a_message_are_in_order_of_seq() -> None:
    batch = EventBatch((block([1, 4, 5], [1, 1, 1], [10, 40, 50]), block([2, 3, 6], [2, 2, 2], ["x", "y", "z"])))
    assert [json.loads(line)["args"] for line in json_lines(batch)] == [[10], ["x"], ["y"], [40], [50], ["z"]]
    assert [event.seq for event in batch.events] == [1, 2, 3, 4, 5, 6]


def test_event_in_one_line() -> None:
    (event,) = EventBatch((block([7], [1], ["SELECT 1"], [42], [None], unavailable=[{2: "gone"}]),)).events
    assert repr(event) == "<Event 7 app:a('SELECT 1', 42, <gone>) pid=10 tid=17 comm='app'>"


def test_fields_have_names() -> None:
    captures = [CapturedArgument(0, is_string=False, missing="")]
    captures += [CapturedArgument(0, is_string=False, missing="", field=name) for name in ("arg0 % 2", "cgroup")]
    sites = {1: replace(SITES[1], captures=tuple(captures))}
    events = block([1, 2], [1, 1], [None, 7], [1000, 0], ["/a", None], unavailable=[{0: "unread"}, {2: "removed"}])
    first, second = map(json.loads, json_lines(EventBatch((replace(events, sites=sites),))))
    assert (first["args"], first["arg0 % 2"], first["cgroup"]) == ([None], 1000, "/a")
    assert (second["args"], second["arg0 % 2"], second["cgroup"]) == ([7], 0, None)
    assert (first["unavailable"], second["unavailable"]) == ({"0": "unread"}, {"cgroup": "removed"})
