"""Completion of selectors, pids, containers and users as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from stapsdtd.catalog.selector_text import parts_of
from tests.api.commands import PROGRAM
from tests.api.fake_server import PATIENCE_SECONDS, probe, serving
from tests.support import ROOT

PATIENT = (
    *PROGRAM[:2],
    f"from stapsdtd.cli import options; options._TIMEOUT_SECONDS = {PATIENCE_SECONDS}; {PROGRAM[2]}",
)
"""Who presses Tab does not wait for long, but a server that answers may be slow here."""


def complete(target: str, line: str, word: str, program: Sequence[str] = PATIENT) -> list[str]:
    asked = {"_STAPSDT_COMPLETE": "bash_complete", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_WORD": word}
    return [word for shown in answer(target, asked, program) for word in shown.split()]


def answer(target: str, asked: dict[str, str], program: Sequence[str]) -> list[str]:
    """Return the lines in which a shell gets its answer."""
    done = subprocess.run(
        program,
        env=os.environ | asked | {"STAPSDT_SERVER": target},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("stapsdt tr", "tr", ["trace"]),
        ("stapsdt trace --js", "--js", ["--json"]),
        ("stapsdt trace post", "post", ["postgresql:query__done", "postgresql:query__start"]),
        ("stapsdt trace postgresql:", "", ["query__done", "query__start"]),
        ("stapsdt trace postgresql:query__s", "query__s", ["query__start"]),
        ("stapsdt trace 'postgresql:query__s", "'postgresql:query__s", ["postgresql:query__start"]),
        ("stapsdt trace x:y post", "post", ["postgresql:query__done", "postgresql:query__start"]),
        ("stapsdt trace ruby", "ruby", []),
    ],
)
def test_completion(line: str, word: str, found: list[str]) -> None:
    with serving() as server:
        server.listing.probes.add().CopyFrom(probe(name="query__done"))
        assert complete(server.target, line, word) == found


QUOTED = r"\"a\(b\)\ \!\$\(x\)\'\""
IN_QUOTES = r"""paren:"a(b) !$(x)'\''" """.strip()


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("stapsdt trace pa", "pa", f"paren:{QUOTED}"),
        ("stapsdt trace paren:", "", QUOTED),
        (r"stapsdt trace paren:\"a", r"\"a", QUOTED),
        ("stapsdt trace 'pa", "pa", IN_QUOTES),
        ("stapsdt trace 'paren:\"a(b) ", "'paren:\"a(b) ", IN_QUOTES),
    ],
)
def test_names_are_quoted_for_the_shell(line: str, word: str, found: str) -> None:
    asked = {"_STAPSDT_COMPLETE": "bash_complete", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_WORD": word}
    with serving() as server:
        server.listing.probes.add().CopyFrom(probe("paren", "a(b) !$(x)'"))
        assert answer(server.target, asked, PATIENT) == [found]
        # within double quotes, Bash would replace the exclamation mark
        line = 'stapsdt trace "pa'
        asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_WORD": '"pa'}
        assert answer(server.target, asked, PATIENT) == [""]
        server.listing.probes.add().CopyFrom(probe("pa", "$(x)"))
        assert answer(server.target, asked, PATIENT) == [r"pa:\"\$(x)\""]


def test_bash_takes_words_as_they_are(tmp_path: Path) -> None:
    """Nothing of a name is executed, nor replaced by names of files."""
    (tmp_path / "paren:a").touch()
    names = {"a*", "$(touch evil)", "`touch evil`", "a b", "x;touch evil", "~", "a\\"}
    script = """
        eval "$SCRIPT"
        COMP_LINE='stapsdt trace paren:' COMP_POINT=20
        _stapsdt_completion "$PROGRAM" '' trace
        for word in "${COMPREPLY[@]}"; do eval "printf '%s\\n' $word"; done
    """
    with serving() as server:
        for name in names:
            server.listing.probes.add().CopyFrom(probe("paren", name))
        program = tmp_path / "stapsdt"
        program.write_text(f"#!{PATIENT[0]}\n{PATIENT[2]}\n")
        program.chmod(0o755)
        environment = os.environ | {"STAPSDT_SERVER": server.target, "PYTHONPATH": str(ROOT), "PROGRAM": str(program)}
        made = subprocess.check_output([program, "completion", "bash"], env=environment, text=True)
        environment["SCRIPT"] = made
        told = subprocess.check_output(["bash", "-c", script], env=environment, cwd=tmp_path, text=True)
    assert {parts_of(word, "")[0][0].text for word in told.splitlines()} == names
    assert not (tmp_path / "evil").exists()


def test_completion_of_containers() -> None:
    with serving() as server:
        for container in ("web", "webshop", "database", ""):
            server.listing.processes.add(container_id=container)
        server.listing.processes.add(container_id="c0ff" * 16, container_name="webmail")
        assert complete(server.target, "stapsdt trace --container we", "we") == ["web", "webmail", "webshop"]
        assert complete(server.target, "stapsdt list --container ", "") == ["database", "web", "webmail", "webshop"]


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("stapsdt trace --pid 47", "47", ["47", "4711"]),
        ("stapsdt list -p ", "", ["12", "47", "4711"]),
        ("stapsdt top --exclude-pid 1", "1", ["12"]),
    ],
)
def test_completion_of_pids(line: str, word: str, found: list[str]) -> None:
    with serving() as server:
        for pid, comm in ((4711, "postgres"), (47, "$(evil)"), (12, "java")):
            server.listing.processes.add(pid=pid, comm=comm)
        assert complete(server.target, line, word) == found


def test_commands_of_pids_are_shown_where_no_shell_would_run_them() -> None:
    with serving() as server:
        server.listing.processes.add(pid=4711, comm="postgres")
        server.listing.processes.add(pid=47, comm="$(evil)")
        asked = {"_STAPSDT_COMPLETE": "fish_complete", "COMP_WORDS": "stapsdt trace --pid ", "COMP_CWORD": ""}
        shown = answer(server.target, asked, PATIENT)
        assert shown == ["plain,47", "plain,4711\tpostgres"]


def test_completion_of_users() -> None:
    assert "root" in complete("unix:/nowhere/sock", "stapsdt trace --uid roo", "roo", PROGRAM)


def test_without_a_server_there_is_nothing_to_complete() -> None:
    assert complete("unix:/nowhere/sock", "stapsdt trace post", "post", PROGRAM) == []


def test_a_server_that_does_not_answer_costs_little() -> None:
    with serving() as server, server.news:
        assert complete(server.target, "stapsdt trace post", "post", PROGRAM) == []


def test_what_is_known_of_probes_is_shown_beside_them() -> None:
    with serving() as server:
        server.listing.probes.add().CopyFrom(probe(name="of_nobody"))
        asked = {"_STAPSDT_COMPLETE": "fish_complete", "COMP_WORDS": "stapsdt trace post", "COMP_CWORD": "post"}
        assert answer(server.target, asked, PATIENT) == [
            "plain,postgresql:of_nobody",
            "plain,postgresql:query__start\tA backend begins to process a query.",
        ]
        asked |= {"_STAPSDT_COMPLETE": "zsh_complete", "COMP_CWORD": "2"}
        shown = answer(server.target, asked, PATIENT)
        # zsh takes what follows the first colon for the help
        assert shown[-2:] == ["postgresql\\:query__start", "A backend begins to process a query."]


def test_a_wrong_file_of_ones_own_does_not_disturb_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("provider = 1")
    with serving() as server:
        asked = {"_STAPSDT_COMPLETE": "fish_complete", "COMP_WORDS": "stapsdt trace post", "COMP_CWORD": "post"}
        own = {"STAPSDT_SIGNATURES": str(tmp_path)}
        assert len(answer(server.target, asked | own, PATIENT)) == 1
