"""Every value delivered is the value that was fired, whatever a compiler made of the arguments."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ground_truth import PROVIDER, compiled, generate
from tests.support import Daemon, Recorder, require, wait_for

pytestmark = pytest.mark.kernel

PROBES, ROUNDS = 25, 34
INDEXED = "tracefs cannot add a base and an index"
IN_TWO_REGISTERS = "in two registers"
BUILDS = [
    *itertools.product(["gcc", "clang"], ["-O0", "-O1", "-O2", "-O3", "-Os"], ["-fPIE -pie", "-fno-pie -no-pie"]),
    *itertools.product(["gcc", "clang"], ["-O0", "-O2", "-Os"], ["-m32 -fPIE -pie", "-m32 -fno-pie -no-pie"]),
]
IN_GUESTS = [("gcc", "-O2", "-fPIE -pie")]


def build_id(build: tuple[str, ...]) -> str:
    return "".join(build).replace(" ", "")


def cannot_be_had(reason: str, engine: str, build: tuple[str, ...]) -> bool:
    return (engine == "ftrace" and INDEXED in reason) or ("-m32" in build_id(build) and IN_TWO_REGISTERS in reason)


def test_enough_is_compared() -> None:
    programs = [generate(seed, PROBES, ROUNDS) for seed in range(1, len(BUILDS) + 1)]
    assert sum(len(types) for program in programs for types in program.probes) * ROUNDS > 100_000


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=pytest.mark.vm if build in IN_GUESTS else ()) for build in BUILDS],
    ids=build_id,
)
def test_every_value_is_what_was_fired(
    daemon: Daemon, engine: str, tmp_path: Path, build: tuple[str, str, str]
) -> None:
    seed = BUILDS.index(build) + 1
    compiler, *options = build
    require(shutil.which(compiler), compiler)
    program = generate(seed, PROBES, ROUNDS)
    path = compiled(program, [compiler, *" ".join(options).split()], tmp_path / "program")
    with (
        subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running,
        Recorder(daemon.target, f"{PROVIDER}:*", pids=[running.pid], kernel_buffer_kib=16384) as recorder,
    ):
        wait_for(lambda: len(recorder.armed()) == PROBES, "all probes to be armed")
        told, _ = running.communicate(b"\n")
    expected = program.expected(told)
    assert recorder.account is not None
    assert (recorder.account.fired, recorder.account.lost) == (len(expected), 0)
    for event, (name, values) in zip(recorder.events, expected, strict=True):
        assert event.probe.name == name
        wrong = {
            event.site.arguments[place].text: (found, fired, event.unavailable.get(place))
            for place, (found, fired) in enumerate(zip(event.values, values, strict=True))
            if found != fired and not cannot_be_had(event.unavailable.get(place, ""), engine, build)
        }
        assert wrong == {}, f"{name} of {build_id(build)}, seed {seed}"
