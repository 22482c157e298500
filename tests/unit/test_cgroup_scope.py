"""Cgroups that a request names by their paths or by systemd's names of units."""

from __future__ import annotations

import pytest

from stapsdtd.api.cgroup_scope import of_cgroups
from stapsdtd.errors import InvalidArgumentError
from tests.api.served import FakeHierarchy

HIERARCHY = FakeHierarchy(
    [
        "/", "/system.slice", "/system.slice/web.service", "/system.slice/web.service/web.service",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/web.service", "/a/twice.service", "/b/twice.service",
    ]
)  # fmt: skip


def paths(*given: str) -> list[str]:
    return [cgroup.path for cgroup in of_cgroups(HIERARCHY, "cgroups", given)]


def test_a_unit_is_the_topmost_cgroup_of_its_name() -> None:
    assert paths("web.service", "/a/twice.service", "system.slice") == [
        "/system.slice/web.service", "/a/twice.service", "/system.slice",
    ]  # fmt: skip


def test_several_topmost_ones_are_listed() -> None:
    with pytest.raises(InvalidArgumentError, match=r"name of /a/twice\.service and /b/twice\.service; write the path"):
        paths("twice.service")


@pytest.mark.parametrize("name", ["no.service", "", "web", "system.slice/web.service"])
def test_a_name_that_nothing_has(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="no such cgroup"):
        paths(name)
