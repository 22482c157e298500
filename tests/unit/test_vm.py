"""What boots other kernels must not call a run fine that was none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vm import guest, images, initrd, installed, kernels, report, table
from tests.vm.guest import Machine
from tests.vm.kernels import Kernel
from tests.vm.report import Report
from tests.vm.suite import Outcome, section
from tests.vm.table import Check, Column

PACKAGES = [
    "linux-image-6.1.0-9-amd64",
    "linux-image-6.1.0-56-amd64",
    "linux-image-6.1.0-57-cloud-amd64",
    "linux-image-6.1.0-58-amd64-unsigned",
    "linux-image-6.12-amd64",
    "linux-image-6.12.9+deb12-amd64",
    "linux-image-6.12.117+deb12-amd64",
    "linux-image-6.12.118+deb12-rt-amd64",
    "linux-image-6.12.119+deb12-arm64",
]
JUNIT = """\
<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.kernel.test_bpf" name="test_fine" time="1.0" />
<testcase classname="tests.kernel.test_bpf" name="test_wrong" time="1.0"><failure message="no">E 1 == 2</failure>
</testcase>
<testcase classname="tests.kernel.test_bpf" name="test_broken" time="1.0"><error message="no daemon" /></testcase>
<testcase classname="tests.kernel.test_bpf" name="test_left_out" time="1.0"><skipped message="no gcc">there</skipped>
</testcase></testsuite></testsuites>
"""


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("6.1", "linux-image-6.1.0-56-amd64"),
        ("6.12", "linux-image-6.12.117+deb12-amd64"),
        ("linux-image-6.1.0-9-amd64", "linux-image-6.1.0-9-amd64"),
        ("6", "linux-image-6.12.117+deb12-amd64"),
        ("5.10", None),
    ],
)
def test_newest_plain_kernel_of_a_series_is_taken(name: str, package: str | None) -> None:
    assert kernels.newest(PACKAGES, name, "amd64") == package


def test_first_root_is_an_archive_that_others_read(tmp_path: Path) -> None:
    archive = initrd.archive({"init": b"#!/bin/sh\n", "modules/9p.ko": b"12345"})
    subprocess.run(["busybox", "cpio", "-i"], input=archive, cwd=tmp_path, capture_output=True, check=True)
    assert (tmp_path / "init").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "init").stat().st_mode == 0o100755
    assert (tmp_path / "modules" / "9p.ko").read_bytes() == b"12345"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dev", "init", "modules", "proc", "sys"]


def test_guest_that_hangs_is_stopped() -> None:
    with pytest.raises(guest.GuestError, match=r"stopped after 0\.1 s"):
        guest.boot(["sleep", "60"], 0.1, lambda _: None)


def test_guest_that_prints_nothing_more_is_hung() -> None:
    said: list[str] = []
    with pytest.raises(guest.GuestHungError, match=r"printed nothing for 0\.2 s"):
        guest.boot(["sh", "-c", "echo up; exec sleep 60"], 60, said.append, 0.2)
    assert said == ["up\n"]


def test_qemu_that_fails_is_told_with_its_words() -> None:
    said: list[str] = []
    with pytest.raises(guest.GuestError, match="qemu ended with 3"):
        guest.boot(["sh", "-c", "echo no such machine >&2; exit 3"], 20, said.append)
    assert said == ["no such machine\n"]


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_guest_that_left_no_status_went_down(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "status").write_text(content)
    with pytest.raises(guest.GuestError, match="went down"):
        guest.exit_status(tmp_path)


def test_report_tells_passed_failed_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    found = report.read(path)
    assert found.passed == ("test_bpf::test_fine",)
    assert found.failed == (("test_bpf::test_wrong", "E 1 == 2"), ("test_bpf::test_broken", "no daemon"))
    assert found.skipped == (("test_bpf::test_left_out", "there"),)
    assert str(found) == "1 passed, 2 failed, 1 skipped"


@pytest.mark.parametrize(
    ("outcome", "is_fine"),
    [
        (Outcome("6.1", Path("log"), report=Report(passed=("a",))), True),
        (Outcome("6.1", Path("log"), report=Report(passed=("a",), failed=(("b", "why"),))), False),
        (Outcome("6.1", Path("log"), report=Report(skipped=(("a", "why"),))), False),
        (Outcome("6.1", Path("log"), report=Report(passed=("a",)), problem="stopped"), False),
        (Outcome("6.1", Path("log"), problem="no package", is_skipped=True), True),
        (Outcome("6.1", Path("log"), problem="no package"), False),
    ],
)
def test_only_tests_that_ran_and_passed_are_fine(outcome: Outcome, is_fine: bool) -> None:
    assert outcome.is_fine is is_fine


MACHINE = Machine(
    "x86-64",
    Kernel("6.1", "linux-image-6.1.0-56-amd64", Path("vmlinuz"), ()),
    ("qemu",),
    "ttyS0",
    Path("/"),
    Path("busybox"),
    "python",
)


def test_section_shows_failures_and_how_the_console_ended(tmp_path: Path) -> None:
    log = tmp_path / "6.1.log"
    log.write_text("booting\nKernel panic - not syncing\n")
    outcome = Outcome("6.1", log, 12, MACHINE, report=report.Report(failed=(("b", "E why"),)))
    assert section(outcome).splitlines() == [
        "vm: Linux 6.1 (linux-image-6.1.0-56-amd64): 1 failed in 12 s",
        "____ b on Linux 6.1 ____",
        "E why",
    ]
    down = Outcome("6.1", log, 12, MACHINE, problem="went down")
    assert section(down).splitlines()[-1] == "Kernel panic - not syncing"


def test_table_has_a_column_for_each_kernel_and_a_line_for_each_refusal() -> None:
    old = Column("6.1.0", "x86-64", (Check("tracefs", True, "at"), Check("bpf programs", False, "refused")), "2 passed")
    new = Column("6.12", "x86-64", (Check("tracefs", True, "at"), Check("bpf programs", True, "taken")), "3 passed")
    document = table.document([old, new]).splitlines()
    assert "|  | 6.1.0, x86-64 | 6.12, x86-64 |" in document
    assert "| bpf programs | **no** | yes |" in document
    assert "| engine that `auto` takes | ftrace | bpf |" in document
    assert "- 6.1.0, x86-64, bpf programs: refused" in document


def test_what_doctor_says_of_the_server_is_left_out() -> None:
    lines = [
        '{"name": "server", "available": false, "required": false, "detail": "nobody", "remedy": "start it"}',
        '{"name": "tracefs", "available": true, "required": true, "detail": "at /sys", "remedy": ""}',
    ]
    assert table.checks("\n".join(lines)) == (Check("tracefs", True, "at /sys"),)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ([], (["12", "13"], False, [])),
        (["13"], (["13"], False, [])),
        (["--table", "13", "12"], (["13", "12"], True, [])),
        (["-k", "12"], (["12", "13"], False, ["-k", "12"])),
        (["13", "-k", "by_pid", "--table"], (["13"], False, ["-k", "by_pid", "--table"])),
    ],
)
def test_systems_come_first_and_pytest_gets_the_rest(
    arguments: list[str], parsed: tuple[list[str], bool, list[str]]
) -> None:
    assert installed.parsed(arguments) == parsed


def test_section_of_a_system_shows_failures_and_how_the_output_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\nKernel panic\n")
    system = images.SYSTEMS["13"]
    fine = installed.Outcome(system, log, 12, report=Report(passed=("a",)))
    assert installed.section(fine) == "installed: Debian 13: 1 passed in 12 s"
    failed = installed.Outcome(system, log, 12, report=Report(failed=(("b", "E why"),)), problem="went down")
    assert not failed.is_fine
    assert installed.section(failed).splitlines() == [
        "installed: Debian 13: 1 failed in 12 s",
        "____ b on Debian 13 ____",
        "E why",
        "installed: Debian 13: went down",
        "its output ended so:",
        "one",
        "Kernel panic",
    ]


def test_no_test_is_no_success(tmp_path: Path) -> None:
    assert not installed.Outcome(images.SYSTEMS["12"], tmp_path / "log").is_fine


def test_table_of_systems_has_a_row_for_each_test() -> None:
    columns = [
        table.InstalledColumn("Debian 12", {"Linux": "6.1"}, {"test_own::test_by_pid": table.MISSING}),
        table.InstalledColumn("Debian 13", {"Linux": "6.12"}, {"test_own::test_by_pid": "yes"}),
    ]
    assert table.installed(columns).splitlines()[-4:] == [
        "|  | Debian 12 | Debian 13 |",
        "| --- | --- | --- |",
        "| Linux | 6.1 | 6.12 |",
        "| own: by pid | **no** | yes |",
    ]


def test_a_cached_folder_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "CACHE", tmp_path)

    def make(folder: Path) -> None:
        (folder / "disk").write_text("complete")

    def fail(folder: Path) -> None:
        (folder / "disk").write_text("half")
        raise images.ImageError("no archive")

    first = images._kept("disk", "1", make)
    assert images._kept("disk", "1", fail) == first
    with pytest.raises(images.ImageError):
        images._kept("disk", "2", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["disk.lock"]
    assert (images._kept("disk", "2", make) / "disk").read_text() == "complete"


def test_a_step_that_fails_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "ROOT", tmp_path)
    monkeypatch.setattr(images, "LOGS", tmp_path / "logs")
    with pytest.raises(images.ImageError, match=r"^making it failed: no room \(more in logs/making-it.log\)$"):
        images._run("making it", {}, "sh", "-c", "echo first; echo no room >&2; exit 1")
    assert (tmp_path / "logs" / "making-it.log").read_text() == "first\nno room\n"
    with pytest.raises(images.ImageError, match=r"^making it failed: .*stapsdtd-no-such-program: No such file"):
        images._run("making it", {}, "stapsdtd-no-such-program")


def test_each_table_is_written_without_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    document = tmp_path / "docs" / "kernels.md"
    document.parent.mkdir()
    document.write_text("# Kernels\n\nold\n")
    systems = table.installed([table.InstalledColumn("Debian 12", {"Linux": "6.1"}, {})])
    table.write(installed=systems)
    assert document.read_text() == f"# Kernels\n\nold\n\n{systems}"
    table.write(kernels="# Kernels\n\nnew\n")
    assert document.read_text() == f"# Kernels\n\nnew\n\n{systems}"
