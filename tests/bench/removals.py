"""What one user's memfds that came and went cost another whose memfds are to be armed."""

from __future__ import annotations

from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.bench.report import Figure
from tests.bench.setup import Setup
from tests.passing import SELECTOR, Passing
from tests.support import Daemon, Recorder, compile_target, wait_for
from tests.users import ANNE, BERT, public_folder

_MOST = 1.5
_ARMED_SECONDS = 300
_REMOVED_SECONDS = 600
_FEW = 20


def run(setup: Setup) -> list[Figure]:
    samples, memfds = (30, 300) if setup.quick else (200, 2000)
    with public_folder() as folder, setup.daemon() as daemon, Recorder(daemon.target, SELECTOR) as recorder:
        library = compile_target("library.c", folder / "library.so", "-shared", "-fPIC")
        library.chmod(0o644)
        with Passing(BERT, folder, library) as bert:
            alone = bert.do(f"time {samples}")
            with Passing(ANNE, folder, library) as anne:
                anne.do(f"hold {memfds}")
                wait_for(lambda: len(recorder.armed()) >= samples + memfds, "all to be armed", _ARMED_SECONDS)
                anne.do("drop")
                beside = bert.do(f"time {samples}")
            left = _attached(daemon)
        # the daemon's end is not to wait for them
        wait_for(lambda: _attached(daemon) < _FEW, "the rest to be removed", _REMOVED_SECONDS)
    note = f"{left} links and events were to be removed still"
    figures = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        with_, without = (sorted(times)[int(share * (samples - 1))] / 1e3 for times in (beside, alone))
        ratio = with_ / without
        figures += [
            Figure(f"memfd to patched, beside {memfds} that went, {name}", with_, "s", ratio, f"<= {_MOST} of alone",
                   ratio <= _MOST, note),
            Figure(f"memfd to patched, alone, {name}", without, "s"),
        ]  # fmt: skip
    return figures


def _attached(daemon: Daemon) -> int:
    return len(own(Tracefs.locate(), daemon.pid))
