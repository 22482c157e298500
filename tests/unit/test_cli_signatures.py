from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest

from stapsdtd.cli.event_json import json_lines
from stapsdtd.cli.event_lines import EventLines
from stapsdtd.cli.known_signatures import Known
from stapsdtd.cli.named_filter import (
    RESERVED,
    by_position,
    field_by_position,
    key_by_position,
    key_has_names,
    key_meaning,
)
from stapsdtd.cli.named_values import ArgumentNames, cut_at, with_meanings
from stapsdtd.cli.signature_captures import Resolved, with_captures
from stapsdtd.cli.splitting import split_keys
from stapsdtd.client import (
    Argument,
    CapturedArgument,
    DescribedSite,
    EventBatch,
    EventBlock,
    Probe,
    Register,
    Site,
    Snapshot,
    SnapshotRow,
    Value,
)
from stapsdtd.signatures.files import read_shipped, shipped_providers
from tests.unit.test_cli_aggregate_tables import ACCOUNT

FILE = """
provider = "shop"
source = "its header"
versions = "1"
[enums.kind]
1 = "cash"
[flags.extras]
1 = "gift"
4 = "wrapped"
[[probes]]
name = "sale"
text = "Something was sold."
arguments = ["string(size) item", "int32 size", "pointer till", "enum(kind) kind", "bool paid"]
[[probes]]
name = "sale"
text = "Something was sold, in version 2."
arguments = ["string item"]
[[probes]]
name = "wrap"
text = "Something was wrapped."
arguments = ["flags(extras) extras", "duration(us) took"]
[[probes]]
name = "other*"
text = "Something else."
"""

POINTER = Argument("8@%rdi", 8, signed=False, is_float=False, operand=Register("rdi", 0))
INT = Argument("-4@%esi", 4, signed=True, is_float=False, operand=Register("rsi", 0))
SALE = (POINTER, INT, POINTER, INT, INT)


@pytest.fixture
def known(tmp_path: Path) -> Known:
    (tmp_path / "shop.toml").write_text(FILE)
    return Known(tmp_path)


def probe(name: str, *arguments: Argument, path: str = "/bin/shop") -> Probe:
    return Probe("shop", name, path, None, "x86-64", (), (Site(1, 0x1000, None, "main", arguments),))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("shop:sale", "shop:sale(arg0:str, arg1, arg2:hex, arg3, arg4)"),
        ("shop::main:sale", "shop::main:sale(arg0:str, arg1, arg2:hex, arg3, arg4)"),
        ("shop4711:::sale", "shop4711:::sale(arg0:str, arg1, arg2:hex, arg3, arg4)"),
        ("shop:sale(paid, item)", "shop:sale(arg4, arg0:str, arg1)"),
        ("shop:sale(item:str[64], arg3:hex , till:int)", "shop:sale(arg0:str[64], arg1, arg3:hex, arg2:int)"),
        ("shop:sale(size,item)", "shop:sale(arg1, arg0:str)"),
        ("shop:wrap", "shop:wrap(arg0, arg1)"),
    ],
)
def test_a_selector_gets_its_signatures_captures(known: Known, given: str, text: str) -> None:
    name = "wrap" if "wrap" in given else "sale"
    assert with_captures(given, [probe("sale", *SALE)], known) == Resolved(text, given, ("shop", name), has_names=True)


@pytest.mark.parametrize(
    "given",
    [
        "shop:*",
        "sale",
        "shop:sale()",
        "shop:sale(arg0:str, arg1)",
        "shop:other__sale",
        "shop:rent",
        "shop:sale(arg0",
        "",
    ],
)
def test_a_selector_stays_as_it_is(known: Known, given: str) -> None:
    assert with_captures(given, [probe("sale", *SALE)], known) == Resolved(given, given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("shop:sale(price)", "no argument named price; its arguments are: item, size, till, kind, paid"),
        (
            "shop:*(item)",
            "names of arguments need one probe whose arguments are known, and no globs; write arg0 instead",
        ),
        ("shop:rent(item)", "need one probe whose arguments are known, and no globs; write arg0 instead of item"),
        ("shop:other__sale(item)", "its arguments have no names; write arg0"),
    ],
)
def test_a_name_that_is_not_known_is_an_error(known: Known, given: str, reason: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        with_captures(given, [probe("sale", *SALE)], known)
    assert reason in caught.value.message


def test_versions_are_told_apart_by_the_probes_that_exist(known: Known, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_captures("shop:sale", [probe("sale", POINTER)], known).text == "shop:sale(arg0:str)"
    assert capsys.readouterr().err == ""
    assert with_captures("shop:sale", [], known) == Resolved("shop:sale", "shop:sale")
    assert "shop:sale: its signature is not used: versions differ, and which one" in capsys.readouterr().err
    with pytest.raises(click.UsageError, match="versions differ, and which one it is going to be is not known"):
        with_captures("shop:sale(item)", [probe("sale", POINTER), probe("sale", *SALE)], known)


def test_a_contradiction_turns_the_signature_off_and_is_told(known: Known, capsys: pytest.CaptureFixture[str]) -> None:
    probes = [probe("sale", *SALE), probe("sale", INT, INT, path="/bin/old")]
    assert with_captures("shop:sale", probes, known) == Resolved("shop:sale", "shop:sale")
    known.tell_contradictions()
    told = "shop:sale in /bin/old: its signature is not used: the probe has 2 arguments, and the signature 5"
    assert told in capsys.readouterr().err
    known.tell_contradictions()
    assert capsys.readouterr().err == ""
    with pytest.raises(click.UsageError, match="in /bin/old, the probe has 2 arguments"):
        with_captures("shop:sale(item)", probes, known)


@pytest.mark.parametrize(
    ("where", "by_positions"),
    [
        ("paid == 1 && kind != 2", "arg4 == 1 && arg3 != 2"),
        ("!paid||(arg1>0x1f&&size<3)", "!arg4||(arg1>0x1f&&arg1<3)"),
        ("execname == 'paid' && paid", "execname == 'paid' && arg4"),
        ('comm == "it\\"s paid" && paid', 'comm == "it\\"s paid" && arg4'),
        # of the language itself, or of nobody: the server says so
        ("pid == 4711 && price > paid(3)", "pid == 4711 && price > paid(3)"),
        ("", ""),
    ],
)
def test_names_in_a_filter_become_positions(known: Known, where: str, by_positions: str) -> None:
    signatures = known.of("shop", "sale")[:1]
    assert by_position(where, [signatures, signatures]) == by_positions


def test_a_name_in_a_filter_is_of_the_same_argument_everywhere(known: Known) -> None:
    sale, later = known.of("shop", "sale")
    wrap = known.of("shop", "wrap")
    for signatures in ([[sale], wrap], [[sale], []], [[sale, later]]):
        with pytest.raises(click.UsageError, match="paid is not the same argument of all selected probes"):
            by_position("paid == 1", signatures)
    assert by_position("item == 0", [[sale, later]]) == "arg0 == 0"


def test_names_of_keys_become_positions(known: Known) -> None:
    (wrap,), (sale, later) = known.of("shop", "wrap"), known.of("shop", "sale")
    keys = ("took", "extras:hex", "arg1", "name", "price")
    assert [key_by_position(key, [[wrap]]) for key in keys] == ["arg1", "arg0:hex", "arg1", "name", "price"]
    assert key_by_position("item", [[later]]) == "arg0:str"
    assert key_by_position("item:str[9]", [[later]]) == "arg0:str[9]"
    assert key_by_position("paid", [[sale]]) == "arg4"
    assert [key_by_position(key, [[sale]]) for key in ("item", "item:str", "item:hex")] == [
        "str(arg0, arg1)", "str(arg0, arg1)", "arg0:hex",
    ]  # fmt: skip
    with pytest.raises(click.UsageError, match="--by: the length of item is not the same argument of all"):
        key_by_position("item", [[sale, later]])
    with pytest.raises(click.UsageError, match="--by: took is not the same argument of all selected probes"):
        key_by_position("took", [[wrap], [sale]])


def test_names_of_fields_become_positions(known: Known) -> None:
    (wrap,), (sale, later) = known.of("shop", "wrap"), known.of("shop", "sale")
    fields = ("took", "took / 1000", "uid", "arg1 - arg0", "nobody")
    assert [field_by_position(field, [[wrap]]) for field in fields] == [
        "arg1", "arg1 / 1000", "uid", "arg1 - arg0", "nobody",
    ]  # fmt: skip
    assert field_by_position("item", [[later]]) == "str(arg0)"
    assert field_by_position("item", [[sale]]) == "str(arg0, arg1)"
    with pytest.raises(click.UsageError, match="--fields: took is not the same argument of all selected probes"):
        field_by_position("took", [[wrap], [sale]])


def test_named_keys_have_a_meaning(known: Known) -> None:
    (wrap,), (sale, later) = known.of("shop", "wrap"), known.of("shop", "sale")
    kind, paid, extras = (
        key_meaning(key, [[each]]) for key, each in (("kind", sale), ("paid", sale), ("extras", wrap))
    )
    rows = (SnapshotRow((1, 1, 5, "x"), {"count": 3}), SnapshotRow((9, None, 0, "y"), {"count": 1}))
    meant = with_meanings(Snapshot(1, 0, 1, rows, ACCOUNT), [kind, paid, extras, None])
    assert [row.key for row in meant.rows] == [("cash", True, "gift|wrapped", "x"), (9, None, 0, "y")]
    # by position, in another form, or in an expression, it is a number
    assert [key_meaning(key, [[sale]]) for key in ("arg3", "kind:hex", "kind + 1", "pid", "price")] == [None] * 5
    assert key_meaning("item", [[sale, later]]) is not None
    other = replace(sale, arguments=tuple(replace(each, labels={}) for each in sale.arguments or ()))
    assert key_meaning("kind", [[sale], [other]]) is None


@pytest.mark.parametrize(
    ("key", "by_positions"),
    [
        ("size / 10", "arg1 / 10"),
        ('paid > 100 ? "paid" : str(item, size)', 'arg4 > 100 ? "paid" : str(arg0, arg1)'),
        ("str(item, 9)", "str(arg0, 9)"),
        ("pid * 2", "pid * 2"),
    ],
)
def test_names_in_keys_that_are_expressions(known: Known, key: str, by_positions: str) -> None:
    assert key_has_names(key) == (key != by_positions)
    assert key_by_position(key, [known.of("shop", "sale")[:1]]) == by_positions


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a,b", ["a", "b"]),
        (" arg0:str[64] , pid,", ["arg0:str[64]", "pid"]),
        ("str(arg1, arg2), (arg0 + (1, 2)), cpu", ["str(arg1, arg2)", "(arg0 + (1, 2))", "cpu"]),
        ("arg0 ? \"a,(\" : 'b\\',\"', cpu", ["arg0 ? \"a,(\" : 'b\\',\"'", "cpu"]),
        # the server says what is wrong
        ('"a, b', ['"a, b']),
        ("arg0), cpu", ["arg0)", "cpu"]),
        ("", []),
    ],
)
def test_keys_are_split_at_the_commas_between_them(text: str, keys: list[str]) -> None:
    assert split_keys(text) == keys


def test_what_is_shipped_calls_no_argument_as_the_language_of_filters_calls_something_else() -> None:
    names = {
        (provider, declared.name)
        for provider in shipped_providers()
        for signature in read_shipped(provider)
        for declared in signature.arguments or ()
    }
    assert ("postgresql", "query") in names
    assert not {(provider, name) for provider, name in names if name in RESERVED}


@pytest.mark.parametrize(
    ("value", "length", "cut"),
    [
        ("java/lang/Objectgarbage", 16, "java/lang/Object"),
        ("short", 99, "short"),
        ("☃☃☃", 6, "☃☃"),
        ("☃\\xc0\\x80☃", 5, "☃\\xc0\\x80"),
        ("a\\xffb", 2, "a\\xff"),
        ("☃", 2, ""),
        ("text", 0, ""),
        ("text", -1, "text"),
        ("text", None, "text"),
        (None, 3, None),
        (7, 3, 7),
    ],
)
def test_a_string_is_cut_at_its_length_in_bytes(value: Value, length: Value, cut: Value) -> None:
    assert cut_at(value, length) == cut


def described(found: Probe, captures: str) -> DescribedSite:
    """captures: `0s 1 2x`, indexes and whether it is a string or in hexadecimal."""
    taken = tuple(
        CapturedArgument(int(each.rstrip("sx")), each.endswith("s"), "", each.endswith("x"))
        for each in captures.split()
    )
    return DescribedSite(found, found.sites[0], taken)


def batch(site: DescribedSite, *values: Value) -> EventBatch:
    block = EventBlock(
        1, [1], [1_000_000_000], [4711], [4711], [0], ["shop"], [1], {1: site}, tuple([value] for value in values), None
    )
    return EventBatch((block,))


def line(names: ArgumentNames, events: EventBatch) -> str:
    (text,) = EventLines(names, color=False).format(names.cut(events), None)
    return text.partition("  shop:")[2].partition("  ")[2]


def test_people_see_names_and_meanings(known: Known) -> None:
    names = ArgumentNames(known, ["shop:sale"])
    events = batch(described(probe("sale", *SALE), "0s 1 2x 3 4"), "lamp\x01\x02", 4, 0x7F00, 1, 0)
    assert line(names, events) == 'item="lamp" till=0x7f00 kind=cash paid=false'
    # what is not known is shown as it is
    events = batch(described(probe("sale", *SALE), "0s 1 2x 3 4"), None, 4, 0, 9, 7)
    assert line(names, events) == "item=<> till=0x0 kind=9 paid=7"


@pytest.mark.parametrize(
    ("extras", "took", "shown"),
    [
        (0, 0, "extras=0 took=0"),
        (5, 1_500, "extras=gift|wrapped took=1.5ms"),
        (9, 2_000_000, "extras=gift|0x8 took=2s"),
        (-1, -1, "extras=-1 took=-1"),
    ],
)
def test_flags_and_durations_are_spelled_out(known: Known, extras: int, took: int, shown: str) -> None:
    names = ArgumentNames(known, ["shop:wrap"])
    assert line(names, batch(described(probe("wrap", INT, INT), "0 1"), extras, took)) == shown


def test_json_has_the_names_beside_the_arguments(known: Known) -> None:
    names = ArgumentNames(known, ["shop:sale"])
    site = described(probe("sale", *SALE), "0s 1 3 4")
    site = replace(site, captures=(*site.captures, CapturedArgument(0, False, "", field="uid")))
    (text,) = json_lines(names.cut(batch(site, "lamp\x01", 4, 1, 1, 33)), names)
    record = json.loads(text)
    assert record["args"] == ["lamp", 4, 1, 1]
    assert record["named"] == {"item": "lamp", "size": 4, "kind": "cash", "paid": True}
    assert record["uid"] == 33


def test_json_of_sites_whose_names_differ(known: Known) -> None:
    sale, wrap = described(probe("sale", *SALE), "3 4"), described(probe("wrap", INT, INT), "0 1")
    rent = described(probe("rent", INT, INT), "0 1")
    sites = {
        site_id: replace(each, site=replace(each.site, site_id=site_id))
        for site_id, each in enumerate([sale, wrap, rent], 1)
    }
    (block,) = batch(wrap, 5, 1).blocks
    block = replace(
        block, count=3, **{name: getattr(block, name) * 3 for name in ("time_ns", "pid", "tid", "cpu", "comm")},
        seq=[1, 2, 3], site_id=[1, 2, 3], sites=sites, values=([1, 5, 1], [1, 5, 1])
    )  # fmt: skip
    names = ArgumentNames(known, ["shop:sale", "shop:wrap"])
    records = [json.loads(text) for text in json_lines(names.cut(EventBatch((block,))), names)]
    assert [record.get("named") for record in records] == [
        {"kind": "cash", "paid": True}, {"extras": "gift|wrapped", "took": 5}, None
    ]  # fmt: skip


def test_only_what_was_asked_for_by_name_has_names(known: Known) -> None:
    events = batch(described(probe("sale", *SALE), "0s 1"), "lamp\x01", 4)
    for names in (ArgumentNames(known, []), ArgumentNames(known, ["shop:wrap"])):
        assert line(names, events) == '"lamp\\x01" 4'
        assert "named" not in json.loads(json_lines(names.cut(events), names)[0])


def test_a_site_that_contradicts_its_signature_has_no_names(known: Known) -> None:
    names = ArgumentNames(known, ["shop:sale"])
    assert line(names, batch(described(probe("sale", INT, INT), "0 1"), 7, 4)) == "7 4"
