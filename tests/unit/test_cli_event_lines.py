from __future__ import annotations

from dataclasses import replace

import pytest

from stapsdtd.cli.event_lines import EventLines
from stapsdtd.client import (
    Argument,
    CapturedArgument,
    DescribedSite,
    EventBatch,
    EventBlock,
    Probe,
    Register,
    Site,
    SiteState,
    SiteStatus,
    Value,
)

UINT64 = Argument("8@%rdi", 8, signed=False, is_float=False, operand=Register("rdi", 0))
INT64 = Argument("-8@%rdi", 8, signed=True, is_float=False, operand=Register("rdi", 0))


def described(
    site_id: int, path: str = "/bin/app", function: str | None = "main", arguments: tuple[Argument, ...] = ()
) -> DescribedSite:
    site = Site(site_id, 0x1000 + site_id, None, function, arguments)
    captures = tuple(CapturedArgument(index, is_string=False, missing="") for index in range(len(arguments)))
    return DescribedSite(Probe("app", "p", path, None, "x86-64", (), (site,)), site, captures)


def status(site: DescribedSite) -> SiteStatus:
    probe = site.probe
    return SiteStatus(SiteState.ARMED, site.site.site_id, probe.provider, probe.name, probe.path, site.site.offset, "")


def batch(*sites: DescribedSite, values: tuple[Value, ...] = ()) -> EventBatch:
    """An event of each site, all with the same values."""
    count = len(sites)
    return EventBatch(
        (
            EventBlock(
                count,
                seq=range(1, count + 1),
                time_ns=[1_000_000_000] * count,
                pid=[4711] * count,
                tid=[4712] * count,
                cpu=[1] * count,
                comm=["postgres"] * count,
                site_id=[site.site.site_id for site in sites],
                sites={site.site.site_id: site for site in sites},
                values=tuple([value] * count for value in values),
                unavailable=None,
            ),
        )
    )


def probes(*sites: DescribedSite) -> list[str]:
    lines = EventLines(color=False)
    lines.add_sites(map(status, sites))
    return [line.split()[-1] for line in lines.format(batch(*sites), None)]


def test_single_site_goes_by_its_probe() -> None:
    assert probes(described(1)) == ["app:p"]


def test_sites_of_a_file_go_by_function_and_offset() -> None:
    assert probes(described(1), described(2, function=None)) == ["app:p@main:0x1001", "app:p@0x1002"]


def test_sites_of_several_files_go_by_the_file() -> None:
    assert probes(described(1), described(2, "/bin/other"), described(3, "/bin/other")) == [
        "app:p@app",
        "app:p@other:main:0x1002",
        "app:p@other:main:0x1003",
    ]


def test_files_of_one_name_go_by_the_path() -> None:
    assert probes(described(1), described(2, "/opt/app\x1b")) == ["app:p@app", r"app:p@app\x1b"]
    assert probes(described(1), described(2, "/opt/app")) == ["app:p@/bin/app", "app:p@/opt/app"]


def at_function(site_id: int, module: str, function: str) -> DescribedSite:
    site = Site(site_id, 0, None, function, ())
    return DescribedSite(Probe("fbt", "entry", module, None, "x86-64", (), (site,)), site, ())


def test_kernel_functions_go_by_their_names() -> None:
    one, other = at_function(1, "vmlinux", "tcp_connect"), at_function(2, "vmlinux", "tcp_close")
    assert probes(one) == ["fbt:entry@tcp_connect"]
    assert probes(one, other) == ["fbt:entry@tcp_connect", "fbt:entry@tcp_close"]
    assert probes(one, at_function(3, "tcp_diag", "tcp_connect")) == [
        "fbt:entry@vmlinux:tcp_connect",
        "fbt:entry@tcp_diag:tcp_connect",
    ]


def test_site_that_appears_later_counts() -> None:
    lines = EventLines(color=False)
    lines.add_sites([status(described(1))])
    (first,) = lines.format(batch(described(1)), None)
    lines.add_sites([status(described(2))])
    (second,) = lines.format(batch(described(1)), None)
    assert (first.split()[-1], second.split()[-1]) == ("app:p", "app:p@main:0x1001")


def test_unsigned_numbers_of_64_bits_are_hexadecimal() -> None:
    site = described(1, arguments=(UINT64, INT64))
    (line,) = EventLines(color=False).format(batch(site, values=(42, 2**47)), None)
    assert line.endswith("app:p  0x2a 140737488355328")


def test_numbers_are_hexadecimal_where_the_selector_says_so() -> None:
    site = described(1, arguments=(INT64, INT64))
    captures = tuple(replace(capture, is_hex=capture.index == 1) for capture in site.captures)
    (line,) = EventLines(color=False).format(batch(replace(site, captures=captures), values=(42, -42)), None)
    assert line.endswith("app:p  42 -0x2a")


CPU, COMM, THREAD = "    1", "  postgres       ", "      4711/4712"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, COMM + THREAD + CPU),
        (85, COMM + THREAD + CPU),
        (84, COMM + THREAD),
        (80, COMM + THREAD),
        (79, THREAD),
        (40, THREAD),
        (10, THREAD),
    ],
)
def test_narrow_terminals_have_fewer_columns_and_values_are_cut(width: int, shown: str) -> None:
    lines = EventLines(color=False)
    lines.add_sites([status(described(1))])
    (line,) = lines.format(batch(described(1, arguments=(INT64,)), values=("x",)), width)
    assert line[15:] == f'{shown}  app:p  "x"'
    # columns do not come and go with the lengths of values, and the pid is always there
    (line,) = lines.format(batch(described(1, arguments=(INT64,)), values=("x" * 400,)), width)
    assert line[15:].startswith(f'{shown}  app:p  "xxxxxx')
    assert line.endswith("x…")
    assert len(line) == max(width, len(f"{shown}  app:p  ") + 15 + 24)


def test_the_longest_values_are_cut() -> None:
    site = described(1, arguments=(INT64, INT64, INT64))
    values = ("a" * 30, 42, "b" * 200)
    (line,) = EventLines(color=False).format(batch(site, values=values), 116)
    assert len(line) == 116
    assert line.endswith(f' "{"a" * 24}… 42 "{"b" * 23}…')
    (line,) = EventLines(color=False).format(batch(site, values=values), None)
    assert line.endswith(f'"{"a" * 30}" 42 "{"b" * 200}"')


def test_spans_tell_their_time_first_and_nothing_twice() -> None:
    captured = [CapturedArgument(0, is_string=False, missing="")]
    captured += [CapturedArgument(number, is_string=False, missing="", of_start=True) for number in (0, 1)]
    captured.append(CapturedArgument(0, is_string=False, missing="", field="elapsed"))
    site = replace(described(1, arguments=(INT64,)), captures=tuple(captured))
    (line,) = EventLines(color=False).format(batch(site, values=(7, 7, 8, 1500)), None)
    assert line.endswith("app:p  elapsed=1.5us 7 start.arg0=7 start.arg1=8")


def test_wider_terminal_has_all_columns_again() -> None:
    lines = EventLines(color=False)
    lines.format(batch(described(1)), 40)
    (line,) = lines.format(batch(described(1)), 200)
    assert "postgres" in line


def test_fields_have_labels() -> None:
    site = described(1, arguments=(INT64,))
    fields = tuple(CapturedArgument(0, is_string=False, missing="", field=name) for name in ("uid", "arg0 % 2"))
    (line,) = EventLines(color=False).format(
        batch(replace(site, captures=site.captures + fields), values=(-1, 1000, "/a")), None
    )
    assert line.endswith('app:p  -1 uid=1000 (arg0 % 2)="/a"')
