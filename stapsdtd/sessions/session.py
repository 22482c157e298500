"""A subscription's state in the engine, which knows each of its clauses as a subscription of its own."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from stapsdtd.capture.engine import Engine
from stapsdtd.errors import StapsdtdError
from stapsdtd.kernel.host_calls import BEGIN, host_call
from stapsdtd.model import Object, ObjectKey
from stapsdtd.runtime.futures import all_done, finished
from stapsdtd.runtime.logs import fields
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.principal import Principal
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.targets import ArmRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Closed:
    """delivered: done when the subscription has all its events. quiesced: when nothing is patched for it any more."""

    delivered: Future[None]
    quiesced: Future[None]


@dataclass(slots=True, eq=False)
class Session:
    """Used by the arming thread. opened: the clauses that the engine knows. is_open: it knows all, and whom they
    follow. error: why it could not open all. arming: what is being armed, some sites at a time.
    """

    subscription: Subscription
    opened: list[Clause] = field(default_factory=list)
    is_open: bool = False
    is_closed: bool = False
    error: StapsdtdError | OSError | None = None
    arming: dict[ObjectKey, ArmRequest] = field(default_factory=dict)
    _opening: Generator[None, None, None] | None = None

    def open(self, engine: Engine) -> Generator[None, None, None]:
        """Open the clauses in steps, unless that was done. What is armed meanwhile takes the next steps itself.

        Raises StapsdtdError and OSError, then each time.
        """
        # closing comes first, also where it was submitted later
        while not (self.is_open or self.is_closed):
            self._take_step(engine)
            if not self.is_open:
                yield
        if self.error is not None:
            raise self.error

    def _take_step(self, engine: Engine) -> None:
        subscription = self.subscription
        if self.error is not None:
            raise self.error
        if self._opening is None:
            self._opening = self._open(engine)
        try:
            with host_call(BEGIN, subscription.id):
                self.is_open = next(self._opening, True) is True
        except (StapsdtdError, OSError) as error:
            cannot = "subscription %s: the engine cannot open it: %s"
            _log.warning(cannot, subscription.id, error, extra=fields(client=subscription.client.name))
            self.error = error
            raise

    def _open(self, engine: Engine) -> Generator[None, None, None]:
        subscription = self.subscription
        for clause in subscription.clauses:
            engine.open(
                clause.key,
                clause.sink,
                subscription.spec.kernel_buffer_kib,
                owner_of(subscription.client),
                clause.sink if clause.spec.aggregation else None,
                client=subscription.client.name,
            )
            self.opened.append(clause)
        if subscription.spec.scope.follow:
            # the other clauses' sites name the same set, which goes with the first clause: that is closed last
            yield from subscription.processes.follow(partial(engine.follow, subscription.clauses[0].key))

    def end(self) -> None:
        """Arm nothing any more."""
        self.is_closed = True
        # it refers to this
        self._opening = None

    def close(self, engine: Engine, unmapped: Sequence[Object]) -> Generator[None, None, Closed]:
        """Close the clauses of a session that has ended, in steps.

        unmapped: objects that are patched nowhere, so that their removal, which takes the kernel 0.1 s each, can wait.
        """
        if not self.opened:
            return Closed(finished(), finished())
        for clause in self.opened:
            for obj in unmapped:
                release(engine, clause, obj)
                yield
        delivered: list[Future[None]] = []
        failure: BaseException | None = None
        # the first comes last, see _open()
        for clause in reversed(self.opened):
            clause.close()
            try:
                delivered.append(clause.settled((yield from engine.close_in_steps(clause.key))))
            except Exception as error:  # noqa: BLE001 - the others are to be closed, too
                failure = failure or error
        if failure is not None:
            raise failure
        return Closed(all_done(delivered), engine.quiesced(owner_of(self.subscription.client)))


def release(engine: Engine, clause: Clause, obj: Object, *, is_awaited: bool = False) -> None:
    """Disarm an object for a clause; see `Engine.disarm`."""
    try:
        engine.disarm(clause.key, obj, is_awaited=is_awaited)
    except Exception:  # noqa: BLE001 - the client is told all the same, and nobody else would log it
        _log.exception("cannot disarm %s", obj.path)


def owner_of(principal: Principal) -> str:
    """Name a client's subscriptions as an owner of events (see `capture.bpf.turns`)."""
    return f"subscriptions of {principal.name}"
