"""The sdist and the wheels of stapsdtd, stapsdtd-client and stapsdtd-provider, as they are built and installed."""

from __future__ import annotations

import email
import os
import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from stapsdtd import __version__
from tests.support import ROOT

_CLIENT, _PROVIDER = "deploy/client", "deploy/provider"
_OBJECT = "stapsdtd/capture/bpf/stapsdt.bpf.o"
_PROTOS = {f"stapsdtd/v1/{name}.proto" for name in ("kernel_functions", "stapsdt")}
_DAEMON_ONLY = {"hpack", "prometheus-client", "psutil", "pyelftools", "pyroute2"}
_NEEDS_EXTRA = "stapsdtd.client.arrow"
_HOST_CHECKS = "stapsdtd.cli.doctor"
"""It looks whether the daemon's modules are there before it imports them."""


@dataclass(frozen=True, slots=True)
class Built:
    """tree: the sdist, unpacked, which the wheels are built from."""

    tree: Path
    sdist: frozenset[str]
    daemon: Path
    client: Path
    provider: Path

    @property
    def wheels(self) -> tuple[Path, Path, Path]:
        return self.provider, self.client, self.daemon


def build(tree: Path, target: str, folder: Path, **environment: str) -> tuple[Path, str]:
    """Return the file that was built, and what was said meanwhile. Without isolation: it would take a minute."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packages")
    archive, _ = build(ROOT, "sdist", folder / "sdist")
    with tarfile.open(archive) as sdist:
        names = frozenset(name.partition("/")[2] for name in sdist.getnames())
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", folder], check=True)
    tree = folder / f"stapsdtd-{__version__}"
    daemon, _ = build(tree, "wheel", folder / "daemon")
    client, _ = build(tree / _CLIENT, "wheel", folder / "client")
    provider, _ = build(tree / _PROVIDER, "wheel", folder / "provider")
    return Built(tree, names, daemon, client, provider)


def files(wheel: Path) -> set[str]:
    """Return the files of its packages."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and ".data/" not in name}


def programs(wheel: Path) -> set[str]:
    """Return the names of programs that are not Python's, and are marked as such."""
    with zipfile.ZipFile(wheel) as archive:
        found = [each for each in archive.infolist() if ".data/scripts/" in each.filename]
        assert all(each.external_attr >> 16 & 0o111 for each in found)
        return {each.filename.rpartition("/")[2] for each in found}


def requirements(wheel: Path, extra: str = "") -> dict[str, Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = map(Requirement, metadata.get_all("Requires-Dist", []))
    return {each.name: each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})}


def test_the_sdist_has_what_the_packages_are_made_of_and_nothing_that_is_made(built: Built) -> None:
    assert built.sdist >= {"proto/buf.yaml", "proto/generate.py", "bpf/stapsdt.bpf.c", "dev"}
    assert built.sdist >= {f"proto/{each}" for each in _PROTOS}
    assert built.sdist >= {f"{_CLIENT}/{name}" for name in ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md")}
    assert built.sdist >= {f"{_PROVIDER}/{name}" for name in ("pyproject.toml", "LICENSE", "README.md")}
    generated = re.compile(r"stapsdtd/v1/.*|stapsdtd/client/sync\.py|.*\.o")
    assert not [name for name in built.sdist if generated.fullmatch(name)]


def test_a_wheel_with_a_bpf_object_is_tagged_for_its_machine(built: Built) -> None:
    assert built.daemon.name == f"stapsdtd-{__version__}-py3-none-linux_{platform.machine()}.whl"
    assert _OBJECT in files(built.daemon)
    assert programs(built.daemon) == {"stapsdtd-opener"}
    assert built.client.name == f"stapsdtd_client-{__version__}-py3-none-any.whl"
    assert built.provider.name == f"stapsdtd_provider-{__version__}-py3-none-any.whl"


def test_the_client_has_no_sdist_of_its_own(built: Built, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=built.tree / _CLIENT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "that of stapsdtd is the source of all" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_wheels_together_have_each_module_once(built: Built) -> None:
    found = [name for wheel in built.wheels for name in files(wheel)]
    assert len(found) == len(set(found))
    in_tree = {path.relative_to(built.tree).as_posix() for path in (built.tree / "stapsdtd").rglob("*.*")}
    assert set(found) == in_tree | _PROTOS


def test_the_provider_requires_nothing_and_the_client_requires_it(built: Built) -> None:
    assert not requirements(built.provider)
    assert str(requirements(built.client)["stapsdtd-provider"].specifier) == f"=={__version__}"
    with zipfile.ZipFile(built.provider) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert email.message_from_bytes(archive.read(name))["Requires-Python"] == ">=3.9"


def test_the_daemon_requires_the_client_of_its_version(built: Built) -> None:
    daemon, client = requirements(built.daemon), requirements(built.client)
    assert str(daemon["stapsdtd-client"].specifier) == f"=={__version__}"
    assert daemon.keys() >= _DAEMON_ONLY
    assert not client.keys() & _DAEMON_ONLY
    for name in daemon.keys() & client.keys():
        assert daemon[name] == client[name]


def test_the_readme_names_what_is_required(built: Built) -> None:
    _, _, table = (ROOT / "README.md").read_text().partition("| package |")
    cells = re.findall(r"^\| ([^|]+) \|", table.partition("\n\n")[0], re.MULTILINE)
    named = {name for cell in cells for name in cell.split(", ") if "the system's" not in name}
    daemon, client = (
        requirements(wheel).keys() - {"stapsdtd-client", "stapsdtd-provider"} for wheel in (built.daemon, built.client)
    )
    assert {name for name in named if name.endswith("*")} == {f"{name}*" for name in daemon - client}
    assert {name for name in named if not name.endswith(("*", "†"))} == client
    optional = requirements(built.client, extra="pandas").keys() - requirements(built.client).keys()
    assert {name for name in named if name.endswith("†")} == {f"{name}†" for name in optional}


def test_the_client_imports_nothing_of_the_daemon(built: Built) -> None:
    own = files(built.client) | files(built.provider)
    modules = {name[:-3].replace("/", ".").removesuffix(".__init__") for name in own}
    graph = grimp.build_graph("stapsdtd", exclude_type_checking_imports=True, cache_dir=None)
    for module in modules & graph.modules - {_HOST_CHECKS}:
        further = graph.find_modules_directly_imported_by(module) - modules
        assert not further, f"{module} imports {further}; pyproject.toml lists the client's modules under exclude"


def environment(folder: Path, *wheels: Path) -> Path:
    """Return the site-packages of a new environment that has the wheels, and none of what they require."""
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*command, "--no-index", "--no-deps", "--disable-pip-version-check", *wheels], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


def link_requirements(site: Path, wheel: Path) -> None:
    """Link what a wheel requires, and what that requires, from this environment. pip would download it."""
    linked = {"stapsdtd-client", "stapsdtd-provider"}
    wanted = list(requirements(wheel).values())
    while wanted:
        name = wanted.pop().name
        if name in linked:
            continue
        linked.add(name)
        found = distribution(name)
        for file in found.files or ():
            link = site / file
            if ".." not in file.parts and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(found.locate_file(file))))
        wanted += _further(map(Requirement, found.requires or ()))


def _further(required: Iterator[Requirement]) -> Iterator[Requirement]:
    return (each for each in required if each.marker is None or each.marker.evaluate({"extra": ""}))


def run(site: Path, *command: str) -> str:
    """Return what a command of an environment prints. Nothing of this one's is seen by it."""
    program, *arguments = command
    path = site.parents[2] / "bin" / program
    done = subprocess.run([path, *arguments], cwd="/", env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def import_all(site: Path, wheel: Path) -> None:
    names = sorted(name[:-3].replace("/", ".").removesuffix(".__init__") for name in files(wheel) if name[-3:] == ".py")
    modules = [name for name in names if not name.endswith(".__main__") and name != _NEEDS_EXTRA]
    assert modules
    run(site, "python", "-c", f"from importlib import import_module\nfor name in {modules}: import_module(name)")


def test_the_provider_alone_in_an_environment(built: Built, tmp_path: Path) -> None:
    site = environment(tmp_path / "venv", built.provider)
    declare = "from stapsdtd.provider import INT32, Provider; p = Provider('shop'); p.probe('sale', INT32); p.load()"
    run(site, "python", "-c", declare)
    import_all(site, built.provider)
    assert not (tmp_path / "venv" / "bin" / "stapsdt").exists()


def test_the_client_in_an_environment(built: Built, tmp_path: Path) -> None:
    site = environment(tmp_path / "venv", built.provider, built.client)
    link_requirements(site, built.client)
    import_all(site, built.client)
    assert run(site, "stapsdt", "--version") == f"stapsdt {__version__}\n"
    for command in ("list", "watch", "trace", "top", "info", "doctor", "completion"):
        assert run(site, "stapsdt", command, "--help").startswith(f"Usage: stapsdt {command}")
    assert "this host: not checked" in run(site, "stapsdt", "--server", "unix:/nowhere/sock", "doctor")
    assert not (tmp_path / "venv" / "bin" / "stapsdtd").exists()


def test_all_in_one_environment(built: Built, tmp_path: Path) -> None:
    site = environment(tmp_path / "venv", *built.wheels)
    for wheel in built.wheels:
        link_requirements(site, wheel)
        import_all(site, wheel)
    assert run(site, "stapsdtd", "--version") == f"stapsdtd {__version__}\n"
    assert "not checked" not in run(site, "stapsdt", "--server", "unix:/nowhere/sock", "doctor")
    remove = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv" / "bin" / "python"), "uninstall", "-q"]
    subprocess.run([*remove, "-y", "--disable-pip-version-check", "stapsdtd"], check=True)
    import_all(site, built.client)
    subprocess.run([*remove, "-y", "--disable-pip-version-check", "stapsdtd-client"], check=True)
    import_all(site, built.provider)


def test_without_clang_one_line_says_so_and_the_wheel_is_for_any_machine(built: Built, tmp_path: Path) -> None:
    """Last, since it takes an earlier object away: one that nobody knows the source of."""
    assert (built.tree / _OBJECT).exists()
    wheel, said = build(built.tree, "wheel", tmp_path / "built", PATH=str(tmp_path))
    (line,) = [line for line in said.splitlines() if "bpf" in line]
    assert line == (
        "stapsdtd: building without the bpf engine: clang is missing (apt-get install clang libbpf-dev); "
        "the ftrace engine works without"
    )
    assert "stapsdtd: building without the opener of perf events: clang is missing (apt-get install clang)\n" in said
    assert not programs(wheel)
    assert wheel.name == f"stapsdtd-{__version__}-py3-none-any.whl"
    assert files(wheel) == files(built.daemon) - {_OBJECT}
