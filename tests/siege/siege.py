"""A daemon under siege: it, the processes of two ordinary users, and what is measured while one of them attacks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.kernel.test_metrics import scrape
from tests.siege.bystander import Round
from tests.support import ROOT, Daemon, children, compile_target, is_dead, running_daemon, status_kib
from tests.users import User, public_folder

_PATIENCE_SECONDS = 45.0
"""Beyond the time of a round: the bystander's calls have deadlines of 10 s."""
_SETTLE_SECONDS = 15.0
_LOOK_SECONDS = 0.25
_IDLE_SHARE = 0.3
_BUCKET = "stapsdtd_slice_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Gained:
    """What an attacker got: by name what succeeded, by code what was refused, and what the first of a code said."""

    done: Counter[str]
    refusals: Counter[str]
    examples: dict[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a round.

    peak_kib: the daemon's resident memory. cpu_share: of a core, of the daemon and its processes. log_bytes: what it
    wrote. slices: for each shared thread the bound of the longest slice of processor time, in seconds. problems: what
    went wrong besides. has_settled: whether the daemon came to rest.
    """

    name: str
    round: Round
    gained: Gained
    peak_kib: int
    cpu_share: float
    log_bytes: int
    slices: Mapping[str, float]
    problems: Sequence[str]
    has_settled: bool


class _Helper:
    """A process of a user's that takes lines and answers with lines."""

    def __init__(self, user: User, module: str, *arguments: Path | str) -> None:
        command = user.command(
            sys.executable, "-m", f"tests.siege.{module}", *arguments, options=("--pdeathsig", "KILL")
        )
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.pid = self._process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self, seconds: float) -> str:
        """Raises TimeoutError."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty as error:
            raise TimeoutError from error
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended")
        return line.rstrip("\n")

    def close(self) -> None:
        self._process.kill()
        self._reader.join()
        self._process.communicate()


class Siege:
    def __init__(self, daemon: Daemon, folder: Path, stack: ExitStack) -> None:
        """stack: what outlives rounds."""
        self.daemon = daemon
        # users that nobody else has: all their processes are this siege's
        self._user, bystander = (User(200_000 + 2 * os.getpid() + number) for number in range(2))
        provider = f"siege{os.getpid()}"
        shared = compile_target("ticker.c", folder / "shared", f"-DPROVIDER={provider}", "-ldl", "-lpthread")
        raiding = compile_target("raiding.c", folder / "raiding")
        crowding = compile_target("crowding.c", folder / "crowding", "-lpthread")
        for user in (self._user, bystander):
            assert not _processes(user)
            stack.callback(_end, user)
        own = folder / "attacker"
        own.mkdir()
        os.chown(own, self._user.uid, self._user.uid)
        processor = str(max(os.sched_getaffinity(0)))
        programs = raiding, crowding, shared
        self._attacker = _Helper(self._user, "attacker", processor, daemon.target, own, *programs, provider)
        stack.callback(self._attacker.close)
        self._bystander = _Helper(bystander, "bystander", daemon.target, shared, provider)
        stack.callback(self._bystander.close)
        for helper in (self._attacker, self._bystander):
            assert helper.line(_PATIENCE_SECONDS) == "ready"

    def quiet(self, seconds: float) -> Row:
        return self.under((), seconds)

    def under(self, attacks: Sequence[str], seconds: float) -> Row:
        """Have the bystander work while the attacks go on, all at once."""
        problems: list[str] = []
        before = _Measured.of(self.daemon)
        try:
            self._attacker.tell(json.dumps({"attacks": attacks, "seconds": seconds}))
            told = self._round(seconds, problems)
            gained = self._gained(attacks, problems)
        finally:
            _end(self._user, but=self._attacker.pid)
        try:
            after = _Measured.of(self.daemon)
        except OSError:
            problems.append("the daemon ended")
            after = before
        has_settled = self._settles()
        if not has_settled:
            problems.append(f"the daemon was busy {_SETTLE_SECONDS:.0f} s later")
        elapsed = max(after.at - before.at, seconds)
        return Row(
            name=" + ".join(attacks) or "quiet",
            round=told,
            gained=gained,
            peak_kib=after.peak_kib,
            cpu_share=(after.cpu_seconds - before.cpu_seconds) / elapsed,
            log_bytes=after.log_bytes - before.log_bytes,
            slices=_longest(before.slices, after.slices),
            problems=problems,
            has_settled=has_settled,
        )

    def _gained(self, attacks: Sequence[str], problems: list[str]) -> Gained:
        gained = Gained(Counter(), Counter(), {})
        missing = set(attacks)
        with suppress(TimeoutError):
            while missing:
                told = json.loads(self._attacker.line(_PATIENCE_SECONDS))
                missing.discard(told["name"])
                gained.done.update(told["done"])
                gained.refusals.update(told["refusals"])
                gained.examples.update(told["examples"])
        problems += [f"{name} did not end" for name in sorted(missing)]
        return gained

    def _round(self, seconds: float, problems: list[str]) -> Round:
        self._bystander.tell(f"{seconds}")
        try:
            return Round(**json.loads(self._bystander.line(seconds + _PATIENCE_SECONDS)))
        except TimeoutError:
            problems.append("the bystander was not answered")
            return Round(fired=-1)

    def _settles(self) -> bool:
        """Wait until the daemon has little to do."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            before = _cpu_seconds(self.daemon.pid)
            time.sleep(_LOOK_SECONDS)
            if self.daemon.process.poll() is not None:
                return False
            if _cpu_seconds(self.daemon.pid) - before < _IDLE_SHARE * _LOOK_SECONDS:
                return True
        return False


@contextmanager
def besieged(engine: str = "bpf") -> Iterator[Siege]:
    """A siege whose daemon has to end cleanly. Its log has to be printable, whatever was said to it."""
    with public_folder() as folder, ExitStack() as stack:
        config = folder / "stapsdtd.toml"
        config.write_text(f'[metrics]\nlisten = "unix:{folder}/metrics.sock"\n')
        daemon = stack.enter_context(running_daemon(folder, "--config", str(config), "--engine", engine))
        os.chmod(daemon.target.removeprefix("unix:"), 0o666)
        yield Siege(daemon, folder, stack)
        unprintable = [line for line in daemon.log().split("\n") if not line.isprintable()]
        assert not unprintable, unprintable[:3]


@dataclass(frozen=True, slots=True)
class _Measured:
    at: float
    cpu_seconds: float
    peak_kib: int
    log_bytes: int
    slices: Mapping[str, Mapping[float, float]]

    @classmethod
    def of(cls, daemon: Daemon) -> _Measured:
        """Measure, and let the peak of memory begin anew."""
        peak = status_kib(daemon.pid, "VmHWM")
        Path(f"/proc/{daemon.pid}/clear_refs").write_text("5")
        log_bytes = daemon.log_path.stat().st_size
        return cls(time.monotonic(), _cpu_seconds(daemon.pid), peak, log_bytes, _slices(daemon.log_path.parent))


def _slices(folder: Path) -> Mapping[str, Mapping[float, float]]:
    """How many slices of each thread took at most so many seconds."""
    found: dict[str, dict[float, float]] = {}
    for name, value in scrape(folder).items():
        if name.startswith(f"{_BUCKET}["):
            bound, thread = name.removeprefix(f"{_BUCKET}[").removesuffix("]").split("][")
            found.setdefault(thread, {})[float(bound)] = value
    return found


def _longest(
    before: Mapping[str, Mapping[float, float]], after: Mapping[str, Mapping[float, float]]
) -> Mapping[str, float]:
    """Return the bound of the longest slice of each thread in between; threads that had none are left out."""
    found = {}
    for thread, buckets in after.items():
        grown = {bound: count - before.get(thread, {}).get(bound, 0) for bound, count in sorted(buckets.items())}
        total = max(grown.values())
        if total:
            found[thread] = next(bound for bound, count in grown.items() if count == total)
    return found


def _cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, those that have ended among them."""
    ticks, pending = 0, [pid]
    while pending:
        each = pending.pop()
        with suppress(FileNotFoundError, ProcessLookupError):
            own = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]
            ticks += sum(map(int, own))
            pending += children(each)
    return ticks / os.sysconf("SC_CLK_TCK")


def _processes(user: User) -> list[int]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                uids = Path(entry.path, "status").read_text().split("\nUid:")[1].split()[:4]
                if str(user.uid) in uids:
                    found.append(int(entry.name))
    return found


def _end(user: User, but: int = 0) -> None:
    """End all processes of a user's but one, also those that are forked meanwhile."""
    while processes := [pid for pid in _processes(user) if pid != but and not is_dead(pid)]:
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
