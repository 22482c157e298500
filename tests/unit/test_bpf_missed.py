"""What the kernel could not hit is told once, to whoever wanted it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from stapsdtd.capture.bpf.armed import Group
from stapsdtd.capture.bpf.missed import MissedCalls
from stapsdtd.capture.engine import LossStage
from stapsdtd.kernel.tracefs import Tracefs


class Profile(Tracefs):
    """kprobe_profile, as a test says. lines: event, hits, missed."""

    def __init__(self) -> None:
        super().__init__("/nonexistent")
        self.lines: list[tuple[str, int, int]] = []

    def read(self, relative: str) -> str:
        assert relative == "kprobe_profile"
        return "".join(f"  {name:<44} {hits:>15} {missed:>15}\n" for name, hits, missed in self.lines)


class Lost:
    def __init__(self) -> None:
        self.told: list[tuple[int, LossStage | None]] = []

    def fired(self, count: int) -> None:
        self.told.append((count, None))

    def lost(self, stage: LossStage, count: int) -> None:
        self.told.append((count, stage))


def group(name: str, *sinks: Lost, is_of_kernel: bool = True) -> Group:
    consumers = {number: SimpleNamespace(channel=SimpleNamespace(sink=sink)) for number, sink in enumerate(sinks)}
    made = SimpleNamespace(name=name, is_of_kernel=is_of_kernel, sites=[SimpleNamespace(consumers=consumers)])
    return cast("Group", made)


def test_what_was_missed_since_the_last_time() -> None:
    def at_once(work: Callable[[], None]) -> None:
        work()

    profile, one, other = Profile(), Lost(), Lost()
    missed = MissedCalls(profile, at_once)
    groups = [group("stapsdtd_1/g0_1", one, other), group("stapsdtd_1/g1_1", other), None]
    profile.lines = [("g0_1", 100, 3), ("g1_1", 5, 0), ("somebody_elses", 1, 7)]
    missed.tell(groups)
    missed.tell(groups)
    expected = [(3, None), (3, LossStage.MISSED)]
    assert (one.told, other.told) == (expected, expected)
    profile.lines = [("g0_1", 200, 3), ("g1_1", 9, 2)]
    missed.tell(groups)
    assert (one.told, other.told[2:]) == (expected, [(2, None), (2, LossStage.MISSED)])
    # an event of another's that is not asked about is not told later as if it were new
    missed.tell(groups[:1])
    missed.tell(groups)
    assert len(other.told) == 4


def test_nothing_is_read_where_no_function_is_traced() -> None:
    profile = Profile()
    profile.read = NotImplemented  # type: ignore[method-assign]
    MissedCalls(profile, lambda work: work()).tell([group("g", is_of_kernel=False), None])
