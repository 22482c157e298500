"""Finds the signature of a probe: among the host's own files first, then among those of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stapsdtd.globs import matches
from stapsdtd.signatures.files import OWN_FILES, SignatureFileError, read_file, read_shipped, shipped_providers
from stapsdtd.signatures.model import NoteArgument, Signature, contradiction


class NotedSite(Protocol):
    """A site with its arguments, as its note declares them."""

    @property
    def arguments(self) -> Sequence[NoteArgument]: ...


@dataclass(frozen=True, slots=True)
class Fit:
    """The signature that fits an object's notes. Where none of those known does, why, and signature is None."""

    signature: Signature | None
    contradiction: str = ""


class Catalog:
    """Reads files when they are first needed. warn: called with what is wrong with one of own; it is skipped."""

    def __init__(self, own: Path = OWN_FILES, warn: Callable[[SignatureFileError], object] | None = None) -> None:
        self._own_folder = own
        self._warn = warn or (lambda _: None)
        self._own: tuple[Signature, ...] | None = None
        self._shipped: dict[str, tuple[Signature, ...]] = {}

    def of(self, provider: str, name: str) -> tuple[Signature, ...]:
        """Return the signatures that a probe may have, as versions differ; the first that fits its note is its own."""
        for known in (self._own_of(provider), self._shipped_of(provider)):
            if found := tuple(each for each in known if each.name == name):
                return found
            if found := tuple(each for each in known if matches(name, each.name)):
                return found
        return ()

    def providers(self) -> frozenset[str]:
        """Return the providers of which something is known."""
        return shipped_providers() | {each.provider for each in self._own_all()}

    def entries(self, provider: str) -> list[tuple[str, str]]:
        """Return the probes of a provider that have entries of their own, as provider and name."""
        known = (*self._own_of(provider), *self._shipped_of(provider))
        return list(dict.fromkeys((provider, each.name) for each in known if each.name.isidentifier()))

    def frequent(self, provider: str) -> list[str]:
        """Return a provider's probes that fire at each line, call or object of a program."""
        known = (*self._own_of(provider), *self._shipped_of(provider))
        return list(dict.fromkeys(each.name for each in known if each.frequent and each.name.isidentifier()))

    def fit(self, provider: str, name: str, sites: Iterable[NotedSite], architecture: str) -> Fit:
        """Find the signature that none of a probe's sites in an object contradicts."""
        known, reason = self.of(provider, name), ""
        notes = [site.arguments for site in sites]
        for signature in known:
            reasons = [found for note in notes if (found := contradiction(signature, note, architecture))]
            if not reasons:
                return Fit(signature)
            reason = reason or reasons[0]
        return Fit(None, reason)

    def _own_of(self, provider: str) -> tuple[Signature, ...]:
        return tuple(each for each in self._own_all() if each.provider == provider)

    def _own_all(self) -> tuple[Signature, ...]:
        if self._own is None:
            self._own = tuple(self._read_own())
        return self._own

    def _read_own(self) -> Iterable[Signature]:
        try:
            paths = sorted(path for path in self._own_folder.iterdir() if path.suffix == ".toml")
        except OSError:
            return
        for path in paths:
            try:
                yield from read_file(path)
            except SignatureFileError as error:
                self._warn(error)

    def _shipped_of(self, provider: str) -> tuple[Signature, ...]:
        if provider not in self._shipped:
            self._shipped[provider] = read_shipped(provider) if provider in shipped_providers() else ()
        return self._shipped[provider]
