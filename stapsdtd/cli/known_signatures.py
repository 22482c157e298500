"""The signatures that commands use, and what they say where a file contradicts one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stapsdtd.cli.render import abbreviate, print_stderr
from stapsdtd.signatures import OWN_FILES, Catalog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stapsdtd.client import Probe, Site
    from stapsdtd.signatures import Fit

_FOLDER_VARIABLE = "STAPSDT_SIGNATURES"
_SHOWN = 3

no_signatures = click.option(
    "--no-signatures",
    is_flag=True,
    help="Do not use what is known of probes' arguments: no names, and all arguments as integers.",
)


class Known(Catalog):
    """The known signatures. What contradicts them in which file is remembered, and told once."""

    def __init__(self, own: Path = OWN_FILES) -> None:
        """What is wrong with own files is told on standard error."""
        super().__init__(own, warn=lambda error: print_stderr(f"{error}; the file is skipped"))
        self._contradictions: dict[tuple[str, str], str] = {}
        self._told: set[tuple[str, str]] = set()

    def fit_in(self, probe: tuple[str, str], found: Probe, sites: Iterable[Site] | None = None) -> Fit:
        """Find the signature that fits a probe's notes in a file. sites: some of its sites."""
        fit = self.fit(*probe, found.sites if sites is None else sites, found.architecture)
        if fit.contradiction:
            self._contradictions.setdefault((found.path, ":".join(probe)), fit.contradiction)
        return fit

    def tell_contradictions(self) -> None:
        """Say of each file which signatures are not used there, and why the first of them, unless that was said."""
        by_path: dict[str, list[str]] = {}
        for path, probe in self._contradictions.keys() - self._told:
            by_path.setdefault(path, []).append(probe)
        for path, probes in sorted(by_path.items()):
            first, *others = sorted(probes)
            whose = "their signatures are" if others else "its signature is"
            reason = self._contradictions[path, first]
            print_stderr(f"{abbreviate([first, *others], _SHOWN)} in {path}: {whose} not used: {reason}")
        self._told |= self._contradictions.keys()


def own_folder() -> Path:
    """Return where the host's or the user's own files are."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or OWN_FILES)


def catalog() -> Known:
    return Known(own_folder())
