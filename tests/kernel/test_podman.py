"""Containers as users have them: of Podman and runc, several of one image, rootless ones, and one with the daemon."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import pytest

from stapsdtd.client import Client, ServerUnavailableError
from stapsdtd.kernel import function_hooks
from tests.daemon_image import changes, root_tar
from tests.podman import Container, Podman, podman_of, podman_of_root
from tests.support import ROOT, TICKER, Daemon, Recorder, compile_target, running_daemon, stapsdt, wait_for
from tests.units import capabilities, with_capabilities
from tests.users import ANNE, public_folder

pytestmark = pytest.mark.kernel

HITS = 200
ROUNDS = 20
TICK = f"{TICKER}:tick(arg0)"
TICKING = ("ticking", "/ticker")
"""An image, and its program."""


@pytest.fixture(scope="module")
def ticking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one static program."""
    folder = tmp_path_factory.mktemp("ticking")
    flags = (f"-DPROVIDER={TICKER}", "-static", "-Wl,--no-warnings", "-ldl", "-lpthread")
    program = compile_target("ticker.c", folder / "ticker", *flags)
    with tarfile.open(folder / "root.tar", "w") as tar:
        tar.add(program, "ticker")
    return folder / "root.tar"


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory, ticking: Path) -> Iterator[Podman]:
    with podman_of_root(tmp_path_factory.mktemp("podman")) as podman:
        podman.import_image(TICKING[0], ticking)
        yield podman


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, podman: Podman) -> Path:
    path = tmp_path_factory.mktemp("settings") / "stapsdtd.toml"
    path.write_text(f"[containers]\ndocker = []\ncontainerd = []\nstorage = [{json.dumps(str(podman.storage))}]\n")
    return path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, settings: Path) -> Iterator[Daemon]:
    """With the unit's capabilities."""
    command = with_capabilities(capabilities())
    with running_daemon(tmp_path_factory.mktemp("daemon"), "--config", str(settings), prefix=command) as started:
        yield started


@pytest.fixture(scope="module")
def three(podman: Podman) -> Iterator[list[Container]]:
    """Three containers of one image."""
    with ExitStack() as stack:
        yield [stack.enter_context(Container(podman, name, *TICKING)) for name in ("web", "shop", "db")]


def fire(containers: Iterable[Container]) -> None:
    """At the same time."""
    for container in containers:
        container.ticker.begin(f"fire {HITS}")
    for container in containers:
        container.ticker.finish()


def hits(recorder: Recorder) -> Counter[tuple[int, object]]:
    """How often each process fired in each container."""
    return Counter((event.pid, event.values[-1]) for event in recorder.events)


def test_each_hit_is_delivered_once_and_with_its_container(daemon: Daemon, three: list[Container]) -> None:
    with Recorder(daemon.target, TICK, fields=["container"]) as recorder:
        fire(three)
    assert hits(recorder) == {(each.pid, each.id): HITS for each in three}
    for each in three:
        assert {event.values[0] for event in recorder.events if event.pid == each.pid} == set(range(HITS))
    account = recorder.finish()
    assert (account.fired, account.delivered, account.lost) == (3 * HITS, 3 * HITS, 0)


def test_container_by_its_name(daemon: Daemon, three: list[Container]) -> None:
    shop = three[1]
    with Client(daemon.target) as client:
        (process,) = client.list_probes(TICK.partition("(")[0], containers=["shop"], details=True).processes
    assert (process.pid, process.container_id, process.container_name) == (shop.pid, shop.id, "shop")
    with Recorder(daemon.target, TICK, containers=["shop"], fields=["container"]) as recorder:
        fire(three)
    assert hits(recorder) == {(shop.pid, shop.id): HITS}
    nobody = stapsdt(daemon.target, "list", "--container", "shoe", check=False)
    assert nobody.returncode == 2
    assert "no cgroup of the unified hierarchy is named after a container 'shoe'" in nobody.stderr


def test_stopped_and_started_again(daemon: Daemon, three: list[Container]) -> None:
    again = three[2]
    before = again.pid
    with Recorder(daemon.target, TICK, fields=["container"]) as recorder:
        fire(three)
        again.restart()
        fire(three)
    assert again.pid != before
    expected = {(each.pid, each.id): 2 * HITS for each in three if each is not again}
    assert hits(recorder) == expected | {(before, again.id): HITS, (again.pid, again.id): HITS}


def test_containers_that_come_and_go(daemon: Daemon, podman: Podman, three: list[Container]) -> None:
    """A new one's first hit counts, too: its program is armed since others run it."""
    with Recorder(daemon.target, TICK, fields=["container"]) as recorder:

        def come_and_go(number: int) -> tuple[int, str]:
            with Container(podman, f"round{number}", *TICKING) as container:
                fire([container])
                seen = (container.pid, container.id)
                # before its cgroup goes, by which the container is told
                wait_for(lambda: hits(recorder)[seen] >= HITS, "the hits to be delivered")
                return seen

        with ThreadPoolExecutor(2) as executor:
            seen = list(executor.map(come_and_go, range(ROUNDS)))
        fire(three)
    assert len(set(seen)) == ROUNDS
    assert hits(recorder) == dict.fromkeys([*seen, *((each.pid, each.id) for each in three)], HITS)
    assert recorder.finish().lost == 0


def test_rootless(daemon: Daemon, ticking: Path, three: list[Container]) -> None:
    """A user's own containers are on overlays that a user namespace mounted, and count for that user."""
    with public_folder() as folder, podman_of(ANNE, folder) as podman:
        # pytest's own folders are root's alone
        podman.import_image(TICKING[0], Path(shutil.copy(ticking, folder)))
        with Container(podman, "one", *TICKING) as one, Container(podman, "other", *TICKING) as other:
            with Recorder(daemon.target, TICK, fields=["uid"]) as recorder:
                fire([one, other, three[0]])
            assert hits(recorder) == {(one.pid, ANNE.uid): HITS, (other.pid, ANNE.uid): HITS, (three[0].pid, 0): HITS}


def documented_options(folders: Path) -> list[str]:
    """What docs/operating.md gives the daemon's container. The folders that it names are made below the test's own."""
    document = (ROOT / "docs" / "operating.md").read_text()
    found = re.search(r"^docker run (.+?) stapsdtd$", document, re.MULTILINE | re.DOTALL)
    assert found is not None
    options = shlex.split(found[1].replace("\\\n", " "))
    for path in ("/run/stapsdtd", "/var/lib/stapsdtd"):
        own = folders / path.lstrip("/")
        own.mkdir(parents=True)
        options[options.index(f"--volume={path}:{path}")] = f"--volume={own}:{path}"
    return options


@pytest.fixture
def daemon_inside(podman: Podman, settings: Path, tmp_path: Path) -> Iterator[str]:
    """Where a daemon listens that runs in a container of its own, with what is documented."""
    podman.import_image("stapsdtd", root_tar(tmp_path), *changes())
    with public_folder() as folders:
        # where the first process's root may not be looked at, names of containers are found at the same paths
        state = podman.storage / "overlay-containers"
        mounts = (f"{settings}:/etc/stapsdtd/stapsdtd.toml:ro", f"{state}:{state}:ro")
        options = [*documented_options(folders), *(f"--volume={mount}" for mount in mounts)]
        # the command of the image's, as a scan of the host's files would take a processor away from other tests
        command = ("stapsdtd", "--config", "/etc/stapsdtd/stapsdtd.toml", "--no-inventory")
        log = tmp_path / "daemon.log"
        with open(log, "wb") as written:
            run = Popen(podman.run_command("--name=stapsdtd", *options, *command), cwd=ROOT, stderr=written)
        try:
            target = f"unix:{folders}/run/stapsdtd/stapsdtd.sock"
            wait_for(lambda: run.poll() is not None or is_serving(target), "the daemon to serve", seconds=60)
            if run.poll() is None:
                yield target
                podman("stop", "stapsdtd")
            assert run.wait() == 0, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            podman("rm", "--force", "--time=0", "--ignore", "stapsdtd")
            run.wait()


def is_serving(target: str) -> bool:
    with Client(target) as client:
        try:
            return bool(client.info())
        except ServerUnavailableError:
            return False


@pytest.mark.timeout(600)
def test_daemon_in_a_container_traces_the_others(daemon_inside: str, podman: Podman, three: list[Container]) -> None:
    """As it does on the host: with all that the unit has, and the bpf engine."""
    with Client(daemon_inside) as client:
        info = client.info()
        lacking = {feature.name: feature.detail for feature in info.features if not feature.available}
        listing = client.list_probes(TICK.partition("(")[0], containers=["shop"], details=True)
    assert info.engine == "bpf", lacking
    assert not lacking.keys() - {*function_hooks.NAMES}, lacking
    assert [(each.pid, each.container_name) for each in listing.processes] == [(three[1].pid, "shop")]
    with Recorder(daemon_inside, TICK, fields=["container"]) as recorder:
        fire(three)
        with Container(podman, "later", *TICKING) as later:
            fire([later])
            wait_for(lambda: hits(recorder)[later.pid, later.id] >= HITS, "the hits to be delivered")
    assert hits(recorder) == {(each.pid, each.id): HITS for each in (*three, later)}
    # as Kubernetes asks whether it lives
    assert "bpf" in podman("exec", "stapsdtd", "/opt/stapsdtd/bin/stapsdt", "info")
