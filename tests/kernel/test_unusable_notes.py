"""Notes that cannot be used: lists, traces and hints tell of them, and why."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from stapsdtd.client import Client, ClientError, SiteState, SubscribeOptions
from stapsdtd.model import MAX_PROBLEMS
from tests.support import Daemon, Ticker, compile_once, require, stapsdt

pytestmark = pytest.mark.kernel

APP = f"app{os.getpid()}"
"""The provider. Other tests run at the same time."""

SOURCE = """
#include <stdio.h>

#define NOTE(location, name, arguments) \\
    ".pushsection .note.stapsdt,\\"\\",\\"note\\"\\n" \\
    ".balign 4\\n" ".4byte 3f-2f, 5f-4f, 3\\n" "2: .asciz \\"stapsdt\\"\\n" "3: .balign 4\\n" \\
    "4: .8byte " location ", 0, 0\\n" ".asciz \\"APP\\", \\"" name "\\", \\"" arguments "\\"\\n" \\
    "5: .balign 4\\n" ".popsection\\n"

int main(void)
{
    char line[100];

    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        __asm__ volatile ("1: nop\\n"
                  NOTE("1b", "good", "-4@%%edi")
                  NOTE("1b", "good", "-4@%%esi")
                  NOTE("0x10000000", "nowhere", "")
                  NOTE("1f", "no_nop", "")
                  NOTE("1b", "", "")
                  "1: mov $7, %%esi\\n" :: "D"(5) : "rsi");
        puts("fired 0");
        fflush(stdout);
    }
    return 0;
}
"""
MANY = """
    .globl main
main:    ret
    .section .note.stapsdt,"","note"
    .rept COUNT
    .balign 4
    .4byte 8, 3f-2f, 3
    .asciz "stapsdt"
2:  .8byte 0x10000000, 0, 0
    .asciz "APP", "bad", ""
3:  .balign 4
    .endr
    .section .note.GNU-stack,"",@progbits
"""
CONFLICT = "another note has the same location with other arguments or another semaphore"
NO_NOP = "no nop at the location: bytes be 07 00 00 00"
NOWHERE = "the location 0x10000000 is in no load segment"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(platform.machine() == "x86_64", "an x86-64 machine")
    return tmp_path_factory.mktemp("unusable")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    (folder / "app.c").write_text(SOURCE.replace("APP", APP))
    return compile_once(folder / "app.c", folder / "app", ["gcc", "-O2"])


@pytest.fixture
def process(program: Path) -> Iterator[Ticker]:
    with Ticker(program) as process:
        yield process


def reasons(lines: str) -> list[str]:
    return [line.removeprefix("stapsdt: ") for line in lines.splitlines()]


@pytest.mark.usefixtures("process")
def test_list_tells_of_them(daemon: Daemon, program: Path) -> None:
    listed = stapsdt(daemon.target, "list", "--file", str(program))
    told = [
        f"cannot be used: {CONFLICT}: {APP}:good in {program}",
        f"cannot be used: {NOWHERE}: {APP}:nowhere in {program}",
        f"cannot be used: {NO_NOP[:24]}",
        "cannot be used: for 1 more reason",
    ]
    for line, expected in zip(reasons(listed.stderr), told, strict=True):
        assert line.startswith(expected)
    assert [line.split("\t")[0] for line in listed.stdout.splitlines()] == [f"{APP}:good"]
    records = [json.loads(line) for line in stapsdt(daemon.target, "list", f"{APP}:*", "--json").stdout.splitlines()]
    notes = [(each["name"], each["path"]) for each in records if "unusable" in each]
    assert notes == [(name, str(program)) for name in ("good", "nowhere", "no_nop", "")]
    # what a selector does not choose is not told
    assert stapsdt(daemon.target, "list", f"{APP}:good").stderr.count("cannot be used") == 2
    assert stapsdt(daemon.target, "list", "other:*", check=False).stderr.count("cannot be used") == 0


@pytest.mark.usefixtures("process")
def test_hint_tells_of_them(daemon: Daemon, program: Path) -> None:
    listed = stapsdt(daemon.target, "list", f"{APP}:nowhere", check=False)
    assert reasons(listed.stderr) == [
        f"{APP}:nowhere: {APP}:nowhere is there, but cannot be used: {NOWHERE}: a note in {program}"
    ]


@pytest.mark.usefixtures("process")
def test_trace_refuses_them(daemon: Daemon, program: Path) -> None:
    traced = stapsdt(daemon.target, "trace", f"{APP}:nowhere", check=False)
    assert traced.returncode == 1
    assert reasons(traced.stderr)[0].startswith("1 site refused")
    assert f"refused: {NOWHERE}: {APP}:nowhere in {program}" in traced.stderr
    assert "every site that matches was refused" in traced.stderr


@pytest.mark.usefixtures("process")
def test_trace_tells_of_them_beside_others(daemon: Daemon, program: Path) -> None:
    traced = stapsdt(daemon.target, "trace", f"{APP}:{program}::*", "--duration", "0.3")
    assert "1 site armed, 2 sites refused" in traced.stderr
    for told in (f"{NOWHERE}: {APP}:nowhere", "no nop at the location"):
        assert f"refused: {told}" in traced.stderr
    assert f"armed with a limit: {CONFLICT}: {APP}:good at {program}+0x" in traced.stderr
    summary = stapsdt(daemon.target, "trace", f"{APP}:{program}::*", "--duration", "0.3", "--json").stderr
    assert NOWHERE in summary


def test_a_duplicate_loses_no_hit_and_fails_nothing(daemon: Daemon, process: Ticker) -> None:
    with Client(daemon.target) as client:
        with client.subscribe(f"{APP}:good", SubscribeOptions(all_or_nothing=True)) as subscription:
            assert [(site.state, site.reason) for site in subscription.sites] == [(SiteState.ARMED, CONFLICT)]
            process.do("")
            account = subscription.unsubscribe()
            assert len(list(subscription.events())) == 1
        assert (account.fired, account.lost) == (1, 0)
        with pytest.raises(ClientError, match="1 of 1 sites are not armed"):
            client.subscribe(f"{APP}:nowhere", SubscribeOptions(all_or_nothing=True))


def test_of_thousands_some_are_told(daemon: Daemon, folder: Path) -> None:
    (folder / "many.S").write_text(MANY.replace("COUNT", "20000").replace("APP", APP))
    program = compile_once(folder / "many.S", folder / "many", ["gcc"])
    listed = stapsdt(daemon.target, "list", "--file", str(program), check=False)
    assert f"{20_000 - MAX_PROBLEMS} more notes" in listed.stderr
    assert f"cannot be used: {NOWHERE}: {APP}:bad in {program} and {MAX_PROBLEMS - 1} more" in listed.stderr
