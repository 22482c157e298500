"""What `stapsdt doctor` is asked about, and with which switches a JVM was started."""

from __future__ import annotations

import pytest

from stapsdtd.cli import stapsdt
from stapsdtd.cli.jvm_switches import switches_of
from stapsdtd.cli.runtime_target import Asked, asked

METHODS, ALLOCATIONS, MONITORS = "DTraceMethodProbes", "DTraceAllocProbes", "DTraceMonitorProbes"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Asked()),
        ("java", Asked("java")),
        ("4711", Asked(pid=4711)),
        ("java 4711", Asked("java", pid=4711)),
        ("4711 java", Asked("java", pid=4711)),
        ("python ./python3", Asked("python", path="./python3")),
        ("/opt/app", Asked(path="/opt/app")),
        ("sh", Asked(path="/bin/sh")),
    ],
)
def test_what_words_are_about(words: str, expected: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    assert asked(words.split()) == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("pyhton", "type: stapsdt doctor python PID, or stapsdt doctor ./pyhton; see 'stapsdt doctor --help'"),
        ("java app.jar", "type: stapsdt doctor java PID, or stapsdt doctor ./app.jar; see 'stapsdt doctor --help'"),
        (
            "python 1 2",
            "and one process or file, at a time; type: stapsdt doctor python 1; see 'stapsdt doctor --help'",
        ),
        ("1 2", "and one process or file, at a time; type: stapsdt doctor 1; see 'stapsdt doctor --help'"),
        (
            "python java",
            "one runtime, and one process or file, at a time; type: stapsdt doctor python; see 'stapsdt doctor --help'",
        ),
    ],
)
def test_wrong_words_tell_what_to_type(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stapsdt.run(["doctor", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.endswith(f"{told}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "on"),
    [
        ("-jar app.jar", set()),
        ("-XX:+ExtendedDTraceProbes -jar app.jar", {METHODS, ALLOCATIONS, MONITORS}),
        ("-XX:+DTraceMethodProbes -cp x:y Main", {METHODS}),
        ("-cp -XX:+DTraceMethodProbes Main", set()),
        ("-XX:+ExtendedDTraceProbes -XX:-DTraceAllocProbes Main", {METHODS, MONITORS}),
        ("-XX:-DTraceAllocProbes -XX:+ExtendedDTraceProbes Main", {METHODS, ALLOCATIONS, MONITORS}),
        # arguments of the program
        ("Main -XX:+DTraceMethodProbes", set()),
        ("-jar app.jar -XX:+DTraceMethodProbes", set()),
        ("-m java.base/Main -XX:+DTraceMethodProbes", set()),
        ("-Xmx1g -XX:+UseSerialGC -XX:+DTraceMonitorProbes", {MONITORS}),
    ],
)
def test_switches_of_a_command_line(line: str, on: set[str]) -> None:
    found = switches_of(["java", *line.split()], {})
    assert found.on == on
    assert found.is_all


def test_switches_of_the_environment() -> None:
    switch = "-XX:+DTraceMethodProbes"
    for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"):
        assert switches_of(["java", "Main"], {name: f"-Xmx1g {switch}"}).on == {METHODS}
    off = ["java", "-XX:-DTraceMethodProbes", "Main"]
    assert switches_of(off, {"JAVA_TOOL_OPTIONS": switch}).on == set()
    # the JVM takes it last
    assert switches_of(off, {"_JAVA_OPTIONS": switch}).on == {METHODS}
    assert switches_of(["java", "Main"], {"JAVA_TOOL_OPTIONS": "'unclosed"}).on == set()


@pytest.mark.parametrize("option", ["@options", "-XX:Flags=.hotspotrc", "-XX:VMOptionsFile=app.options"])
def test_options_in_files_are_not_known(option: str) -> None:
    assert not switches_of(["java", option, "Main"], {}).is_all
