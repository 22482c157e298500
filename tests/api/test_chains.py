"""Chains of kernel functions, of those that a request names."""

from __future__ import annotations

import pytest

from stapsdtd.api.chains import with_functions
from stapsdtd.catalog.selectors import parse
from stapsdtd.errors import InvalidArgumentError
from stapsdtd.functions.chain import Chain
from stapsdtd.functions.probes import PROVIDER
from stapsdtd.model import FileOffset, Object, ObjectKey, ParsedObject, Site
from stapsdtd.sessions.spec import ClauseSpec, SubscriptionSpec
from stapsdtd.subscribe_options import Scope


def module(name: str, *functions: str) -> Object:
    sites = tuple(
        Site(PROVIDER, end, FileOffset(0), None, function, (), nop_bytes=1)
        for function in functions
        for end in ("entry", "return")
    )
    return Object(ObjectKey(0, len(name), 0, 0), name, ParsedObject("x86-64", None, sites, ()), is_kernel=True)


FUNCTIONS = module("vmlinux", "vfs_write", "init_once"), module("ext4", "write_iter", "init_once")


def spec(*chain: str, selectors: tuple[str, ...] = ("fbt:::",)) -> SubscriptionSpec:
    functions = [text.rpartition(":") for text in chain]
    made = Chain(tuple((of, name) for of, _, name in functions))
    clause = ClauseSpec(tuple(map(parse, selectors)), chain=made)
    return SubscriptionSpec((ClauseSpec((parse("a:b"),)), clause), Scope(), 60, 1 << 20, 64)


def test_modules_are_those_that_have_the_functions() -> None:
    other, clause = with_functions(spec("vfs_write", "write_iter", "ext4:init_once"), FUNCTIONS).clauses
    assert other.chain is None
    assert clause.chain == Chain((("vmlinux", "vfs_write"), ("ext4", "write_iter"), ("ext4", "init_once")))


def test_one_process_may_be_meant() -> None:
    selectors = "fbt4711::vfs_write:entry", "fbt4711::vfs_write:return"
    (_, clause) = with_functions(spec("vfs_write", selectors=selectors), FUNCTIONS).clauses
    assert clause.chain == Chain((("vmlinux", "vfs_write"),))


@pytest.mark.parametrize(
    ("chain", "selectors", "reason"),
    [
        (["vfs_read"], ["fbt:::"], "vfs_read is not among the request's `functions`"),
        (["vmlinux:write_iter"], ["fbt:::"], "vmlinux:write_iter is not among the request's `functions`"),
        (["init_once"], ["fbt:::"], "init_once is a function of ext4, vmlinux; write MODULE:FUNCTION"),
        (["write_iter", "ext4:write_iter"], ["fbt:::"], "ext4:write_iter is named twice"),
        (["write_iter"], ["fbt::write_iter:entry"], "no selector of the clause chooses fbt:ext4:write_iter:return"),
        (["write_iter"], ["fbt:vmlinux::"], "no selector of the clause chooses fbt:ext4:write_iter:entry"),
        (
            ["vfs_write"],
            ["fbt::vfs_write:entry", "fbt4711::vfs_write:return"],
            "choose the entry and the return of vmlinux:vfs_write for different processes",
        ),
    ],
)
def test_what_is_wrong_is_named(chain: list[str], selectors: list[str], reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        with_functions(spec(*chain, selectors=tuple(selectors)), FUNCTIONS)
    assert caught.value.field == "clauses[1].chain"
    assert reason in caught.value.reason
