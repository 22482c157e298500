"""`stapsdt completion`: prints the script with which a shell completes commands, options and selectors."""

from __future__ import annotations

import os
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
    local IFS=$'\\n'
    COMPREPLY=($(env COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_WORD="$2" \\
        %(complete_var)s=bash_complete "$1"))
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    """Completes selectors. click's own class splits words as Bash does, at colons too."""

    source_template: ClassVar[str] = _BASH_SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        before_cursor = os.fsencode(os.environ["COMP_LINE"])[: int(os.environ["COMP_POINT"])]
        line = os.fsdecode(before_cursor)
        words = split_arg_string(line)
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        # Bash replaces COMP_WORD with this: the part of the word after the last colon.
        _, incomplete = self.get_completion_args()
        word = os.environ["COMP_WORD"].lstrip("'\"")
        return item.value.removeprefix(incomplete.removesuffix(word))


_COMPLETERS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": ZshComplete, "fish": FishComplete}
add_completion_class(_Bash)


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
