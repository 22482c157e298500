"""The running kernel, as lookups ask it, in a thread that serves clients in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from stapsdtd.arch.record import Architecture
from stapsdtd.arch.registry import of_host
from stapsdtd.errors import LimitReachedError
from stapsdtd.functions.attaching import FENTRY, KPROBE, MULTI, Way
from stapsdtd.functions.lookup import Kernel, Lookup
from stapsdtd.functions.model import Found, FoundNames
from stapsdtd.functions.selectors import FunctionSelector
from stapsdtd.kernel import btf, function_hooks, function_tables
from stapsdtd.kernel.btf import Btf
from stapsdtd.kernel.features import Feature
from stapsdtd.kernel.function_hooks import HookTrials
from stapsdtd.kernel.function_tables import Symbol
from stapsdtd.runtime.fair_thread import FairThread, Queue

_T = TypeVar("_T")

_TRIAL_SECONDS = 2.0
"""How long a lookup waits until the host has told what it offers."""

_MAX_WAITING = 8
"""Lookups of one client. Each holds its request until its turn comes."""

_WAYS = {function_hooks.FENTRY: FENTRY, function_hooks.KPROBES: KPROBE}


class RunningKernel:
    """The host's."""

    def symbols(self, *, only_modules: bool = False) -> Iterator[Symbol]:
        return function_tables.functions(only_modules=only_modules)

    def traceable(self) -> Iterator[Symbol] | None:
        return None if function_tables.why_no_filter_functions() else function_tables.filter_functions()

    def blacklisted(self) -> frozenset[str]:
        return function_tables.blacklisted()

    def modules(self) -> Sequence[str]:
        return btf.modules()

    def open_btf(self, module: str, base: Btf | None) -> Btf:
        return Btf(btf.path_of(module), base)


def ways_of(features: Iterable[Feature]) -> tuple[Way, ...]:
    """Return the ways to attach, of which the host's features tell."""
    found = {feature.name: feature for feature in features}
    return tuple(
        Way(way, "" if feature.available else feature.detail, feature.remedy)
        for name, way in _WAYS.items()
        if (feature := found.get(name)) is not None
    )


def ways_to_attach(hooks: HookTrials) -> frozenset[str]:
    """Return the names of those that this host has, MULTI among them."""
    names = {**_WAYS, function_hooks.MULTI: MULTI}
    found = hooks.found(_TRIAL_SECONDS)
    return frozenset(names[each.name] for each in found if each.available and each.name in names)


def make_kernel_functions(hooks: HookTrials) -> KernelFunctions:
    """Make those of this host."""
    return KernelFunctions(lambda: ways_of(hooks.found(_TRIAL_SECONDS)))


class KernelFunctions:
    """Serves lookups, one after the other: each takes some MB and up to half a second."""

    def __init__(
        self, ways: Callable[[], Sequence[Way]], kernel: Kernel | None = None, architecture: Architecture | None = None
    ) -> None:
        """ways: asked in the thread of lookups. kernel, architecture: this host's by default."""
        self._ways = ways
        self._kernel = kernel or RunningKernel()
        self._architecture = architecture or of_host()
        self._thread = FairThread("stapsdtd-functions")

    def functions(
        self,
        client: str,
        selectors: Sequence[FunctionSelector],
        *,
        with_shapes: bool = False,
        most: int | None = None,
    ) -> Future[Found]:
        """Raises LimitReachedError and, in the future, what Lookup.functions does."""
        return self._submit(client, lambda lookup: lookup.functions(selectors, with_shapes=with_shapes, most=most))

    def names(self, client: str, selectors: Sequence[FunctionSelector]) -> Future[FoundNames]:
        """Raises LimitReachedError and, in the future, what Lookup.names does."""
        return self._submit(client, lambda lookup: lookup.names(selectors))

    def _submit(self, client: str, look_up: Callable[[Lookup], _T]) -> Future[_T]:
        def run() -> _T:
            with Lookup(self._kernel, self._architecture, self._ways()) as lookup:
                return look_up(lookup)

        queue = Queue(client)
        if self._thread.waiting(queue) >= _MAX_WAITING:
            text = f"{client} has {_MAX_WAITING} lookups of kernel functions waiting; try again later"
            raise LimitReachedError(text, "lookups")
        return self._thread.submit(queue, run, "looking up kernel functions")

    def stop(self) -> None:
        self._thread.stop()
