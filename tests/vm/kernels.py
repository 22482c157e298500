"""Kernels of Debian's packages, unpacked into the cache and never installed."""

from __future__ import annotations

import lzma
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

CACHE = ROOT / ".cache" / "vm"
LOGS = CACHE / "logs"

MODULES = (
    "virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci",
    "netfs", "fscache", "9pnet", "9pnet_virtio", "9p", "overlay", "fuse",
)  # fmt: skip
"""What mounts the guest's root, and what tests need; each after those it needs. A kernel may have some built in."""


class KernelUnavailableError(Exception):
    """No such kernel can be had on this host, now."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """name: as asked for; package: what it is of; modules: in the order in which they load."""

    name: str
    package: str
    image: Path
    modules: tuple[Path, ...]


def find(name: str, machine: str = "amd64") -> Kernel:
    """Return the newest kernel of a series such as 6.12, or of one package, downloading it where need be.

    Raises KernelUnavailableError.
    """
    package = resolve(name, machine)
    folder = CACHE / package
    if not folder.is_dir():
        _unpack(package, folder)
    return load(name, package, folder)


def load(name: str, package: str, folder: Path) -> Kernel:
    """Return a kernel that `keep` put into a folder. Raises KernelUnavailableError."""
    images = list(folder.glob("vmlinu*"))
    if not images:
        raise KernelUnavailableError(f"{package} holds no kernel")
    found = {path.name.partition(".ko")[0]: path for path in folder.glob("*.ko")}
    return Kernel(name, package, images[0], tuple(found[each] for each in MODULES if each in found))


def resolve(name: str, machine: str) -> str:
    """Return the package's name. Raises KernelUnavailableError where apt knows none."""
    package = newest(_package_names(), name, machine)
    if package is None:
        _apt("apt-get", "update", "-qq")
        package = newest(_package_names(), name, machine)
    if package is None:
        raise KernelUnavailableError(f"apt knows no package of a kernel {name} for {machine}")
    return package


def _package_names() -> list[str]:
    return _apt("apt-cache", "pkgnames", "linux-image-").split()


def newest(packages: list[str], name: str, machine: str) -> str | None:
    """Return the package of a series' newest kernel; name may also be a package's own."""
    if name in packages:
        return name
    pattern = re.compile(rf"linux-image-{re.escape(name)}\.\d[^-]*(-\d+)?-{machine}")
    return max(filter(pattern.fullmatch, packages), key=_release, default=None)


def _release(package: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", package)]


def _unpack(package: str, folder: Path) -> None:
    """The folder appears only when all is in it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        scratch = Path(name)
        _apt("apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", package, folder=scratch)
        (archive,) = scratch.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive), str(scratch / "whole")], check=True)
        keep(scratch / "whole", scratch / "made")
        (scratch / "made").rename(folder)


def keep(root: Path, folder: Path) -> None:
    """Copy from a root what booting takes, which is a tenth of the package."""
    folder.mkdir()
    for image in (root / "boot").glob("vmlinu*"):
        shutil.copy(image, folder)
    for module in MODULES:
        for path in (root / "lib" / "modules").rglob(f"{module}.ko*"):
            content = path.read_bytes()
            (folder / f"{module}.ko").write_bytes(lzma.decompress(content) if path.suffix == ".xz" else content)


def _apt(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise KernelUnavailableError(f"kernels come from apt, and {command[0]} is not here") from error
    except subprocess.CalledProcessError as error:
        raise KernelUnavailableError(f"'{' '.join(command)}' failed: {error.stderr.strip()}") from error
    return done.stdout
