"""Provider and Probe: what a program holds in its hands."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from stapsdtd.provider import architecture, library
from stapsdtd.provider.argtypes import MAX_ARGUMENTS, STRING, ArgType, Declaration, argtype, check_name
from stapsdtd.provider.image import build_image

MAX_PROVIDER_NAME = 249 - len("libstapsdt:")
"""Bytes: what memfd_create leaves of its 249."""

_TEXT = (str, bytes)


class Probe:
    """One probe of a Provider, made by its probe(). Every thread may use it, at any time, loaded or not."""

    __slots__ = ("_limits", "declaration", "site")

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.site = library.UNLOADED
        """Where it is in memory; its Provider sets it."""
        self._limits = tuple((_TEXT if type_ is STRING else int, type_.low, type_.high) for type_ in declaration.types)

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def types(self) -> tuple[ArgType, ...]:
        return self.declaration.types

    @property
    def enabled(self) -> bool:
        """Whether somebody traces this probe in this process; costs one memory read."""
        return self.site.semaphore.value != 0

    def fire(self, *arguments: int | str | bytes) -> None:
        """Show these arguments to whoever traces the probe; without effect while nobody does.

        A string is shown as UTF-8, surrogate escapes as the bytes they stand for; readers see it end at its
        first NUL, as in C.

        The arguments are checked whether or not somebody traces, so that a mistake meets the first test and
        not the first tracer. Raises TypeError for a wrong number or type of arguments, OverflowError for an
        integer that its type cannot hold.
        """
        if len(arguments) != len(self._limits):
            raise TypeError(f"{self.name} takes {len(self._limits)} arguments, not {len(arguments)}")
        # Spelled out here since this loop is most of what a probe costs that nobody traces.
        for argument, (accepted, low, high) in zip(arguments, self._limits):  # noqa: B905
            if not isinstance(argument, accepted):
                raise TypeError(f"{self!r} cannot take {argument!r}")
            if isinstance(argument, int) and not low <= argument <= high:
                raise OverflowError(f"{self!r} cannot hold {argument}")
        # One reference for the whole call: it keeps the stub mapped when another thread unloads meanwhile.
        site = self.site
        if site.semaphore.value:
            site.stub(*map(_register, arguments))

    __call__ = fire

    def __repr__(self) -> str:
        types = ", ".join(type_.label for type_ in self.types)
        return f"<Probe {self.name}({types})>"


class Provider:
    """A named set of probes that are loaded together, as one shared library in a memfd.

    load, reload and unload are for one thread at a time; the probes themselves are for all. After a fork the
    child has the library too: the probes work there as in the parent, and unloading concerns only the process
    that does it.
    """

    def __init__(self, name: str) -> None:
        """Raises ValueError for a name that is no ASCII identifier or is longer than MAX_PROVIDER_NAME."""
        check_name(name)
        if len(name) > MAX_PROVIDER_NAME:
            raise ValueError(f"a provider's name has at most {MAX_PROVIDER_NAME} characters, not {len(name)}")
        self._name = name
        self._probes: dict[str, Probe] = {}
        self._loaded = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def probes(self) -> tuple[Probe, ...]:
        """All declared, in the order of declaration."""
        return tuple(self._probes.values())

    @property
    def loaded(self) -> bool:
        return self._loaded

    def probe(self, name: str, *types: ArgType | type[int | str]) -> Probe:
        """Declare a probe; it can be enabled from the next load or reload on.

        types: of its arguments, MAX_ARGUMENTS at most; `int` stands for INT64 and `str` for STRING.

        Raises ValueError for a name that is no ASCII identifier or was declared before, and for too many
        arguments; TypeError for a type that is none of these.
        """
        check_name(name)
        if name in self._probes:
            raise ValueError(f"{self._name} has a probe {name} already")
        if len(types) > MAX_ARGUMENTS:
            raise ValueError(f"{name}: a probe has at most {MAX_ARGUMENTS} arguments, not {len(types)}")
        probe = Probe(Declaration(name, tuple(map(argtype, types))))
        self._probes[name] = probe
        return probe

    def load(self) -> None:
        """Make the declared probes visible to tools.

        Raises RuntimeError when it is loaded already, ValueError when no probe is declared, OSError when the
        kernel refuses, NotImplementedError where no probe can be made (another processor or system).
        """
        if self._loaded:
            raise RuntimeError(f"provider {self._name} is loaded; reload() takes in what was declared since")
        self.reload()

    def reload(self) -> None:
        """Put a new library with all probes declared by now in place of the loaded one, if there is one.

        Tools see the old library go and a new one come, and have to arm it anew; stapsdtd does. Raises as load
        does, and then leaves everything as it was.
        """
        probes = self.probes
        declarations = [probe.declaration for probe in probes]
        image = build_image(self._name, declarations, architecture.of_this_process())
        sites = library.load(self._name, image, [len(probe.types) for probe in probes])
        for probe, site in zip(probes, sites, strict=True):
            probe.site = site
        self._loaded = True

    def unload(self) -> None:
        """Take the library away: the probes are disabled and firing them does nothing. May be repeated."""
        for probe in self.probes:
            probe.site = library.UNLOADED
        self._loaded = False

    def __enter__(self) -> Self:
        self.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unload()

    def __repr__(self) -> str:
        return f"<Provider {self._name}, {len(self._probes)} probes, {'' if self._loaded else 'not '}loaded>"


def _register(argument: int | str | bytes) -> int | bytes:
    """What the stub gets; cannot fail, since only a traced program comes here."""
    if not isinstance(argument, str):
        return argument
    try:
        return argument.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return argument.encode(errors="backslashreplace")
