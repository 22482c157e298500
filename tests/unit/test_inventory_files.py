from __future__ import annotations

import tracemalloc

import pytest

from stapsdtd.catalog.selectors import parse
from stapsdtd.config import InventorySettings
from stapsdtd.inventory.files import MAX_PROBES, Index, InstalledFile, matching
from stapsdtd.runtime.fair_thread import finish


def file(number: int, path: str, *probes: str) -> InstalledFile:
    named = tuple((provider, name) for provider, _, name in (probe.partition(":") for probe in probes))
    return InstalledFile(number, path, "x86-64", None, named, len(named))


FILES = [
    file(1, "/usr/bin/postgres", "postgresql:query__start", "postgresql:query__done"),
    file(2, "/usr/lib/libpython3.11.so.1.0", "python:gc__start"),
    file(3, "/usr/bin/python3", "python:gc__start"),
]


@pytest.mark.parametrize(
    ("selectors", "paths"),
    [
        ([], ["/usr/lib/libpython3.11.so.1.0", "/usr/bin/postgres", "/usr/bin/python3"]),
        (["python:gc-start"], ["/usr/lib/libpython3.11.so.1.0", "/usr/bin/python3"]),
        (["python3:*:gc__start"], ["/usr/bin/python3"]),
        (["*:/usr/lib/*::gc__start"], ["/usr/lib/libpython3.11.so.1.0"]),
        (["postgresql4711:::query-start"], ["/usr/bin/postgres"]),
        (["query__*", "ruby:*"], ["/usr/bin/postgres"]),
        (["postgresql:gc__start"], []),
        (["postgresql::main:query__start"], ["/usr/bin/postgres"]),
    ],
)
def test_selectors_choose_files_libraries_first(selectors: list[str], paths: list[str]) -> None:
    assert [each.path for each in finish(matching(FILES, [*map(parse, selectors)]))] == paths


def test_files_beyond_the_bounds_are_left_out() -> None:
    index = Index(max_files=3, max_probes=2)
    assert index.add(file(1, "/a", "p:a")) is not None
    assert index.add(file(2, "/b", "p:b", "p:c")) is None
    # what it has in common with others counts once
    assert index.add(file(3, "/c", "p:a")) is not None
    assert index.add(file(4, "/d", "p:b")) is not None
    assert index.add(file(5, "/e", "p:a")) is None
    assert ([each.path for each in index.all()], index.left_out) == (["/a", "/c", "/d"], 2)


def test_removed_files_make_room() -> None:
    index = Index(max_files=1, max_probes=1)
    first = index.add(file(1, "/a", "p:a"))
    assert index.remove([1, 2]) == (first,)
    assert index.add(file(2, "/b", "p:b")) is not None


def test_file_with_very_many_probes_is_left_out() -> None:
    index = Index(max_files=10, max_probes=10 * MAX_PROBES)
    assert index.add(file(1, "/a", *(f"p:{number}" for number in range(MAX_PROBES + 1)))) is None


def test_full_index_takes_less_than_five_megabytes() -> None:
    settings = InventorySettings()
    tracemalloc.start()
    index = Index(settings.max_files, settings.max_probes)
    names = [f"some__probe__{number}" for number in range(500)]
    for number in range(settings.max_files):
        directory = f"/usr/lib/x86_64-linux-gnu/some-package-{number}"
        probes = [f"provider{number % 40}:{name}" for name in names]
        index.add(file(number, f"{directory}/libsomething.so.{number}", *probes))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index.all()) == settings.max_files
    assert index.add(file(1 << 40, "/new", "p:new")) is None
    assert taken < 5_000_000, taken
