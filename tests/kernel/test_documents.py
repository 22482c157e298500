"""The examples in README.md, docs/ and docstrings, on a real kernel: what they show is what is printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from tests.examples import Example, agrees, in_docstrings, in_documents
from tests.pictures import FOLDER, PICTURES, text_of
from tests.stage import Stage, staged
from tests.support import running_daemon

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

_ADDRESS = "unix:/run/stapsdtd/stapsdtd.sock"
"""The server in the documents, in place of the one that is tested."""
QUESTIONS = [
    command
    for example in in_documents("sh")
    if example.path.name == "README.md"
    for command in example.source.replace("\\\n", " ").splitlines()
]
_QUIET = ("stapsdt top", "lock__wait__start", "gc__begin")
"""Questions to which the answer may be that there was nothing."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("documents")
    for script in in_documents("d"):
        (folder / script.file_name).write_text(script.source)
    with running_daemon(folder) as daemon, staged(daemon.target, folder) as programs:
        yield programs


def plain(output: str) -> str:
    """Return the text without a terminal's escape sequences."""
    return Text.from_ansi(output).plain


@pytest.mark.parametrize("example", in_documents("console"), ids=str)
def test_command_prints_what_the_document_shows(stage: Stage, example: Example) -> None:
    assert example.commands
    for command, expected in example.commands:
        output = plain(stage.run(command)).replace(stage.target, _ADDRESS)
        assert agrees(expected, output), f"{command}\n{output}"


@pytest.mark.parametrize("command", QUESTIONS, ids=lambda command: command.partition("#")[2].strip())
def test_question_has_an_answer(stage: Stage, command: str, tmp_path: Path) -> None:
    """Those of the README end with Ctrl-C, or with the program."""
    program = tmp_path / "x.py"
    program.write_text("import json\n")
    is_endless = " -- " not in command
    output = plain(stage.run(command.replace("x.py", str(program)), interrupts=is_endless))
    *_, last = output.splitlines()
    found = re.fullmatch(r"stapsdt: (\d+) (?:events?|pairs?) (?:delivered|aggregated), .*", last)
    assert found, output
    assert int(found[1]) or any(quiet in command for quiet in _QUIET), output


@pytest.mark.parametrize("example", in_documents("python") + in_docstrings(), ids=str)
def test_program_prints_what_its_comments_say(stage: Stage, example: Example, tmp_path: Path) -> None:
    """It ends by itself, and some line that it prints is what stands behind `print(…)  #`."""
    program = tmp_path / "example.py"
    program.write_text(example.source.replace(_ADDRESS, stage.target))
    output = plain(stage.run(f"{sys.executable} -W error {program} && echo done", source=example.source))
    *lines, last = output.splitlines()
    assert last == "done", output
    for expected in re.findall(r"print\(.*\)  # (.+)", example.source):
        assert any(agrees(expected, line) for line in lines), f"{expected}\n{output}"


@pytest.mark.parametrize("name", PICTURES)
def test_picture_shows_what_is_printed(stage: Stage, name: str) -> None:
    """What differs is a picture to be taken anew: ./dev pictures."""
    picture = PICTURES[name]
    # of a program, other processes may run too
    expected = re.sub(r"mapped by .*", "mapped by …\n…", text_of((FOLDER / f"{name}.svg").read_text()))
    output = plain(picture.take(stage))
    assert agrees(expected, output), output
