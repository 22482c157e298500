"""Selectors that become several, and what the server makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest

from stapsdtd.catalog.selectors import parse
from stapsdtd.cli.expanded_selectors import expanded, matched_probes, narrowed
from stapsdtd.cli.known_signatures import Known
from stapsdtd.cli.signature_captures import Resolved
from stapsdtd.client import Probe
from tests.unit.samples import argument, site
from tests.unit.test_cli_signatures import INT, POINTER, SALE, known, probe
from tests.unit.test_selectors import choose

__all__ = ["known"]

OF_SALE = "arg0:str, arg1, arg2:hex, arg3, arg4"


def captured(resolved: Sequence[Resolved], path: str, name: str = "sale", arguments: int = 5) -> list[str]:
    """Return what the server captures at a site of a probe: `0s 1 2x`."""
    selectors = tuple(parse(each.text) for each in resolved)
    ((chosen, _),) = choose(selectors, path, (site(name, 1, [argument()] * arguments, provider="shop"),))
    return [f"{each.subject}{'s' * each.is_string}{'x' * each.is_hex}" for each in chosen.captures]


def test_a_glob_captures_strings_of_probes_that_are_known(known: Known) -> None:
    resolved = expanded("shop:*", [probe("sale", *SALE)], known)
    assert resolved == [
        Resolved(f"shop:::sal[e]({OF_SALE})", "shop:*", ("shop", "sale"), is_part=True),
        Resolved("shop:*", "shop:*", has_names=True),
    ]
    assert captured(resolved, "/bin/shop") == ["0s", "1", "2x", "3", "4"]
    # of a file that comes later, whose probe is another
    assert captured(resolved, "/bin/shop", arguments=2) == ["0s", "1"]
    assert captured(resolved, "/bin/shop", "rent", 2) == ["0", "1"]


def test_a_glob_captures_what_is_to_come(known: Known) -> None:
    (known_later, everything) = expanded("python:gc*", [], known), expanded("python:*", [], known)
    assert [each.text for each in known_later] == ["python:gc*"]
    assert "python:::function__entr[y](arg0:str, arg1:str, arg2)" in [each.text for each in everything]
    # of two versions, nobody knows which one it is going to be
    assert [each.text for each in expanded("shop:*", [], known)] == ["shop:*"]
    # nor which of all providers
    assert [each.text for each in expanded("*:*", [], known)] == ["*:*"]


def test_files_of_several_versions_are_told_apart(known: Known, capsys: pytest.CaptureFixture[str]) -> None:
    probes = [probe("sale", *SALE), probe("sale", POINTER, path="/opt/new (2)/shop")]
    for given in ("shop:sale", "shop:*", "sale"):
        resolved = expanded(given, probes, known)
        assert captured(resolved, "/bin/shop") == ["0s", "1", "2x", "3", "4"]
        assert captured(resolved, "/opt/new (2)/shop", arguments=1) == ["0s"]
        assert captured(resolved, "/bin/later", arguments=2) == ["0", "1"]
        assert all(each.given == given for each in resolved)
        assert [each.is_part for each in resolved] == [True, True, False]
    known.tell_contradictions()
    assert capsys.readouterr().err == ""


def test_a_file_that_contradicts_the_signature_is_left_out_and_told_once(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = [probe("sale", *SALE), probe("sale", INT, INT, path="/bin/old")]
    for given in ("shop:sale", "shop:s*"):
        resolved = expanded(given, probes, known)
        assert captured(resolved, "/bin/shop") == ["0s", "1", "2x", "3", "4"]
        assert captured(resolved, "/bin/old", arguments=2) == ["0", "1"]
        known.tell_contradictions()
    assert capsys.readouterr().err == (
        "stapsdt: shop:sale in /bin/old: its signature is not used: the probe has 2 arguments, and the signature 5\n"
    )


def test_contradictions_of_a_file_are_told_in_a_line(known: Known, capsys: pytest.CaptureFixture[str]) -> None:
    expanded("shop:*", [probe("wrap", path="/bin/old"), probe("sale", INT, INT, path="/bin/old")], known)
    known.tell_contradictions()
    assert capsys.readouterr().err == (
        "stapsdt: shop:sale, shop:wrap in /bin/old: their signatures are not used: "
        "the probe has 2 arguments, and the signature 5\n"
    )


def test_names_that_one_file_has(known: Known) -> None:
    probes = [probe("sale", *SALE), probe("sale", INT, INT, path="/bin/old")]
    resolved = expanded("shop:sale(paid, item)", probes, known)
    assert captured(resolved, "/bin/shop") == ["4", "0s", "1"]
    assert captured(resolved, "/bin/old", arguments=2) == ["0", "1"]
    with pytest.raises(click.UsageError, match="in /bin/old, the probe has 2 arguments"):
        expanded("shop:sale(item)", probes[1:], known)
    with pytest.raises(click.UsageError, match="and no globs"):
        expanded("shop:s*(item)", probes, known)


def test_one_path_of_two_containers_is_not_told_apart(known: Known) -> None:
    resolved = expanded("shop:sale", [probe("sale", *SALE), probe("sale", POINTER)], known)
    assert captured(resolved, "/bin/shop", arguments=1) == ["0"]


@pytest.mark.parametrize("given", ["shop:sale()", "shop:*(arg0:str)", "shop:sale(arg0", "", "bakery:*", "rent"])
def test_what_stays_as_it_is(known: Known, given: str) -> None:
    assert [each.text for each in expanded(given, [probe("sale", *SALE)], known)] == [given]


def test_names_that_would_be_other_selectors_are_not_sent(known: Known) -> None:
    odd = Probe("shop", "other(arg9", "/bin/shop", None, "x86-64", (), probe("sale", *SALE).sites)
    assert [each.text for each in expanded("shop:other*", [odd], known)] == ["shop:other*"]


def test_paths_that_a_selector_has_no_room_for_are_not_sent(known: Known) -> None:
    probes = [probe("sale", *SALE), probe("sale", POINTER, path="/" + "x" * 1024)]
    assert len(expanded("shop:sale", probes, known)) == 2


@pytest.mark.parametrize(
    ("given", "provider", "path", "text"),
    [
        ("shop:*", "shop", "", "shop:::sale"),
        ("shop:main*:*", "app2", "", "app[2]:shop:main*:sale"),
        ("shop4711:::*", "shop", "", "shop4711:::sale"),
        ("shop4711:::*", "shop4711", "", "shop471[1]:::sale"),
        ("shop:lib*:main:*", "shop", "/lib/[a](1)", 'shop:"/lib/[a](1)":main:sale'),
    ],
)
def test_narrowed_selectors_match_what_they_are_narrowed_to(given: str, provider: str, path: str, text: str) -> None:
    selector = parse(given)
    assert narrowed(selector, provider, "sale", path) == text
    found = parse(text)
    where = site("sale", provider=provider, function="main")
    assert choose((found,), path or "/lib/shop", (where,))
    assert found.function.text == selector.function.text


def test_what_a_glob_matches(known: Known) -> None:
    found = [probe("sale", *SALE), probe("rent", INT)]
    assert matched_probes(parse("shop:*"), found, known) == [("shop", "sale"), ("shop", "rent"), ("shop", "wrap")]
    assert matched_probes(parse("sh*:s*"), found, known) == [("shop", "sale")]
