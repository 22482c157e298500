"""Provider and Probe, the objects that a program uses."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from stapsdtd.provider import architecture, library
from stapsdtd.provider.argtypes import MAX_ARGUMENTS, STRING, ArgType, Declaration, argtype, check_name
from stapsdtd.provider.image import build_image
from stapsdtd.provider.waiting import wait_until_armed

MAX_PROVIDER_NAME = 249 - len("libstapsdt:")
"""In bytes: memfd_create allows names of 249."""

WAIT_SECONDS = 0.1
"""How long loading waits at most for tracers."""

_TEXT = (str, bytes)
_ProviderT = TypeVar("_ProviderT", bound="Provider")


class Probe:
    """A probe, created by Provider.probe(). Any thread may use it at any time, whether loaded or not."""

    __slots__ = ("_limits", "declaration", "site")

    def __init__(self, declaration: Declaration) -> None:
        self.declaration = declaration
        self.site = library.UNLOADED
        """Its location in memory, set by the Provider."""
        self._limits = tuple((_TEXT if type_ is STRING else int, type_.low, type_.high) for type_ in declaration.types)

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def types(self) -> tuple[ArgType, ...]:
        return self.declaration.types

    @property
    def enabled(self) -> bool:
        """Whether the probe is traced in this process. Costs one memory read."""
        return self.site.semaphore.value != 0

    def fire(self, *arguments: int | str | bytes) -> None:
        """Fire the probe with these arguments; does nothing if it is not traced.

        Strings are passed as UTF-8, with surrogate escapes as the bytes they stand for. Tracers see them end at the
        first NUL, as in C.

        Arguments are checked even if the probe is not traced, so that mistakes show up in tests and not under a tracer.
        Raises TypeError for a wrong number or type of arguments, and OverflowError for an integer that does not fit.
        """
        if len(arguments) != len(self._limits):
            raise TypeError(f"{self.name} takes {len(self._limits)} arguments, not {len(arguments)}")
        # Inlined, since this loop is most of the cost of an untraced probe.
        for argument, (accepted, low, high) in zip(arguments, self._limits):
            if not isinstance(argument, accepted):
                raise TypeError(f"{self!r} does not accept {argument!r}")
            if isinstance(argument, int) and not low <= argument <= high:
                raise OverflowError(f"{argument} does not fit into an argument of {self!r}")
        # A single reference for the whole call, which keeps the stub mapped if another thread unloads meanwhile.
        site = self.site
        if site.semaphore.value:
            site.stub(*map(_register, arguments))

    __call__ = fire

    def __repr__(self) -> str:
        types = ", ".join(type_.label for type_ in self.types)
        return f"<Probe {self.name}({types})>"


class Provider:
    """A named set of probes that are loaded together, as one shared library in a memfd.

    Only one thread at a time may call load, reload or unload; any thread may use the probes. After a fork, the probes
    work in the child as well, and unloading affects only the process that does it.
    """

    def __init__(self, name: str) -> None:
        """Raises ValueError if the name is not an ASCII identifier or is longer than MAX_PROVIDER_NAME."""
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
        """All probes, in order of declaration."""
        return tuple(self._probes.values())

    @property
    def loaded(self) -> bool:
        return self._loaded

    def probe(self, name: str, *types: ArgType | type[int | str]) -> Probe:
        """Declare a probe, which becomes visible to tools with the next load or reload.

        types: the types of its arguments, at most MAX_ARGUMENTS; `int` means INT64 and `str` means STRING.

        Raises ValueError if the name is not an ASCII identifier or is already declared, or if there are too many
        arguments, and TypeError for any other type.
        """
        check_name(name)
        if name in self._probes:
            raise ValueError(f"{self._name} already has a probe {name}")
        if len(types) > MAX_ARGUMENTS:
            raise ValueError(f"{name}: a probe has at most {MAX_ARGUMENTS} arguments, not {len(types)}")
        probe = Probe(Declaration(name, tuple(map(argtype, types))))
        self._probes[name] = probe
        return probe

    def load(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Make the declared probes visible to tools.

        If a stapsdtd serves and somebody traces these probes, return when they are armed, so that the first hit is not
        missed: that usually takes some milliseconds, and at most wait_seconds.

        Raises RuntimeError if the provider is loaded already, ValueError if no probe is declared, OSError if the kernel
        refuses the library, and NotImplementedError on unsupported architectures and systems.
        """
        if self._loaded:
            raise RuntimeError(f"provider {self._name} is loaded; reload() adds probes declared since")
        self.reload(wait_seconds)

    def reload(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Load a new library with all probes declared so far, replacing the loaded one, if any.

        Tools see the old library disappear and a new one appear, whose probes they must arm again, as stapsdtd does.
        Waits for stapsdtd as load does; the old probes keep firing meanwhile.
        Raises the same errors as load, except RuntimeError, and then changes nothing.
        """
        probes = self.probes
        declarations = [probe.declaration for probe in probes]
        image = build_image(self._name, declarations, architecture.of_this_process())
        sites = library.load(self._name, image, [len(probe.types) for probe in probes])
        # it is mapped, and found, from here on
        wait_until_armed(wait_seconds)
        for probe, site in zip(probes, sites):
            probe.site = site
        self._loaded = True

    def unload(self) -> None:
        """Unload the library. Its probes are disabled, and firing them does nothing. May be called again."""
        for probe in self.probes:
            probe.site = library.UNLOADED
        self._loaded = False

    def __enter__(self: _ProviderT) -> _ProviderT:
        self.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unload()

    def __repr__(self) -> str:
        return f"<Provider {self._name}, {len(self._probes)} probes, {'' if self._loaded else 'not '}loaded>"


def _register(argument: int | str | bytes) -> int | bytes:
    """Convert an argument for the stub. Must not fail, since only traced programs get here."""
    if not isinstance(argument, str):
        return argument
    try:
        return argument.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return argument.encode(errors="backslashreplace")
