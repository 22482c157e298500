"""Programs, libraries and subscriptions come and go at random, and every hit is accounted for: `python -m tests.churn`.

    burst         so many hits of one probe, with a number that counts on and the burst's own
    subscription  is held against all bursts that it lived through: the ones it saw from begin to end came all, the
                  others as far as they were seen, and what it is told of losses is all that is missing
    round         ends with nothing but the lasting subscription, when descriptors and memory are looked at

The lasting subscription wants `beat` and `called` of everybody, from the first hit to the last. Nobody holds `pulse`,
so its sites are armed, moved to other processes and disarmed all the time.
"""

from __future__ import annotations

import argparse
import errno
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from stapsdtd.client import Account, Client, ClientError, Encoding, End, NumberColumn, SubscribeOptions, Subscription
from stapsdtd.client.column_batch import ColumnBatch
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import definitions, links
from tests.support import Daemon, Ticker, compile_target, descriptors, resident_kib, running_daemon, wait_for

_PROGRAMS = 3
_RUNNING = 6
_SUBSCRIPTIONS = 8
_ACTIONS = 40
_MOST_HITS = 2000
_LEASE_SECONDS = 5
_LASTING_LEASE_SECONDS = 60
_WARM_ROUNDS = 3
_FILLING, _FILL = 10, 10_000
_GROWTH_KIB = 10 * 1024
_DISARM_SECONDS = 60
"""What goes faster than the kernel removes events waits for a moment in which nobody arms: see capture/bpf/turns.py."""
_SLACK_DESCRIPTORS = 6
"""Two events more: what shares one depends on what came when."""

_Key = tuple[str, int]


@dataclass(slots=True, eq=False)
class Burst:
    """each: how many hits every one of so many threads or children makes. pid: None for children's.

    begin, end: moments, as the driver counts them; end None is not yet. moves: how many subscriptions began or ended
    meanwhile. killed: nobody knows how far it came.
    """

    ident: int
    probe: str
    path: str
    pid: int | None
    times: int
    each: int
    begin: int
    end: int | None = None
    moves: int = 0
    killed: bool = False

    @property
    def key(self) -> _Key:
        return self.probe, self.ident

    def hits(self, odd: bool) -> int:
        return self.times * (self.each // 2 if odd else self.each)

    def total(self, odd: bool) -> int:
        """The sum of the numbers of these hits."""
        return self.times * sum(range(1 if odd else 0, self.each, 2 if odd else 1))


class Seen:
    """Reads a subscription to its end in a thread: how many hits came of each burst, and the sum of their numbers."""

    def __init__(self, subscription: Subscription) -> None:
        self.bursts: dict[_Key, list[int]] = {}
        self.account: Account | None = None
        self._subscription = subscription
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        # one that vanishes is closed under its reader's hands
        with suppress(ClientError, ValueError):
            for message in self._subscription.messages(Encoding.COLUMNS):
                match message:
                    case ColumnBatch():
                        self._count(message)
                    case End(account=account):
                        self.account = account
                    case _:
                        pass

    def _count(self, batch: ColumnBatch) -> None:
        number, ident = batch.values
        assert isinstance(number, NumberColumn)
        assert isinstance(ident, NumberColumn)
        for site in np.unique(batch.site_id):
            name = batch.sites[int(site)].probe.name
            of_site = batch.site_id == site
            idents, numbers = ident.values[of_site], number.values[of_site]
            for each in np.unique(idents):
                count, total = self.bursts.get((name, int(each)), [0, 0])
                of_burst = idents == each
                # both at once, for whoever looks meanwhile
                self.bursts[name, int(each)] = [count + int(of_burst.sum()), total + int(numbers[of_burst].sum())]

    def finish(self) -> Account:
        self._thread.join(timeout=60)
        assert self.account is not None, "the stream did not end"
        return self.account

    def join(self) -> None:
        self._thread.join(timeout=60)


@dataclass(slots=True, eq=False)
class Watch:
    """A subscription: path and pid None are any; odd: of the hits, those with odd numbers. begin: when it was armed."""

    client: Client
    subscription: Subscription
    seen: Seen
    probes: frozenset[str]
    path: str | None
    pid: int | None
    odd: bool
    begin: int

    def describe(self) -> str:
        return f"{sorted(self.probes)} of {self.path or 'any file'} in {self.pid or 'any process'}, odd {self.odd}"

    def wants(self, burst: Burst) -> bool:
        return self.may_hit(burst) and self.pid in {None, burst.pid}

    def may_hit(self, burst: Burst) -> bool:
        return burst.probe in self.probes and self.path in {None, burst.path}


@dataclass(slots=True, eq=False)
class Program:
    ticker: Ticker
    path: str
    library: str | None = None
    running: list[Burst] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.ticker.pid


@dataclass(frozen=True, slots=True)
class Sample:
    descriptors: int
    resident_kib: int


class Churn:
    def __init__(self, daemon: Daemon, folder: Path, engine: str, seed: int) -> None:
        self._daemon = daemon
        self._random = random.Random(seed)
        self._engine = engine
        self._folder = folder
        self._provider = f"churn{seed % 10**6}x{daemon.pid}"
        self._original = self._compiled("churning.c", "original", "-ldl", "-lpthread")
        self._library = str(self._compiled("churned.c", "churned.so", "-shared", "-fPIC"))
        self._paths = [str(folder / f"program{number}") for number in range(_PROGRAMS)]
        for path in self._paths:
            shutil.copy(self._original, path)
        self._client = Client(daemon.target)
        self._tracefs = Tracefs.locate()
        self._programs: list[Program] = []
        self._watches: list[Watch] = []
        self._vanished: list[Watch] = []
        self._bursts: list[Burst] = []
        self._moment = 0
        self.counts: dict[str, int] = {}
        self.hits = 0
        self.samples: list[Sample] = []
        self._lasting = self._watch({"beat", "called"}, None, None, odd=False, lease_seconds=_LASTING_LEASE_SECONDS)

    def _compiled(self, source: str, name: str, *flags: str) -> Path:
        return compile_target(source, self._folder / name, f"-DPROVIDER={self._provider}", *flags)

    def fill(self) -> None:
        """Have the lasting subscription keep as many events as it ever will."""
        program = self._started(self._paths[0])
        for _ in range(_FILLING):
            self._moment += 1
            for probe in ("beat", "pulse"):
                self._burst(program, probe, 1, _FILL, own=True)
            program.ticker.do(f"fire {self._moment} {_FILL}")
            self._over(program)
            self._look_at_lasting()

    def round(self) -> None:
        """Do so much at random, come to rest, and look at what is left."""
        for _ in range(_ACTIONS):
            self._act()
        self._rest()

    def _act(self) -> None:
        chances: list[tuple[int, Callable[[], None]]] = [
            (5, self._start),
            (2, self._end),
            (8, self._fire),
            (4, self._begin),
            (4, self._finish),
            (3, self._exec),
            (4, self._load),
            (4, self._call),
            (2, self._unload),
            (1, self._replace),
            (6, self._subscribe),
            (4, self._unsubscribe),
            (1, self._vanish),
        ]
        weights, actions = zip(*chances, strict=True)
        (action,) = self._random.choices(actions, weights)
        name = action.__name__.removeprefix("_")
        self.counts[name] = self.counts.get(name, 0) + 1
        self._moment += 1
        action()

    # programs

    def _idle(self) -> Program | None:
        idle = [program for program in self._programs if not program.running]
        return self._random.choice(idle) if idle else None

    def _known(self, program: Program) -> None:
        """Once the daemon lists what a process maps, every subscription that wants it has it armed."""
        expected = 2 + (program.library is not None)

        def listed() -> bool:
            return len(self._client.list_probes(f"{self._provider}:*", pids=[program.pid])) == expected

        wait_for(listed, f"{expected} probes of process {program.pid}")

    def _started(self, path: str) -> Program:
        program = Program(Ticker(path), path)
        self._programs.append(program)
        self._known(program)
        return program

    def _start(self) -> None:
        if len(self._programs) < _RUNNING:
            self._started(self._random.choice(self._paths))

    def _end(self) -> None:
        """Kill one, perhaps in the middle of its hits."""
        if not self._programs:
            return
        program = self._random.choice(self._programs)
        program.ticker.kill()
        self._programs.remove(program)
        for burst in program.running:
            burst.killed = True
            burst.end = self._moment

    def _exec(self) -> None:
        program = self._idle()
        if program is not None:
            program.path = self._random.choice(self._paths)
            program.library = None
            program.ticker.do(f"exec {program.path}")
            self._known(program)

    def _replace(self) -> None:
        """As a package manager does. Who runs the old one goes on."""
        path = self._random.choice(self._paths)
        shutil.copy(self._original, f"{path}.new")
        Path(f"{path}.new").rename(path)

    def _load(self) -> None:
        program = self._idle()
        if program is None:
            return
        if program.library is not None:
            program.ticker.do("close")
        how, program.library = self._random.choice([("open", self._library), ("memfd", "memfd")])
        program.ticker.do(f"{how} {self._library}")
        self._known(program)

    def _unload(self) -> None:
        program = self._idle()
        if program is not None and program.library is not None:
            program.ticker.do("close")
            program.library = None

    # hits

    def _burst(self, program: Program, probe: str, times: int, each: int, *, own: bool) -> Burst:
        path = program.library if probe == "called" else program.path
        pid = program.pid if own else None
        assert path is not None
        burst = Burst(self._moment, probe, path, pid, times, each, self._moment, moves=len(self._vanished))
        self._bursts.append(burst)
        program.running.append(burst)
        return burst

    def _command(self, program: Program) -> str:
        """Note what a command will fire, and answer it."""
        each = self._random.randrange(1, _MOST_HITS)
        what = self._random.choice(["fire", "threads", "forks"])
        times = 1 if what == "fire" else self._random.randrange(1, 5)
        for probe in ("beat", "pulse"):
            self._burst(program, probe, times, each, own=what != "forks")
        return f"{what} {'' if what == 'fire' else times} {self._moment} {each}"

    def _over(self, program: Program) -> None:
        self._moment += 1
        for burst in program.running:
            burst.end = self._moment
            self.hits += burst.hits(False)
        program.running.clear()

    def _fire(self) -> None:
        program = self._idle()
        if program is not None:
            program.ticker.do(self._command(program))
            self._over(program)

    def _call(self) -> None:
        program = self._idle()
        if program is not None and program.library is not None:
            each = self._random.randrange(1, _MOST_HITS)
            self._burst(program, "called", 1, each, own=True)
            program.ticker.do(f"call {self._moment} {each}")
            self._over(program)

    def _begin(self) -> None:
        """Go on while it fires."""
        program = self._idle()
        if program is not None:
            program.ticker.begin(self._command(program))

    def _finish(self) -> None:
        busy = [program for program in self._programs if program.running]
        if busy:
            program = self._random.choice(busy)
            program.ticker.finish()
            self._over(program)

    # subscriptions

    def _moved(self) -> None:
        self._moment += 1
        for program in self._programs:
            for burst in program.running:
                burst.moves += 1

    def _watch(
        self, probes: set[str], path: str | None, pid: int | None, *, odd: bool, lease_seconds: int = _LEASE_SECONDS
    ) -> Watch:
        self._moved()
        module = "" if path is None else path
        client = Client(self._daemon.target)
        subscription = client.subscribe(
            [f"{self._provider}:{module}::{probe}" for probe in sorted(probes)],
            SubscribeOptions(
                pids=[] if pid is None else [pid],
                where="arg0 & 1" if odd else "",
                lease_seconds=lease_seconds,
                queue_bytes=4 << 20,
                kernel_buffer_kib=self._random.choice([4, 256, 4096]) if self._bursts else 4096,
            ),
        )
        self._moved()
        return Watch(client, subscription, Seen(subscription), frozenset(probes), path, pid, odd, self._moment)

    def _subscribe(self) -> None:
        if len(self._watches) == _SUBSCRIPTIONS:
            return
        pick = self._random.choice
        probes = pick([{"pulse"}, {"pulse"}, {"beat"}, {"called"}, {"beat", "pulse"}, {"beat", "pulse", "called"}])
        path = pid = None
        if self._random.random() < 0.3:
            path = self._library if probes == {"called"} else pick(self._paths)
        elif self._programs and self._random.random() < 0.4:
            pid = pick(self._programs).pid
        self._watches.append(self._watch(probes, path, pid, odd=self._random.random() < 0.4))

    def _unsubscribe(self) -> None:
        if self._watches:
            self._close(self._watches.pop(self._random.randrange(len(self._watches))))

    def _close(self, watch: Watch) -> None:
        self._moved()
        end = self._moment
        watch.subscription.unsubscribe()
        self._moved()
        account = watch.seen.finish()
        watch.client.close()
        self._check(watch, account, end)

    def _vanish(self) -> None:
        """As a client that dies: its lease ends it."""
        if self._watches:
            watch = self._watches.pop(self._random.randrange(len(self._watches)))
            self._vanished.append(watch)
            self._moved()
            watch.client.close()
            watch.seen.join()

    # accounts

    def _check(self, watch: Watch, account: Account, end: int) -> None:
        context = f"{watch.describe()}, {account}"
        told = sum(count for count, _ in watch.seen.bursts.values())
        assert told == account.delivered, f"{told} came; {context}"
        least = most = missing = slack = 0
        wanted: dict[_Key, Burst] = {}
        for burst in self._bursts:
            if burst.begin > end or (burst.end is not None and burst.end < watch.begin) or not watch.may_hit(burst):
                continue
            # a site that moves to another group has a moment in which neither or both count
            loose = burst.moves * burst.times * 2 if self._engine == "bpf" and burst.probe == "pulse" else 0
            most += burst.hits(False) + loose
            if not watch.wants(burst):
                continue
            wanted[burst.key] = burst
            is_whole = not burst.killed and burst.begin > watch.begin and burst.end is not None and burst.end < end
            count, total = watch.seen.bursts.get(burst.key, [0, 0])
            assert count <= burst.hits(watch.odd) + loose, f"{count} of {burst}; {context}"
            if not is_whole:
                continue
            least += burst.hits(False) - loose
            missing += burst.hits(watch.odd) - count
            slack += loose
            if not account.lost and not loose:
                assert (count, total) == (burst.hits(watch.odd), burst.total(watch.odd)), f"{burst}; {context}"
        strange = watch.seen.bursts.keys() - wanted.keys()
        assert not strange, f"{strange} of nobody; {context}"
        assert least <= account.fired <= most, f"{least} to {most} were fired; {context}"
        assert missing <= account.lost + slack, f"{missing} did not come; {context}"

    # rest

    def _rest(self) -> None:
        """End all but the lasting subscription, with one program of each file known; then look at what is used."""
        self._moment += 1
        for program in self._programs:
            if program.running:
                program.ticker.finish()
                self._over(program)
        for watch in self._watches:
            self._close(watch)
        self._watches.clear()
        wait_for(lambda: len(self._client.subscriptions()) == 1, "the leases to run out")
        self._vanished.clear()
        for program in self._programs:
            # what the lasting subscription holds of it, and nothing else
            wait_for(partial(self._are_as_lasting, program), f"the semaphores of {program.pid} to fall")
            program.ticker.kill()
        self._programs.clear()
        for path in self._paths:
            self._moment += 1
            program = self._started(path)
            program.library = self._library
            program.ticker.do(f"open {self._library}")
            self._known(program)
        self._end_all()
        self._look_at_lasting()
        # what deleted files and memfds hold goes within the two seconds in which the daemon looks at them
        wait_for(
            lambda: self._armed_sites() == len(self._paths) + 1,
            "all that is gone to be disarmed",
            seconds=_DISARM_SECONDS,
        )
        if len(self.samples) >= _WARM_ROUNDS:
            usual = max(sample.descriptors for sample in self.samples[:_WARM_ROUNDS]) + _SLACK_DESCRIPTORS
            wait_for(lambda: descriptors(self._daemon.pid) <= usual, f"{usual} descriptors at most, as before")
        self.samples.append(Sample(descriptors(self._daemon.pid), resident_kib(self._daemon.pid)))

    @staticmethod
    def _are_as_lasting(program: Program) -> bool:
        return program.ticker.do("semaphores") == 1

    def _armed_sites(self) -> int:
        """The daemon's events and links, each of which holds one site here; ftrace's may be defined and disabled."""
        if self._engine == "bpf":
            return len(definitions(self._tracefs, self._daemon.pid)) + len(links(self._daemon.pid))
        pattern = f"instances/stapsdtd_*_{self._daemon.pid}_*/events/stapsdtd_*_{self._daemon.pid}_*/*/enable"
        return sum(map(_is_enabled, Path(self._tracefs.root).glob(pattern)))

    def _end_all(self) -> None:
        for program in self._programs:
            program.ticker.kill()
        self._programs.clear()
        wait_for(lambda: not self._client.list_probes(f"{self._provider}:*").probes, "the programs' ends to be noticed")

    def _look_at_lasting(self) -> None:
        """It was there for all that was fired, and its buffers have room for all that is ever on its way."""
        whole = [burst for burst in self._bursts if self._lasting.wants(burst) and not burst.killed]
        seen = self._lasting.seen.bursts

        def has_come() -> bool:
            return all(seen.get(burst.key, [0])[0] >= burst.hits(False) for burst in whole)

        wait_for(has_come, f"all hits to come, of which these are lost: {self._lasting.subscription.lost}")
        for burst in whole:
            assert seen[burst.key] == [burst.hits(False), burst.total(False)], f"of {burst}"
        self._bursts.clear()

    def finish(self) -> Account:
        """End the lasting subscription, under the eyes of a program; answer its account."""
        ticker = self._started(self._paths[0]).ticker
        assert ticker.do("semaphores") == 1
        self._lasting.subscription.unsubscribe()
        assert ticker.do("semaphores") == 0
        account = self._lasting.seen.finish()
        assert sum(count for count, _ in self._lasting.seen.bursts.values()) == account.delivered == account.fired
        # Unsubscribe does not wait for what no process maps any more
        wait_for(lambda: self._armed_sites() == 0, "nothing to be armed", seconds=_DISARM_SECONDS)
        return account

    def close(self) -> None:
        for program in self._programs:
            program.ticker.kill()
        for watch in [*self._watches, self._lasting]:
            with suppress(ClientError):
                watch.subscription.unsubscribe()
            watch.seen.join()
            watch.client.close()
        self._client.close()


def _is_enabled(path: Path) -> bool:
    try:
        return path.read_text() == "1\n"
    except OSError as error:
        # the event was removed meanwhile
        if error.errno in {errno.ENOENT, errno.ENODEV}:
            return False
        raise


def churn(folder: Path, engine: str, seed: int, seconds: float) -> None:
    """Go on for so long, and at least for as many rounds as it takes to tell growth from warming up."""
    with running_daemon(folder, "--engine", engine) as daemon, ExitStack() as stack:
        driver = Churn(daemon, folder, engine, seed)
        stack.callback(driver.close)
        end = time.monotonic() + seconds
        driver.fill()
        while time.monotonic() < end or len(driver.samples) < 3 * _WARM_ROUNDS:
            driver.round()
        account = driver.finish()
        stack.pop_all().close()
    resident = [sample.resident_kib for sample in driver.samples]
    third = len(resident) // 3
    before, after = (statistics.median(part) for part in (resident[third:-third], resident[-third:]))
    print(f"{engine}: {len(driver.samples)} rounds, {account.fired} hits of the lasting subscription, {driver.counts}")
    print(f"resident at the rounds' ends: {resident} KiB")
    assert after - before < _GROWTH_KIB, f"memory grows from {before} to {after} KiB"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.churn")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--engine", choices=["bpf", "ftrace"], default="bpf")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="stapsdtd-churn-") as folder:
        churn(Path(folder), options.engine, options.seed, options.seconds)


if __name__ == "__main__":
    main()
