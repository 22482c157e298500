"""Say which processes execute copies of text that has the probes that a command wants, so that these never fire there.

Programs do that once they have started, so commands look at the beginning, at the end, and ever more rarely in between.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from stapsdtd.cli.render import plural
from stapsdtd.client import ClientError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

    from stapsdtd.cli.following import Summary
    from stapsdtd.client import AsyncClient, MovedText
    from stapsdtd.subscribe_options import SubscribeOptions

_FIRST_SECONDS = 0.5
_MAX_SECONDS = 300.0
_GROWTH = 4
_SHOWN = 3


def moved_lines(moved: Iterable[MovedText]) -> list[str]:
    """Return a line for each process that has moved its text, and one for those beyond some."""
    lines = [
        f"no hits of {plural(each.sites, 'site')} in PID {each.pid} ({each.comm}): it runs its text of {each.path} "
        f"from {each.memory}, where uprobes cannot be placed; to trace it, start it without huge pages for text"
        for each in moved
    ]
    rest = len(lines) - _SHOWN
    return [*lines[:_SHOWN], f"the same holds elsewhere: {plural(rest, 'more case')}"] if rest > 0 else lines


def moved_record(each: MovedText) -> Mapping[str, object]:
    """Return the JSON object of a process that has moved its text."""
    return {"pid": each.pid, "comm": each.comm, "path": each.path, "memory": each.memory, "sites": each.sites}


class MovedTexts:
    """What was found of the processes in scope so far, each once."""

    def __init__(self, client: AsyncClient, selectors: Sequence[str], options: SubscribeOptions) -> None:
        self._client = client
        self._selectors = selectors
        self._options = options
        self._found: dict[tuple[int, str, str], MovedText] = {}

    async def look(self) -> list[MovedText]:
        """Return what is new. Nothing if the role may not list, or the server is gone, which is told otherwise."""
        new = []
        options = self._options
        with suppress(ClientError):
            for each in await self._client.moved_text(
                self._selectors,
                () if options.follow else options.pids,
                containers=options.containers,
                cgroups=options.cgroups,
                files=options.files,
            ):
                if _key(each) not in self._found and _is_in(each, options):
                    self._found[_key(each)] = each
                    new.append(each)
        return new

    @asynccontextmanager
    async def watched(
        self, tell: Callable[[Sequence[MovedText]], None], told: Iterable[MovedText]
    ) -> AsyncIterator[None]:
        """Look now and then. tell: is called with what is new. told: what was found before."""
        self._found |= {_key(each): each for each in told}
        looking = asyncio.create_task(self._look_often(tell))
        try:
            yield
        finally:
            looking.cancel()

    async def in_summary(self, summary: Summary) -> Summary:
        """Return a summary with what was found, after a last look if the server is there."""
        if summary.is_exact:
            await self.look()
        return replace(summary, moved=tuple(self._found.values()))

    async def _look_often(self, tell: Callable[[Sequence[MovedText]], None]) -> None:
        seconds = _FIRST_SECONDS
        while True:
            await asyncio.sleep(seconds)
            if new := await self.look():
                tell(new)
            seconds = min(seconds * _GROWTH, _MAX_SECONDS)


def _key(moved: MovedText) -> tuple[int, str, str]:
    return moved.pid, moved.path, moved.memory


def _is_in(moved: MovedText, options: SubscribeOptions) -> bool:
    """Report whether a process is in scope, as far as its owner and its main thread's name tell."""
    return (
        moved.pid not in options.exclude_pids
        and (not options.uids or moved.uid in options.uids)
        and (not options.execnames or moved.comm in options.execnames)
        and (not options.follow or _descends_from(moved.pid, options.pids))
    )


def _descends_from(pid: int, ancestors: Collection[int]) -> bool:
    """Report whether a process of this host is one of some, or was forked by them or by those that they forked."""
    while pid and pid not in ancestors:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b") ")[2].split()[1])
        except OSError:
            return False
    return pid in ancestors
