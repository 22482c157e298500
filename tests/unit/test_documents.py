"""README.md and docs/: every example is run by a test or says why not, and what they name exists.

Here are the tests that need no kernel; `console` and `python` blocks are run by tests/kernel/test_documents.py.
"""

from __future__ import annotations

import inspect
import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from sybil.document import PythonDocStringDocument
from sybil.parsers.rest import DocTestParser

import stapsdtd.catalog.selectors
import stapsdtd.config.file
import stapsdtd.query.parse
from stapsdtd.catalog.selectors import parse as parse_selector
from stapsdtd.cli.known_signatures import Known
from stapsdtd.cli.named_filter import by_position
from stapsdtd.cli.pairs import Pair
from stapsdtd.cli.signature_captures import meant, with_captures
from stapsdtd.cli.stapsdt import cli
from stapsdtd.config.file import load
from stapsdtd.kernel.cgroups import CgroupInfo
from stapsdtd.query.parse import parse as parse_predicate
from stapsdtd.signatures.catalog import Catalog
from tests.examples import DOCUMENTS, MODULES, Example, agrees, in_documents, in_markdown
from tests.support import ROOT

RUN = {
    "c": "tests/kernel/test_first_hits.py",
    "console": "tests/kernel/test_documents.py",
    "d": "tests/kernel/test_documents.py",
    "python": "tests/kernel/test_documents.py",
    "promql": "here",
    "sh": "here",
    "toml": "here",
}


def test_every_block_is_run_or_says_why_not() -> None:
    forgotten = [str(each) for each in in_documents() if each.language not in RUN and not each.skipped]
    assert not forgotten, "no test runs these; tests/examples.py says how to mark them"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_is_fenced(path: Path) -> None:
    """Indented ones would be examples that no test sees."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?: {4}|\t).*", prose, re.MULTILINE)


@pytest.mark.parametrize("example", in_documents("toml"), ids=str)
def test_configuration_is_valid(example: Example, tmp_path: Path) -> None:
    path = tmp_path / "stapsdtd.toml"
    path.write_text(example.source)
    load(str(path))


@pytest.mark.parametrize("example", in_documents("sh"), ids=str)
def test_commands_are_accepted(example: Example) -> None:
    """These select what not every host has, such as a container, so they are parsed; tests/kernel runs the README's."""
    commands = example.source.replace("\\\n", " ").splitlines()
    assert commands
    for command in commands:
        accept(command)


def test_the_cookbook_names_probes_that_there_are() -> None:
    """Also where an example is not run: a probe that nobody has is waited for, and never fires."""
    known = Catalog()
    text = "".join(each.source for each in in_documents() if each.path.name == "cookbook.md")
    short = re.findall(r"stapsdt (?:count|stats|hist|latency|spans|trace) ((?:\w+:\w+ ?)+)", text)
    named = {(*probe.split(":", 1),) for probes in short for probe in probes.split()}
    in_d = re.findall(r"\b([a-z_]+)(?:\*|\$target)?:::([\w-]+\w\b(?!-?\*))", text)
    named |= {(provider, name.replace("-", "__")) for provider, name in in_d}
    assert {provider for provider, _ in named} == {"postgresql", "python", "hotspot", "hs_private", "libstdcxx"}
    assert not [f"{provider}:{name}" for provider, name in named if not known.of(provider, name)]


def test_programs_in_d_are_run_by_a_command() -> None:
    commands = {command for each in in_documents("console") for command, _ in each.commands}
    scripts = in_documents("d")
    assert scripts
    forgotten = [str(each) for each in scripts if not any(f"s {each.file_name} " in f"{text} " for text in commands)]
    assert not forgotten


def test_commands_in_the_help_are_accepted() -> None:
    context = click.Context(cli, info_name="stapsdt")
    commands = [cli, *filter(None, (cli.get_command(context, name) for name in cli.list_commands(context)))]
    lines = [line.strip() for command in commands for line in (command.epilog or "").splitlines()]
    shown = [line for line in lines if line.startswith("stapsdt ")]
    assert len(shown) > len(commands)
    for command in shown:
        accept(command)


def pair_of(options: Mapping[str, Any]) -> Pair | None:
    return Pair(options["start"], options["end"] or "") if "start" in options else None


def accept(command: str) -> None:
    """Raise an error unless a command line of stapsdt is valid, up to a pipe or a redirection."""
    program, *arguments = itertools.takewhile(lambda word: word not in {"|", ">"}, shlex.split(command, comments=True))
    assert program == "stapsdt"
    context = click.Context(cli, info_name=program)
    name, subcommand, rest = cli.resolve_command(context, click.Command.parse_args(cli, context, arguments))
    assert subcommand is not None
    options = subcommand.make_context(name, rest, parent=context).params
    ends = [pair.known_end(Known()).end] if (pair := pair_of(options)) else []
    selectors = options.get("selectors", ends)
    for selector in [*selectors, *([pair.start] if pair else [])]:
        parse_selector(with_captures(selector, (), Known()).text)
    if where := options.get("where"):
        chosen = [meant(selector, Known()) for selector in selectors]
        parse_predicate(by_position(where, [Known().of(*each[1]) if each else () for each in chosen]), _find_cgroup)


@pytest.mark.parametrize("example", in_documents("promql"), ids=str)
def test_queries_are_of_metrics_that_exist(example: Example) -> None:
    documented = set(re.findall(r"^\| `(stapsdtd_\w+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    named = set(re.findall(r"stapsdtd_\w+", example.source))
    assert named
    assert {name.removesuffix("_bucket") for name in named} <= documented


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_is_named_exists(path: Path) -> None:
    text = path.read_text()
    headings = {
        target: {_anchor(heading) for heading in re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)}
        for target in DOCUMENTS
    }
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in headings[target], link
    for file in re.findall(r"`((?:bpf|deploy|docs|proto|stapsdtd|systemd|tests)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), file
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+|Test\w+)`", text):
        assert re.search(rf"^ *(?:def|class) {name}\b", tests, re.MULTILINE), name
    commands = re.findall(r"^(\w+)(?: \|.*)?\)$", (ROOT / "dev").read_text(), re.MULTILINE)
    for command in re.findall(r"\./dev (\w+)", text):
        assert command in commands


def _find_cgroup(path: str) -> CgroupInfo:
    return CgroupInfo(1, path.count("/"))


def _anchor(heading: str) -> str:
    """Return the anchor that a heading gets, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_docstring_of_the_configuration(tmp_path: Path) -> None:
    test_configuration_is_valid(_first_block(stapsdtd.config.file), tmp_path)


def test_docstring_of_selectors() -> None:
    for line in _first_block(stapsdtd.catalog.selectors).source.splitlines():
        parse_selector(line.split("  ")[0])


def test_docstring_of_predicates() -> None:
    for line in _first_block(stapsdtd.query.parse).source.splitlines():
        parse_predicate(line.split("    ")[0], _find_cgroup)


def _first_block(module: object) -> Example:
    _, block, *_ = (inspect.getdoc(module) or "").split("\n\n")
    return Example(ROOT, 1, "", inspect.cleandoc(block))


@pytest.mark.parametrize("path", [path for path in MODULES if ">>> " in path.read_text()], ids=lambda path: path.name)
def test_doctests(path: Path) -> None:
    document = PythonDocStringDocument.parse(str(path), DocTestParser())
    examples = list(document.examples())
    assert examples
    for example in examples:
        example.evaluate()


def test_design_names_what_exists() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    source = "".join(path.read_text() for path in MODULES)
    classes = set(re.findall(r"`([A-Z][a-z]\w+)(?:\.\w+)?`", design))
    assert classes
    assert not [name for name in classes if not re.search(rf"^class {name}\b", source, re.MULTILINE)]
    files = set(re.findall(r"`([\w/.]+\.(?:py|c|h))`", design))
    assert files
    paths = (*MODULES, *(ROOT / "bpf").iterdir(), *(ROOT / "systemd").iterdir())
    assert not [name for name in files if not any(path.match(name) for path in paths)]


class TestNotation:
    @pytest.mark.parametrize(
        ("expected", "output"),
        [
            ("4711  postgres", "99999 postgres"),
            ("12:03:07.123456  a", "1:2:3.4  a"),
            ("at 0x7f10", "at 0x7fffb4c3d2e0"),
            ("one\n…\nfour", "one\ntwo\nthree\nfour"),
            ("one\n…\ntwo", "one\ntwo"),
            ("mapped by …", "mapped by postgres (4711)"),
            ("p50 163 us  max 1.5 ms", "p50 1.07 ms max 987 ns"),
            ("elapsed=2.1s", "elapsed=63.412us"),
            ("39 events, 0 lost", "40 events, 0 lost\n"),
        ],
    )
    def test_agrees(self, expected: str, output: str) -> None:
        assert agrees(expected, output)

    @pytest.mark.parametrize(
        ("expected", "output"),
        [
            ("int32", "int64"),
            ("0 lost", "1 lost"),
            ('"lost": 0', '"lost": 7'),
            ("one\ntwo", "one\nthree\ntwo"),
            ("one", ""),
            ("a.c", "abc"),
            ("4711", "x"),
            ("163 us", "163 ns of"),
            ("163 us", "163"),
        ],
    )
    def test_disagrees(self, expected: str, output: str) -> None:
        assert not agrees(expected, output)

    def test_blocks_with_their_reasons(self) -> None:
        text = (
            '<!-- skip: next "it is a diagram" -->\n```text\na\n```\n\n'
            "```console\n$ b\nc\n$ d -n '\n  e'\nf\n$ g\n```\n"
        )
        diagram, console = in_markdown(text, ROOT / "x.md")
        assert (diagram.language, diagram.skipped, diagram.line) == ("text", "it is a diagram", 2)
        assert (console.skipped, console.commands) == ("", [("b", "c\n"), ("d -n '\n  e'", "f\n"), ("g", "")])

    def test_block_with_an_unusual_heading_is_seen(self) -> None:
        (example,) = in_markdown("```sh session\na\n```\n", ROOT / "x.md")
        assert example.language == "sh session"


def test_the_threads_are_those_that_there_are() -> None:
    line = re.compile(r'^.*(?:Thread|\bname\b).*"(stapsdtd-[a-z0-9]+)"', re.MULTILINE)
    sources = [path.read_text() for path in sorted((ROOT / "stapsdtd").rglob("*.py"))]
    started = {name for source in sources for name in line.findall(source)}
    _, _, section = (ROOT / "docs" / "design.md").read_text().partition("## Threads")
    named = set(re.findall(r"`(stapsdtd-[a-z0-9]+)`", section.partition("**Shares.**")[0]))
    assert named == started
