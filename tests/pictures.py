"""`./dev pictures`: writes docs/pictures/*.svg, each a terminal on which a command was run against a real daemon.

    stapsdt ──► a terminal of its own ──► escape sequences ──► rich ──► SVG

Pids, times and addresses differ from one run to the next; the rest is what tests/kernel/test_documents.py holds a new
run against.
"""

from __future__ import annotations

import html
import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.stage import Stage, staged
from tests.support import ROOT, running_daemon

FOLDER = ROOT / "docs" / "pictures"

_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own template fetches a font from the web, which pages that show a picture do not allow."""
_BEGINNING = re.compile(r'x="([\d.]+)" (y="[\d.]+") textLength="([\d.]+)" clip-path="[^"]+">((?:&#160;)*)')
_SEGMENT = re.compile(r'<text class="\w+-r\d+" x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+">([^<]+)</text>')
_CHARACTER_WIDTH = 12.2


@dataclass(frozen=True, slots=True)
class Picture:
    command: str
    columns: int

    def take(self, stage: Stage) -> str:
        """Run the command, and return the terminal's text with escapes, from the prompt to the last line."""
        output = stage.run(self.command, columns=self.columns)
        return f"\x1b[1m$ {self.command}\x1b[0m\n{output}"


PICTURES = {
    "trace": Picture(
        "stapsdt trace 'shop:request(arg0:str, arg1)' 'hotspot:vm-init*' 'postgresql:query-start(arg0:str)' --count 18",
        132,
    ),
    "list": Picture("stapsdt list ':python3.11::'", 84),
    "top": Picture("stapsdt top 'postgresql:query-start' 'postgresql:transaction-commit' --interval 2 --count 1", 96),
}


def svg(name: str, text: str, columns: int) -> str:
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text), end="")
    return _BEGINNING.sub(_move, console.export_svg(title="", code_format=_SVG, unique_id=name))


def _move(beginning: re.Match[str]) -> str:
    """Place a segment behind its blanks, which some viewers leave out, and do without clipping to its line."""
    x, y, length, blanks = beginning.groups()
    indent = blanks.count(";") * _CHARACTER_WIDTH
    return f'x="{float(x) + indent:g}" {y} textLength="{float(length) - indent:g}">'


def text_of(picture: str) -> str:
    """Return the text that an SVG of ours shows."""
    lines: dict[float, str] = {}
    for x, y, text in _SEGMENT.findall(picture):
        line = lines.setdefault(float(y), "")
        if text != "\n":
            column = round(float(x) / _CHARACTER_WIDTH)
            lines[float(y)] = line.ljust(column) + html.unescape(text).replace("\xa0", " ")
    return "\n".join(lines[y] for y in sorted(lines)) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="stapsdtd-pictures-") as folder,
        running_daemon(Path(folder)) as daemon,
        staged(daemon.target, Path(folder)) as stage,
    ):
        for name, picture in PICTURES.items():
            (FOLDER / f"{name}.svg").write_text(svg(name, picture.take(stage), picture.columns))
            print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
