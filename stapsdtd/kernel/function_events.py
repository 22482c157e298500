"""Kprobes' events that run a program of their own, which tells what the kernel skipped. See `probe_events`."""

from __future__ import annotations

from collections.abc import Sequence

from stapsdtd.kernel.own_programs import OwnProgram
from stapsdtd.kernel.places import FunctionPlace, Place
from stapsdtd.kernel.probe_events import ProbeEvent
from stapsdtd.kernel.tracefs import Tracefs


class FunctionEvent(ProbeEvent):
    """A kprobe or a kretprobe. Several that are attached together share a program."""

    def __init__(
        self, tracefs: Tracefs, program: OwnProgram, name: str, places: Sequence[Place | FunctionPlace], cookie: int
    ) -> None:
        """See `ProbeEvent`. program: released with this."""
        self.own_program = program.shared()
        self._is_released = False
        super().__init__(tracefs, program.descriptor, name, places, cookie)

    def remove(self) -> None:
        super().remove()
        if self.own_program is not None and not self._is_released:
            self._is_released = True
            self.own_program.release()
