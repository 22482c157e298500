"""Files that are installed, and traced before anybody runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from stapsdtd.client import Client, Event, InventoryState, Probe, SiteState
from stapsdtd.errors import InventoryError
from stapsdtd.inventory.parsing import IdleParser
from stapsdtd.kernel.tracefs import Tracefs
from tests.attached import own
from tests.kernel.test_openjdk import Java, java_home
from tests.support import (
    TICKER,
    Daemon,
    Recorder,
    Ticker,
    children,
    running_daemon,
    stapsdt,
    wait_for,
)
from tests.units import capabilities, with_capabilities
from tests.users import ANNE, BERT, public_folder

pytestmark = pytest.mark.kernel

_PROGRAMS = 100
_HITS = 10
TICK = f"{TICKER}:tick"


@pytest.fixture
def folder() -> Iterator[Path]:
    with public_folder() as made:
        (made / "bin").mkdir(0o755)
        yield made


@pytest.fixture
def home(folder: Path) -> Path:
    """Where the daemon is, so that everybody can connect to it."""
    path = folder / "home"
    path.mkdir()
    return path


@contextmanager
def installed(
    tmp_path: Path, directories: Sequence[Path], engine: str = "bpf", *, prefix: Sequence[str] = ()
) -> Iterator[Daemon]:
    """A daemon whose inventory is of these directories, and has been scanned. prefix: a command that runs it."""
    with installing(tmp_path, directories, engine, prefix=prefix) as daemon:
        wait_for(lambda: is_scanned(daemon), "the scan", seconds=60)
        yield daemon


@contextmanager
def installing(
    tmp_path: Path, directories: Sequence[Path], engine: str, *, prefix: Sequence[str] = ()
) -> Iterator[Daemon]:
    """The same, while it may still be scanned."""
    config = tmp_path / "stapsdtd.toml"
    config.write_text(
        f"[inventory]\nsystem = false\nstate = {json.dumps(str(tmp_path / 'state'))}\n"
        f"directories = {json.dumps([*map(str, directories)])}\n"
    )
    options = ("--engine", engine, "--config", str(config))
    with running_daemon(tmp_path, *options, prefix=prefix, has_inventory=True) as daemon:
        yield daemon


def is_scanned(daemon: Daemon) -> bool:
    with Client(daemon.target) as client:
        inventory = client.info().inventory
    return inventory is not None and inventory.state is InventoryState.CURRENT


def installed_probes(daemon: Daemon, *selectors: str) -> list[Probe]:
    with Client(daemon.target) as client:
        return list(client.list_probes(selectors, installed=True))


def install(program: Path, path: Path) -> Path:
    return Path(shutil.copy(program, path))


def test_first_and_only_runs_are_seen_completely(
    engine: str, ticker_program: Path, tmp_path: Path, folder: Path
) -> None:
    with installed(tmp_path, [folder], engine) as daemon, Recorder(daemon.target, TICK) as recorder:
        paths = [install(ticker_program, folder / f"program{number}") for number in range(_PROGRAMS)]
        wait_for(lambda: len(recorder.armed()) == _PROGRAMS, "all programs to be armed", seconds=60)
        for path in paths:
            subprocess.run([path, str(_HITS)], check=True, stdout=subprocess.DEVNULL)
    assert recorder.account is not None
    assert recorder.account.fired == recorder.account.delivered == len(recorder.events) == _PROGRAMS * _HITS
    assert recorder.losses == []
    counts = Counter(event.probe.path for event in recorder.events)
    assert counts == dict.fromkeys(map(str, paths), _HITS)


def test_first_jvm_of_the_daemons_life(engine: str, tmp_path: Path) -> None:
    java = Java(java_home())
    selector = "hotspot:class__loaded(arg0:str,arg1)"
    with installed(tmp_path, [java.home], engine) as daemon, Recorder(daemon.target, selector) as recorder:
        assert [status.path for status in recorder.armed()] == [java.libjvm]
        command = [str(java.home / "bin/java"), "-Xlog:class+load", "-version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = re.findall(r"\[class,load\] (\S+) source:", said)
    assert len(names) > 100
    loaded = Counter(name_in(event) for event in recorder.events)
    assert loaded == Counter(name.replace(".", "/") for name in names)


@pytest.mark.parametrize("engine", ["bpf"])
def test_command_waits_until_it_is_known_what_is_installed(engine: str, tmp_path: Path) -> None:
    """The launcher loads libjvm.so, which nobody knows before."""
    java = Java(java_home())
    with installing(tmp_path, [java.home], engine) as daemon:
        command = [str(java.home / "bin/java"), "-Xlog:class+load", "-version"]
        events = tmp_path / "events"
        options = ["--json", "-o", str(events)]
        trace = stapsdt(daemon.target, "trace", "hotspot:class__loaded(class)", *options, "--", *command)
    loaded = [json.loads(line) for line in events.read_text().splitlines()]
    names = re.findall(r"\[class,load\] (\S+) source:", trace.stdout)
    assert len(names) > 100
    assert Counter(each["args"][0] for each in loaded) == Counter(name.replace(".", "/") for name in names)
    assert '"lost": 0' in trace.stderr
    assert f'{{"shared_files": ["{java.libjvm}"]}}' in trace.stderr


def name_in(event: Event) -> str:
    """It is not terminated, so that what follows it is captured too."""
    name, length = event.values
    assert isinstance(name, str)
    assert isinstance(length, int)
    return name[:length]


def test_list_of_what_is_installed(tmp_path: Path, folder: Path, ticker_program: Path) -> None:
    path = install(ticker_program, folder / "program")
    with installed(tmp_path, [folder]) as daemon:
        said = stapsdt(daemon.target, "list", "--installed").stdout.splitlines()
        assert [line.split("\t")[0:5:4] for line in said if line.startswith(TICK)] == [[TICK, str(path)]]
        assert TICK not in stapsdt(daemon.target, "list").stdout
        with Ticker(path) as running:
            (probe,) = installed_probes(daemon, TICK)
            assert probe.pids == (running.pid,)
        wrong = stapsdt(daemon.target, "list", "--installed", f"{TICKER}:tik", check=False)
        assert (wrong.returncode, wrong.stderr) == (
            1,
            f"stapsdt: {TICKER}:tik: no such probe yet; did you mean tick?\n",
        )
        info = stapsdt(daemon.target, "info").stdout
        assert re.search(r"^inventory +\d+ probes in 1 installed file, scanned \d+ s ago *$", info, re.MULTILINE)


def test_restart_knows_what_was_installed(tmp_path: Path, folder: Path, ticker_program: Path) -> None:
    path = install(ticker_program, folder / "program")
    with installed(tmp_path, [folder]) as daemon:
        assert installed_probes(daemon, TICK)
        daemon.kill()
        daemon.restart()
        with Recorder(daemon.target, TICK) as recorder:
            wait_for(recorder.armed, "the program to be armed")
            with Ticker(path) as running:
                running.do("fire 3")
        assert [event.values[0] for event in recorder.events] == [0, 1, 2]


def test_nothing_is_left_of_a_removed_program(tmp_path: Path, folder: Path, ticker_program: Path) -> None:
    path = install(ticker_program, folder / "program")
    with installed(tmp_path, [folder]) as daemon, Recorder(daemon.target, TICK) as recorder:
        assert len(recorder.armed()) == 1
        path.unlink()
        wait_for(lambda: not installed_probes(daemon, TICK), "the inventory to forget it")
        wait_for(lambda: recorder.statuses[-1].state is SiteState.DISARMED, "the site to be disarmed")
        with Client(daemon.target) as client:
            (subscription,) = client.subscriptions()
            assert subscription.account.sites == 0


def test_switched_off_inventory_arms_nothing(tmp_path: Path, folder: Path, ticker_program: Path) -> None:
    install(ticker_program, folder / "program")
    config = tmp_path / "stapsdtd.toml"
    config.write_text(f"[inventory]\nenabled = false\ndirectories = [{json.dumps(str(folder))}]\n")
    with running_daemon(tmp_path, "--config", str(config), has_inventory=True) as daemon:
        with Recorder(daemon.target, TICK) as recorder:
            assert recorder.armed() == []
        refused = stapsdt(daemon.target, "list", "--installed", check=False)
        assert refused.returncode == 1
        assert "this server keeps no inventory of installed files" in refused.stderr


def test_idle_parser(ticker_program: Path) -> None:
    before = children()
    with closing(IdleParser()) as parser, open(ticker_program, "rb") as file:
        assert children() == before
        assert {site.name for site in parser.parse(file.fileno()).sites} == {"tick", "values", "text"}
        (zygote,) = children() - before
        (worker,) = children(zygote)
        assert {os.sched_getscheduler(pid) for pid in (zygote, worker)} == {os.SCHED_IDLE}
        parser.abort()
        with pytest.raises(InventoryError):
            parser.parse(file.fileno())
    assert children() == before


def test_capabilities_of_the_unit_are_enough(tmp_path: Path, folder: Path, ticker_program: Path) -> None:
    install(ticker_program, folder / "bin" / "program").chmod(0o500)
    for path in (folder / "bin" / "program", folder / "bin"):
        os.chown(path, ANNE.uid, ANNE.uid)
    (folder / "bin").chmod(0o500)
    with installed(tmp_path, [folder], prefix=with_capabilities(capabilities())) as daemon:
        assert [probe.path for probe in installed_probes(daemon, TICK)] == [f"{folder}/bin/program"]
        with Recorder(daemon.target, TICK) as recorder:
            subprocess.run(ANNE.command(folder / "bin" / "program", str(_HITS)), check=True, stdout=subprocess.DEVNULL)
        assert len(recorder.events) == _HITS
        wait_for((tmp_path / "state" / "inventory").exists, "it to be kept")


class TestOrdinaryUser:
    def test_first_run_is_seen_completely(
        self, home: Path, folder: Path, ticker_program: Path, tracefs: Tracefs
    ) -> None:
        path = install(ticker_program, folder / "bin" / "program")
        with (
            installed(home, [folder / "bin"]) as daemon,
            ANNE.connecting(daemon.target) as target,
            Recorder(target, TICK) as recorder,
        ):
            # of what no process of hers maps, she hears nothing
            assert recorder.sites == ()
            wait_for(lambda: own(tracefs, daemon.pid), "the file to be armed")
            subprocess.run(ANNE.command(path, str(_HITS)), check=True, stdout=subprocess.DEVNULL)
            wait_for(lambda: len(recorder.events) == _HITS, "her events")
            assert {event.probe.path for event in recorder.events} == {str(path)}
            # even if nobody saw her process before it was over
            wait_for(lambda: [site.path for site in recorder.armed()] == [str(path)], "the site to be told")

    def test_file_that_only_others_run_is_not_patched(self, home: Path, folder: Path, ticker_program: Path) -> None:
        path = install(ticker_program, folder / "bin" / "program")
        with installed(home, [folder / "bin"]) as daemon, ANNE.connecting(daemon.target) as target:
            with Recorder(target, TICK) as recorder, Ticker(*BERT.command(path)) as bert:
                wait_for(lambda: bert.semaphore == 0, "the file to be disarmed")
                bert.do("fire 3")
                with Ticker(*ANNE.command(path)) as anne:
                    wait_for(lambda: anne.semaphore == 1, "the file to be armed")
                    anne.do("fire 5")
            assert [event.values[0] for event in recorder.events] == [0, 1, 2, 3, 4]
            assert recorder.armed()

    def test_file_that_is_not_readable_stays_hidden(self, home: Path, folder: Path, ticker_program: Path) -> None:
        install(ticker_program, folder / "bin" / "program").chmod(0o700)
        with installed(home, [folder / "bin"]) as daemon, ANNE.connecting(daemon.target) as target:
            with Client(target) as client:
                assert not client.list_probes(TICK, installed=True).probes
            assert installed_probes(daemon, TICK)
            with Recorder(target, TICK), Ticker(folder / "bin" / "program") as roots:
                assert roots.semaphore == 0
