from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stapsdtd.provider import INT8, INT64, MAX_ARGUMENTS, STRING, UINT8, ArgType, Probe, Provider
from stapsdtd.provider.probes import MAX_PROVIDER_NAME
from tests.support import require

_PER_LINUX32, _QUERY = 0x0008, 0xFFFFFFFF

INTEGERS = [type_ for type_ in ArgType if type_ is not STRING]


def probe_of(*types: ArgType) -> Probe:
    return Provider("myapp").probe("probe", *types)


class Recorder:
    """Stands in for the stub, and shows what it was called with."""

    def __init__(self, probe: Probe) -> None:
        self.calls: list[tuple[int | bytes, ...]] = []
        site = probe.site
        probe.site = type(site)(ctypes.c_uint16(1), self, None)

    def __call__(self, *arguments: int | bytes) -> None:
        self.calls.append(arguments)


def test_int_and_str_stand_for_types() -> None:
    provider = Provider("myapp")
    assert provider.probe("probe", int, str, UINT8).types == (INT64, STRING, UINT8)


@pytest.mark.parametrize("wrong", [bool, float, "int", None, object()])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="int, str or an ArgType"):
        Provider("myapp").probe("probe", wrong)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "1a", "a-b", "ä", "a\0", "a.b", "a\n"])
def test_names_that_a_tool_could_not_spell_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid probe or provider name"):
        Provider(name)
    with pytest.raises(ValueError, match="not a valid probe or provider name"):
        Provider("myapp").probe(name)


def test_the_longest_provider_name_still_loads() -> None:
    with pytest.raises(ValueError, match="at most 238"):
        Provider("p" * (MAX_PROVIDER_NAME + 1))
    longest = Provider("p" * MAX_PROVIDER_NAME)
    longest.probe("probe")
    with longest:
        assert longest.loaded


def test_a_name_is_declared_once() -> None:
    provider = Provider("myapp")
    provider.probe("probe")
    with pytest.raises(ValueError, match="myapp already has a probe probe"):
        provider.probe("probe", int)


def test_a_probe_has_six_arguments_at_most() -> None:
    provider = Provider("myapp")
    provider.probe("most", *[int] * MAX_ARGUMENTS)
    with pytest.raises(ValueError, match="at most 6 arguments, not 7"):
        provider.probe("more", *[int] * (MAX_ARGUMENTS + 1))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("type_", INTEGERS)
def test_an_integer_has_to_fit_whether_traced_or_not(type_: ArgType, traced: bool) -> None:
    probe = probe_of(type_)
    recorder = Recorder(probe) if traced else None
    probe.fire(type_.low)
    probe.fire(type_.high)
    for outside in (type_.low - 1, type_.high + 1):
        with pytest.raises(OverflowError, match=str(outside)):
            probe.fire(outside)
    if recorder:
        assert recorder.calls == [(type_.low,), (type_.high,)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("type_", "argument"), [(INT8, "1"), (INT8, b"1"), (INT8, 1.0), (INT8, None), (STRING, 1), (STRING, None)]
)
def test_an_argument_of_another_type_is_refused(type_: ArgType, argument: Any, traced: bool) -> None:
    probe = probe_of(type_)
    if traced:
        Recorder(probe)
    with pytest.raises(TypeError, match="<Probe probe"):
        probe.fire(argument)


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3)])
def test_arguments_are_counted(arguments: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=f"takes 2 arguments, not {len(arguments)}"):
        probe_of(INT8, INT8)(*arguments)


@example("\ud800 unpaired")
@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_no_string_makes_a_traced_program_fail(text: str) -> None:
    probe = probe_of(STRING)
    recorder = Recorder(probe)
    probe.fire(text)
    (arguments,) = recorder.calls
    assert isinstance(arguments[0], bytes)


@given(st.binary())
def test_undecodable_file_names_come_out_as_the_bytes_they_were(raw: bytes) -> None:
    probe = probe_of(STRING)
    recorder = Recorder(probe)
    probe.fire(os.fsdecode(raw))
    probe.fire(raw)
    assert recorder.calls == [(raw,), (raw,)]


def test_load_says_that_it_did_already() -> None:
    provider = Provider("myapp")
    provider.probe("probe")
    with provider, pytest.raises(RuntimeError, match=r"provider myapp is loaded; reload\(\)"):
        provider.load()
    assert not provider.loaded


def test_nothing_declared_is_nothing_to_load() -> None:
    provider = Provider("myapp")
    with pytest.raises(ValueError, match="declares no probes"):
        provider.load()
    assert not provider.loaded


@contextmanager
def thirty_two_bit_machine() -> Iterator[str]:
    """Have uname(2) name the machine as the processor's 32-bit mode, as under linux32(8)."""
    libc = ctypes.CDLL(None)
    own, before = os.uname().machine, libc.personality(_QUERY)
    libc.personality(_PER_LINUX32)
    try:
        machine = os.uname().machine
        require(machine != own, "a kernel that has a 32-bit personality")
        yield machine
    finally:
        libc.personality(before)


def test_another_processor_is_named() -> None:
    provider = Provider("myapp")
    probe = provider.probe("probe", int)
    with thirty_two_bit_machine() as machine, pytest.raises(NotImplementedError, match=machine):
        provider.load()
    probe.fire(1)
    assert not probe.enabled


def test_they_say_what_they_are() -> None:
    provider = Provider("myapp")
    assert repr(provider.probe("request__start", str, INT8)) == "<Probe request__start(string, int8)>"
    assert repr(provider) == "<Provider myapp, 1 probes, not loaded>"
    assert provider.name == "myapp"
    assert [probe.name for probe in provider.probes] == ["request__start"]
