"""What the hits of a site are to kernel functions that lead to each other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stapsdtd.functions.chain import Chain, Link, LinkKind
from stapsdtd.functions.probes import PROVIDER
from tests.unit.samples import site

CHAIN = Chain((("vmlinux", "vfs_write"), ("ext4", "write_iter")))


@pytest.mark.parametrize(
    ("module", "function", "name", "expected"),
    [
        ("vmlinux", "vfs_write", "entry", Link(LinkKind.ENTERED, 0)),
        ("vmlinux", "vfs_write", "return", Link(LinkKind.RETURNED, 0)),
        ("ext4", "write_iter", "entry", Link(LinkKind.ENTERED, 1)),
        ("vmlinux", "write_iter", "entry", Link(LinkKind.WITHIN, 1)),
        ("vmlinux", "kmalloc", "return", Link(LinkKind.WITHIN, 1)),
    ],
)
def test_link(module: str, function: str, name: str, expected: Link) -> None:
    found = replace(site(name, 0), provider=PROVIDER, function=function)
    assert CHAIN.link_of(module, found) == expected


def test_probes_of_programs_are_within() -> None:
    found = replace(site("entry", 0), function="vfs_write")
    assert CHAIN.link_of("vmlinux", found) == Link(LinkKind.WITHIN, 1)
