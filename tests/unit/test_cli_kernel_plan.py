"""What `stapsdt kernel trace` asks the server for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

import click
import pytest

from stapsdtd.cli.kernel_plan import Plan, planned
from stapsdtd.cli.kernel_selectors import parse
from stapsdtd.client import AsyncClient, FunctionListing, KernelArgument, KernelFunction, KernelValue, Span
from stapsdtd.subscribe_options import Clause

ARGUMENTS = (
    KernelArgument("file", "struct file *", 8, ("rdi",), record_size=184),
    KernelArgument("mode", "enum mode", 4, ("rsi",)),
    KernelArgument("large", "struct large", 64, (), "it is passed in memory"),
)
RESULT = KernelArgument("return", "int", 4, ("rax",))
VOID = KernelArgument("return", "void", 0, ())


class Server:
    """Knows open_it(), close_it(), which returns nothing, and what it is asked for of them."""

    async def kernel_functions(self, functions: Iterable[str], *, types: bool = False) -> FunctionListing:
        del types
        found = []
        for text in functions:
            name, _, values = text.partition("(")
            for known in ("open_it", "close_it") if "*" in name else (name.rpartition(":")[2],):
                paths = [path.strip() for path in values.rstrip(")").split(",")] if values else []
                found.append(self._function(known, paths))
        return FunctionListing(tuple(found), (), 0, ())

    def _function(self, name: str, paths: list[str]) -> KernelFunction:
        result = VOID if name == "close_it" else RESULT
        values = tuple(
            KernelValue(
                path,
                "enum mode" if path == "mode" else "int",
                4,
                None if path.startswith("return") else 0,
                (0,),
                enumerators={"READ": 1, "WRITE": 2} if path == "mode" else {},
                is_text=path.endswith("label"),
            )
            for path in paths
        )
        return KernelFunction(name, "vmlinux", "", ARGUMENTS, result, ("kprobe",), (), values)


def plan(*texts: str, is_stack: bool = False) -> Plan:
    return asyncio.run(planned(cast("AsyncClient", Server()), [parse(text) for text in texts], is_stack=is_stack))


def test_all_there_is_of_a_function() -> None:
    made = plan("open_it", "close_it")
    assert made.functions == ("vmlinux:open_it(file, file[0], mode, return)", "vmlinux:close_it(file, file[0], mode)")
    assert made.clauses() == [
        Clause(
            selectors=[
                "fbt:vmlinux:open_it:entry(arg3, arg4, arg5)", "fbt:vmlinux:open_it:return(arg1)",
                "fbt:vmlinux:close_it:entry(arg3, arg4, arg5)", "fbt:vmlinux:close_it:return()",
            ],
            tag="calls",
        )
    ]  # fmt: skip


def test_functions_of_a_glob_without_what_is_behind_pointers() -> None:
    assert plan("*_it").functions == ("vmlinux:open_it(file, mode, return)", "vmlinux:close_it(file, mode)")


def test_conditions_are_about_their_own_hits() -> None:
    (clause,) = plan('open_it(str(file) == "a", mode == WRITE)', "close_it(mode)").clauses()
    assert clause.where == '(function != "open_it" || (str(arg3) == "a") && (arg4 == 2))'
    assert clause.selectors == ["fbt:vmlinux:open_it:entry(arg3:str, arg4)", "fbt:vmlinux:close_it:entry(arg3)"]


def test_arrays_of_char_are_compared_as_text() -> None:
    (clause,) = plan('open_it(file->label == "a", str(file->label) != "b")').clauses()
    assert clause.where.endswith('|| (str(arg3) == "a") && (str(arg3) != "b"))')
    assert clause.selectors == ["fbt:vmlinux:open_it:entry(arg3, arg3:str)"]
    # up to 8 bytes are a number as well
    assert "|| (arg3 == 0))" in plan("open_it(file->label == 0)").clauses()[0].where


def test_arguments_of_calls_by_their_result() -> None:
    (clause,) = plan("open_it(mode & 0x2, return < 0)").clauses()
    assert clause.span == Span(start_selectors=["fbt:vmlinux:open_it:entry(arg3)"], start_where="(arg3 & 0x2)")
    assert (clause.selectors, clause.where) == (["fbt:vmlinux:open_it:return(arg1)"], "elapsed < 0 || ((arg1 < 0))")


def test_a_condition_at_the_entry_holds_back_the_return() -> None:
    calls, returns = plan("open_it(mode == WRITE, file, return)", "close_it(mode)").clauses()
    assert calls.selectors == ["fbt:vmlinux:open_it:entry(arg3, arg4)", "fbt:vmlinux:close_it:entry(arg3)"]
    assert calls.where == '(function != "open_it" || (arg3 == 2))'
    assert (returns.selectors, returns.where) == (["fbt:vmlinux:open_it:return(arg1)"], "")
    assert returns.span == Span(start_selectors=["fbt:vmlinux:open_it:entry()"], start_where="(arg3 == 2)")


def test_a_return_without_a_condition_at_the_entry_is_shown_by_itself() -> None:
    (clause,) = plan("open_it(file, return)").clauses()
    assert clause.selectors == ["fbt:vmlinux:open_it:entry(arg3)", "fbt:vmlinux:open_it:return(arg1)"]
    (clause,) = plan("open_it(mode == WRITE)").clauses()
    assert clause.selectors == ["fbt:vmlinux:open_it:entry(arg3)"]


def test_calls_that_led_to_each_other() -> None:
    made = plan("open_it(mode == READ, return < 0)", "close_it(mode)", is_stack=True)
    (clause,) = made.clauses()
    assert clause.chain == ("vmlinux:open_it", "vmlinux:close_it")
    assert clause.selectors == [
        "fbt:vmlinux:open_it:entry(arg3)", "fbt:vmlinux:open_it:return(arg1)",
        "fbt:vmlinux:close_it:entry(arg3)", "fbt:vmlinux:close_it:return()",
    ]  # fmt: skip
    assert clause.where == (
        '(function != "open_it" || name != "entry" || (arg3 == 1))'
        ' && (function != "open_it" || name != "return" || (arg1 < 0))'
    )
    assert [each.is_awaited for each in made.traced] == [True, False]
    assert plan("close_it", "open_it", is_stack=True).clauses()[0].chain == ("vmlinux:close_it", "vmlinux:open_it")


@pytest.mark.parametrize("texts", [["open_it"], ["open_it", "close*"], [f"function_{number}" for number in range(17)]])
def test_what_is_no_stack(texts: list[str]) -> None:
    with pytest.raises(click.UsageError, match="--stack takes 2 to 16 functions, and no globs"):
        plan(*texts, is_stack=True)


@pytest.mark.parametrize("condition", ['str(file) == "a"', 'file->label ~ "a*"'])
def test_conditions_that_no_stack_has(condition: str) -> None:
    with pytest.raises(
        click.UsageError, match="no condition on a string of open_it together with one on what it returns"
    ):
        plan(f"open_it({condition}, return < 0)", "close_it", is_stack=True)
    assert plan(f"open_it({condition})", "close_it", is_stack=True).clauses()
    assert plan(f"open_it({condition}, return < 0)").clauses()


def test_numbers_in_network_byte_order() -> None:
    (clause,) = plan("open_it(ntohl(file->port) == 443)").clauses()
    assert clause.where == '(function != "open_it" || (ntohl(arg3) == 443))'
    assert clause.selectors == ["fbt:vmlinux:open_it:entry(arg3)"]
    assert plan("open_it(ntohs(file->port))").functions == ("open_it(file->port)",)
    with pytest.raises(click.UsageError, match=r"ntohll\(mode\): it turns 8 bytes, and mode is of type enum mode; "
                                               r"write ntohl\(mode\)"):  # fmt: skip
        plan("open_it(ntohll(mode))")


def test_names_that_all_types_have() -> None:
    (clause,) = plan("open_it(file != NULL)", "close_it(return == -ENOENT)").clauses()
    assert "(arg3 != 0)" in clause.where
    assert "(arg0 == -2)" in clause.where


def test_conditions_on_many_functions() -> None:
    texts = [f"function_{number}(mode == 1)" for number in range(33)]
    (clause,) = plan(*texts[:32]).clauses()
    assert clause.where.count("&&") == 31
    with pytest.raises(click.UsageError, match="conditions at 33 entries and returns are too many for one command"):
        plan(*texts).clauses()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["open_it(mode == S_IFREG)"], "mode: S_IFREG is no value of enum mode, which has READ, WRITE"),
        (["open_it(file == NOTHING)"], "file: NOTHING is no value of int, which is no enum"),
        (["open_it(file)", "open_it(mode)"], "open_it is named twice"),
    ],
)
def test_what_cannot_be_meant(texts: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        plan(*texts).clauses()
