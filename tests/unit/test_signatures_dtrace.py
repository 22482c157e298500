from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from stapsdtd.cli.stapsdt import cli
from stapsdtd.signatures import SignatureFileError
from stapsdtd.signatures.dtrace_file import import_dtrace
from stapsdtd.signatures.files import read_signatures

FILE = """
/* provider old { probe gone(); }; */
#define Oid unsigned int
#define Text const char *
#if SHOP_TRACE
# a line that other tools' files have
typedef unsigned long long money_t;
typedef struct { int dummy; } basket_t;
provider shop {
    // when somebody comes
    probe enter();
    probe sale__start(const char *item, unsigned int, Oid id, Text, money_t price, int32_t, uint8_t kind);
    probe sale__done(void);
    probe look-entry(basket_t *b, char **names, string what, bool, double weight, char c, int arg0) :
        (basket_info_t *b);
    probe look__return(int x, int x,
                       size_t);
};
#pragma D attributes Evolving/Evolving/Common provider shop provider
"""


def test_a_providers_file_becomes_signatures(tmp_path: Path) -> None:
    path = tmp_path / "shop.d"
    path.write_text(FILE)
    done = CliRunner().invoke(cli, ["signatures", "import", str(path)])
    assert done.exit_code == 0, done.output
    signatures = {each.name: each for each in read_signatures("shop.toml", done.output)}
    assert {each.provider for each in signatures.values()} == {"shop"}
    assert {each.source for each in signatures.values()} == {"shop.d"}
    declared = {
        name: [argument.text for argument in signature.arguments or ()] for name, signature in signatures.items()
    }
    assert declared == {
        "enter": [],
        "sale__start": [
            "string item", "integer value1", "integer id", "string value3", "integer price", "int32 value5",
            "uint8 kind",
        ],
        "sale__done": [],
        "look__entry": [
            "pointer b", "pointer names", "string what", "bool value3", "float weight", "integer c", "integer value6",
        ],
        "look__return": ["integer x_0", "integer x_1", "integer value2"],
    }  # fmt: skip
    assert signatures["sale__start"].ends_with == "sale__done"
    assert signatures["look__entry"].ends_with == "look__return"
    assert signatures["enter"].ends_with == ""


@pytest.mark.parametrize("text", ["", "int x;", "provider a { probe b(); }; provider c { probe d(); };"])
def test_a_file_without_one_provider_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shop.d"
    path.write_text(text)
    with pytest.raises(SignatureFileError, match="providers, where one is expected"):
        import_dtrace(path)


def test_definitions_that_refer_to_themselves_end(tmp_path: Path) -> None:
    path = tmp_path / "shop.d"
    path.write_text("#define A B B B B B B B B B B B B\n#define B A *\nprovider shop { probe sale(A x); };")
    (signature,) = read_signatures("shop.toml", import_dtrace(path))
    assert signature.arguments is not None
    assert [declared.name for declared in signature.arguments] == ["x"]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SignatureFileError, match=r"shop\.d: No such file"):
        import_dtrace(tmp_path / "shop.d")
