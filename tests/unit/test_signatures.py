from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from stapsdtd.signatures import Catalog, Kind, Signature, SignatureFileError
from stapsdtd.signatures.files import read_shipped, read_signatures, shipped_providers
from tests.support import ROOT

HEAD = 'provider = "shop"\nsource = "its header"\nversions = "1"\n'
ENTRY = HEAD + '[[probes]]\nname = "sale"\ntext = "Something was sold."\n'


@dataclass(frozen=True)
class Note:
    """An argument of a note, `8@%rdi`."""

    text: str

    @property
    def size(self) -> int:
        return int(self.text.partition("@")[0].strip("-f"))

    @property
    def is_float(self) -> bool:
        return "f" in self.text.partition("@")[0]


@dataclass(frozen=True)
class Site:
    arguments: tuple[Note, ...]


def site(*texts: str) -> Site:
    return Site(tuple(map(Note, texts)))


def written(folder: Path, text: str, name: str = "shop.toml") -> Catalog:
    (folder / name).write_text(text)
    return Catalog(folder)


def one(text: str) -> Signature:
    (signature,) = read_signatures("shop.toml", text)
    return signature


def test_an_entry_says_what_arguments_are() -> None:
    tables = '[enums.kind]\n0 = "cash"\n-1 = "card"\n[flags.extras]\n1 = "gift"\n4 = "wrapped"\n'
    declared = ["string(size) item", "uint16 size", "enum(kind) kind", "flags(extras) extras", "duration(ms) took"]
    signature = one(ENTRY.replace("[[", f"{tables}[[") + f"arguments = {declared}\n")
    assert signature.arguments is not None
    item, size, kind, extras, took = signature.arguments
    assert (item.name, item.kind, item.length, item.text) == ("item", Kind.STRING, "size", "string(size) item")
    assert (size.kind, size.size) == (Kind.INTEGER, 2)
    assert kind.labels == {0: "cash", -1: "card"}
    assert extras.labels == {1: "gift", 4: "wrapped"}
    assert took.unit_ns == 1_000_000


def test_the_documented_file_is_right() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "commands.md").read_text(), re.DOTALL)
    (text,) = (block for block in blocks if block.startswith("provider"))
    start, done = read_signatures("shop.toml", text)
    assert start.ends_with == done.name
    assert start.notes == done.notes == (("sale*", "only with SHOP_TRACE=1"),)


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("provider = ", "", "Invalid value"),
        ('source = "x"\n', "", "missing required field `provider`"),
        (HEAD + "probes = []\nprobe = []\n", "", "unknown field `probe`"),
        (ENTRY + 'argument = ["string x"]\n', "probes[0]", "unknown field `argument`"),
        (ENTRY + "arguments = [1.5]\n", "probes[0].arguments[0]", "Expected `str`"),
        (ENTRY + 'arguments = ["string"]\n', "probes[0].arguments[0]", "'string' is not a type and a name"),
        (ENTRY + 'arguments = ["long x"]\n', "probes[0].arguments[0]", "long is no type; they are string, pointer"),
        (ENTRY + 'arguments = ["string8 x"]\n', "probes[0].arguments[0]", "string8 is no type"),
        (ENTRY + 'arguments = ["bool(x) x"]\n', "probes[0].arguments[0]", "bool takes nothing in parentheses"),
        (ENTRY + 'arguments = ["integer x", "enum(k) y"]\n', "probes[0].arguments[1]", "no table [enums.k]"),
        (ENTRY + 'arguments = ["flags(k) y"]\n', "probes[0].arguments[0]", "no table [flags.k]"),
        (ENTRY + 'arguments = ["duration(h) y"]\n', "probes[0].arguments[0]", "unit is one of ns, us, ms, s"),
        (ENTRY + 'arguments = ["bool x", "bool x"]\n', "probes[0].arguments", "two arguments are named x"),
        (ENTRY + 'arguments = ["bool arg1"]\n', "probes[0].arguments", "arg1 means an argument by its position"),
        (ENTRY + 'arguments = ["string(n) x", "string n"]\n', "probes[0].arguments", "no integer argument is named n"),
        (ENTRY + 'ends_with = "sold"\n', "probes[0].ends_with", "the file has no probe sold"),
    ],
)
def test_a_wrong_file_is_told_by_its_key(text: str, key: str, reason: str) -> None:
    with pytest.raises(SignatureFileError) as caught:
        read_signatures("shop.toml", text)
    assert caught.value.key == key
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"shop.toml: {key}")


@pytest.mark.parametrize("provider", sorted(shipped_providers()))
def test_what_is_shipped_is_right_and_says_where_it_comes_from(provider: str) -> None:
    signatures = read_shipped(provider)
    assert {signature.provider for signature in signatures} == {provider}
    assert all(each.source and each.versions and each.text.endswith(".") for each in signatures)
    lists = [(each.name, *(declared.text for declared in each.arguments or ())) for each in signatures]
    assert len(lists) == len(set(lists))


@pytest.mark.parametrize(
    ("declared", "note", "architecture", "fits"),
    [
        ("string x", "8@%rdi", "x86-64", True),
        ("string x", "-4@%edi", "x86-64", False),
        ("pointer x", "4@%eax", "i386", True),
        ("pointer x", "8@%xmm0", "i386", False),
        ("pointer x", "8f@%xmm0", "x86-64", False),
        ("float x", "8f@%xmm0", "x86-64", True),
        ("float x", "8@%rdi", "x86-64", False),
        ("integer x", "-2@%ax", "x86-64", True),
        ("integer x", "24@(%rdi)", "x86-64", False),
        ("int32 x", "4@%edi", "x86-64", True),
        ("int32 x", "-8@%rdi", "x86-64", False),
        ("int64 x", "-4@$7", "x86-64", True),
        ("int64 x", "-4@7", "aarch64", True),
        ("bool x", "1@%al", "x86-64", True),
        ("bool x", "4f@%xmm0", "x86-64", False),
    ],
)
def test_a_note_that_contradicts_a_type_turns_the_signature_off(
    tmp_path: Path, declared: str, note: str, architecture: str, *, fits: bool
) -> None:
    known = written(tmp_path, ENTRY + f'arguments = ["{declared}"]\n')
    fit = known.fit("shop", "sale", [site(note)], architecture)
    assert (fit.signature is not None) == fits
    assert fit.contradiction == ("" if fits else f"arg0 is {note}, which cannot be {declared}")


def test_a_note_with_more_or_fewer_arguments_turns_the_signature_off(tmp_path: Path) -> None:
    known = written(tmp_path, ENTRY + 'arguments = ["bool x"]\n')
    assert known.fit("shop", "sale", [site("1@%al", "1@%bl")], "x86-64").contradiction == (
        "the probe has 2 arguments, and the signature 1"
    )
    # any of a probe's sites
    assert known.fit("shop", "sale", [site("1@%al"), site()], "x86-64").signature is None


def test_the_version_that_fits_is_chosen(tmp_path: Path) -> None:
    other = '[[probes]]\nname = "sale"\ntext = "Sold, in version 2."\narguments = ["bool x", "bool y"]\n'
    known = written(tmp_path, ENTRY + 'arguments = ["bool x"]\n' + other)
    fit = known.fit("shop", "sale", [site("1@%al", "1@%bl")], "x86-64")
    assert fit.signature is not None
    assert fit.signature.text == "Sold, in version 2."
    assert known.fit("shop", "sale", [site()], "x86-64").contradiction


def test_a_glob_is_for_probes_without_an_entry_and_has_no_say_about_arguments(tmp_path: Path) -> None:
    glob = '[[probes]]\nname = "s*"\ntext = "Something happened."\n'
    known = written(tmp_path, ENTRY.replace("[[probes]]", f"{glob}[[probes]]"))
    assert [each.text for each in known.of("shop", "sale")] == ["Something was sold."]
    fit = known.fit("shop", "stock", [site("8@%rdi")], "x86-64")
    assert fit.signature is not None
    assert fit.signature.arguments is None
    assert known.of("shop", "request") == known.of("market", "sale") == ()


def test_own_files_come_first_and_a_broken_one_is_told_and_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("provider = 1")
    (tmp_path / "b.toml").write_text(ENTRY.replace("shop", "python").replace("sale", "gc__start"))
    (tmp_path / "c.toml").write_bytes(b"\xff")
    (tmp_path / "d.txt").write_text("is not looked at")
    told: list[SignatureFileError] = []
    known = Catalog(tmp_path, warn=told.append)
    assert [each.text for each in known.of("python", "gc__start")] == ["Something was sold."]
    assert [each.source for each in known.of("python", "gc__done")] == [read_shipped("python")[0].source]
    assert [Path(each.path).name for each in told] == ["a.toml", "c.toml"]
    assert Catalog(tmp_path / "missing").of("python", "gc__start") == tuple(
        each for each in read_shipped("python") if each.name == "gc__start"
    )
