from __future__ import annotations

from pathlib import Path

import pytest

from stapsdtd.config import Config, Limits, load, validated
from stapsdtd.errors import InvalidArgumentError


def loaded(folder: Path, text: str | bytes) -> dict[str, object]:
    path = folder / "stapsdtd.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(str(path))


def test_all_settings(tmp_path: Path) -> None:
    text = 'listen = "unix:/tmp/x"\nengine = "ftrace"\n[limits]\nmax_selectors = 7\n'
    assert loaded(tmp_path, text) == {
        "listen": "unix:/tmp/x",
        "engine": "ftrace",
        "limits": Limits(max_selectors=7),
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "[limits]\n"])
def test_nothing_set(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ('lisen = "unix:/x"', "lisen", "is no setting"),
        ("listen = 5", "listen", "must be a text"),
        ("limits = 5", "limits", "must be a table"),
        ("[limits]\nmax_selector = 1", "limits.max_selector", "is no limit; there are default_kernel_buffer_kib"),
        ("[limits]\nmax_selectors = 0", "limits.max_selectors", "above 0, not 0"),
        ("[limits]\nmax_selectors = true", "limits.max_selectors", "not True"),
        ("[limits]\nmax_selectors = 1.5", "limits.max_selectors", "not 1.5"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, field: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason) as raised:
        loaded(tmp_path, text)
    assert raised.value.field == field


@pytest.mark.parametrize("text", ["listen", b"\xff\xfe", "a = 1\na = 2"])
def test_what_is_not_toml(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="is not TOML") as raised:
        loaded(tmp_path, text)
    assert raised.value.field == str(tmp_path / "stapsdtd.toml")


def test_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(str(tmp_path / "missing"))


def test_defaults_are_valid() -> None:
    assert validated(Config()) == Config()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Config(engine="dtrace"), "engine"),
        (Config(listen="/run/x"), "listen"),
        (Config(listen="unix:"), "listen"),
        (Config(listen="tcp:1"), "listen"),
    ],
)
def test_values_that_cannot_be_used(config: Config, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        validated(config)
    assert raised.value.field == field
