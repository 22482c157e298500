"""`stapsdt completion`: prints the script with which a shell completes commands, options and selectors.

Programs name probes, so each word is quoted for the shell: zsh and fish do so themselves, for Bash it is done here.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from stapsdtd.cli.stapsdt import COMPLETION_VARIABLE

_BASH_SCRIPT = """\
%(complete_func)s() {
    local IFS=$'\\n' -
    # names may have asterisks
    set -f
    COMPREPLY=($(env COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_WORD="$2" \\
        %(complete_var)s=bash_complete "$1"))
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


_SPECIAL = re.compile(r"([^\w@%+=:,./-])", re.ASCII)
_SPECIAL_IN_QUOTES = re.compile(r'(["$`\\])')
_QUOTE = re.compile(r"""'[^']*+'|"(?:[^"\\]|\\.)*+"|\\.|[^'"\\]""", re.DOTALL)


class _Bash(BashComplete):
    """Completes selectors. click's own class splits words as Bash does, at colons too."""

    source_template: ClassVar[str] = _BASH_SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        before_cursor = os.fsencode(os.environ["COMP_LINE"])[: int(os.environ["COMP_POINT"])]
        line = os.fsdecode(before_cursor)
        words = split_arg_string(line)
        self._quote = _open_quote(line)
        incomplete = words.pop() if words and (self._quote or not line[-1].isspace()) else ""
        return words[1:], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        items = super().get_completions(args, incomplete)
        # within double quotes, nothing keeps Bash from replacing ! by an earlier command
        return [item for item in items if self._quote != '"' or "!" not in item.value]

    def format_completion(self, item: CompletionItem[str]) -> str:
        # Bash replaces COMP_WORD with this: the part of the word after the last colon.
        _, incomplete = self.get_completion_args()
        word = "".join(split_arg_string(os.environ["COMP_WORD"])[-1:])
        rest = item.value.removeprefix(incomplete.removesuffix(word))
        if self._quote == "'":
            return rest.replace("'", r"'\''")
        return (_SPECIAL_IN_QUOTES if self._quote else _SPECIAL).sub(r"\\\1", rest)


def _open_quote(line: str) -> str:
    """Return the quote that is open at the end of a line; empty if none is."""
    end = 0
    while match := _QUOTE.match(line, end):
        end = match.end()
    return line[end : end + 1].replace("\\", "")


class _Fish(FishComplete):
    """Completes words with commas. click's own script cuts them there."""

    source_template: ClassVar[str] = FishComplete.source_template.replace("string split ", "string split --max 1 ")


_COMPLETERS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": ZshComplete, "fish": _Fish}
add_completion_class(_Bash)
add_completion_class(_Fish)


_EXAMPLES = """\b
Examples:
  eval "$(stapsdt completion bash)"        in ~/.bashrc
  eval "$(stapsdt completion zsh)"         in ~/.zshrc
  stapsdt completion fish > ~/.config/fish/completions/stapsdt.fish
"""


@click.command("completion", epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(list(_COMPLETERS)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script with which SHELL completes commands, options and selectors."""
    completer = _COMPLETERS[shell]
    print(completer(ctx.find_root().command, {}, "stapsdt", COMPLETION_VARIABLE).source())
