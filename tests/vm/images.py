"""Disks with Debian as its users have it: systemd is PID 1, and this tree is installed by `./dev install`.

    packages  a root of Debian's packages, and wheels of everything that the project needs from elsewhere
    disk      a file system with that root, in which this tree is installed, and the tests' environment

Both stay in the cache until something changes that they are made from: the packages if the lists of packages do, the
disk if the tree does. Each appears there only when it is complete. What is mounted while they are made is mounted in a
mount namespace of its own, and is gone with it, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.daemon_image import SOURCES
from tests.support import ROOT, TARGETS
from tests.vm.kernels import CACHE, LOGS

TREE = "/usr/local/src/stapsdtd"
"""Where the guest has the tree that is installed."""
ENVIRONMENT = "/opt/tests"
"""The guest's virtual environment with pytest and stapsdtd-client, apart from that of the service."""
WHEELS = "/usr/local/share/wheels"
USER = "alice"
"""An ordinary user of the guest."""

_PACKAGES = (
    "systemd", "systemd-sysv", "udev", "dbus", "linux-image-amd64", "initramfs-tools",
    "clang", "libbpf-dev", "libbpf1", "python3", "python3-venv",
    "passwd", "systemd-container", "systemtap-sdt-dev", "util-linux",
)  # fmt: skip
"""The machine, what `./dev install` would install (the guest has no network), and what the tests use."""
_TESTING = ("pytest>=8.3", "pytest-timeout>=2.3")
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux2014", "manylinux_2_17")
_PROGRAMS = {
    "cold": ("cold.c", ""),
    "fire": ("fire.c", "-lpthread"),
    "longnop5": ("longnop.c", "-DNOP_BYTES=5"),
    "spanner": ("spanner.c", "-lpthread"),
}
"""What is compiled into /usr/local/bin: its source in tests/targets, and flags."""
_DISK_SIZE = "4G"
_SECONDS = 1200
"""When to give up on one step; a busy host takes a tenth of it."""

_FSTAB = "/dev/vda / ext4 defaults 0 1\n"
_UNIT_NAME = "run-command.service"
_UNIT = """\
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=HOME=/root LC_ALL=C.UTF-8
ExecStartPre=/bin/mkdir -p /run/share
ExecStartPre=/sbin/modprobe 9pnet_virtio
ExecStartPre=/bin/mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 share /run/share
ExecStart=/bin/sh -c '/bin/sh /run/share/command </dev/null >/dev/ttyS1 2>&1; echo $? >/run/share/status'
ExecStopPost=/bin/systemctl poweroff --force
"""
"""Runs the command that the host puts into the shared folder, with its output to the second serial line."""
_UNWANTED = ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "fstrim.timer", "dpkg-db-backup.timer")
"""Units that would take the tests' time."""

_ROOT_SCRIPT = f"""
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir "$root{WHEELS}"
mount --bind "$wheels" "$root{WHEELS}"
chroot "$root" useradd --create-home --shell /bin/bash {USER}
chroot "$root" python3 -m venv {ENVIRONMENT}
chroot "$root" {ENVIRONMENT}/bin/python -m pip install -q --no-index --find-links {WHEELS} "$@"
"""
"""root, wheels: folders. The arguments are what pip installs."""
_DISK_SCRIPT = f"""
mount -t overlay overlay -o "lowerdir=$packages/root,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
mkdir -p "$root{TREE}"
cp -a "$tree/." "$root{TREE}"
cp "$packages"/wheels/* "$root{WHEELS}"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
chroot "$root" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \\
    PIP_NO_INDEX=1 PIP_FIND_LINKS={WHEELS} PIP_NO_CACHE_DIR=1 sh -ec '
        cd {TREE}
        ./dev install
        # which it leaves to where systemd runs
        systemctl enable stapsdtd.socket
        {ENVIRONMENT}/bin/python -m pip install -q --no-deps --no-build-isolation ./deploy/provider ./deploy/client
        for program in "$@"; do
            eval "clang -O2 -g -o /usr/local/bin/$program"
        done' install "$@"
umount -R "$root/dev" "$root/proc"
mke2fs -q -t ext4 -d "$root" "$disk" {_DISK_SIZE}
"""
"""packages, tree, scratch, root, disk: paths. The arguments are programs, with what compiles them."""


class ImageError(Exception):
    """A step of making an image failed, or took too long."""


@dataclass(frozen=True, slots=True)
class System:
    """A release of Debian: its number, its name in the archive, and its version of Python."""

    name: str
    suite: str
    python: str


SYSTEMS = {system.name: system for system in (System("12", "bookworm", "3.11"), System("13", "trixie", "3.13"))}


@dataclass(frozen=True, slots=True)
class Image:
    """What qemu boots."""

    kernel: Path
    initrd: Path
    disk: Path


def find(system: System) -> Image:
    """Return a system's image, making it where need be. Raises ImageError."""
    key = _digest([*_PACKAGES, *_requirements(), _ROOT_SCRIPT, _UNIT, *_UNWANTED])
    packages = _kept(f"packages-{system.suite}", key, lambda folder: _make_packages(system, folder))
    key = _digest([key, _DISK_SCRIPT, str(_PROGRAMS), *map(_text, _sources())])
    disk = _kept(f"disk-{system.suite}", key, lambda folder: _make_disk(packages, folder))
    boot = packages / "root" / "boot"
    (kernel,), (initrd,) = boot.glob("vmlinuz-*"), boot.glob("initrd.img-*")
    return Image(kernel, initrd, disk / "disk")


def _kept(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, which `make` fills where it does not exist; others of its name are removed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / f"{name}-{key}"
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            # of other keys, or of a run that was killed
            for old in CACHE.glob(f"{name}-*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=CACHE) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(folder)
    return folder


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _sources() -> list[Path]:
    """Return the files that a disk is made from, in one order."""
    found = [
        path for name in SOURCES for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    found += [TARGETS / source for source, _ in _PROGRAMS.values()]
    return sorted(path for path in found if path.is_file() and not _is_made(path))


def _is_made(path: Path) -> bool:
    """Report whether a file of the tree is made by building or running it."""
    made = {"sync.py", "stapsdtd-opener"}
    return path.suffix in {".o", ".pyc"} or path.name in made or path.parent == ROOT / "stapsdtd" / "v1"


def _text(path: Path) -> str:
    return f"{path.relative_to(ROOT)} {path.stat().st_mode:o} {path.read_bytes().hex()}"


def _requirements() -> list[str]:
    """Return what building and running both distributions takes, and the tests."""
    wanted = set(_TESTING)
    for folder in (ROOT / "deploy" / "client", ROOT):
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        wanted |= {*project["project"]["dependencies"], *project["build-system"]["requires"]}
    return sorted(each for each in wanted if not each.startswith("stapsdtd"))


def _make_packages(system: System, folder: Path) -> None:
    root, wheels = folder / "root", folder / "wheels"
    platforms = [f"--platform={each}_x86_64" for each in _PLATFORMS]
    _run("fetching wheels", {}, sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check",
         "--only-binary=:all:", "--python-version", system.python, *platforms, "--dest", str(wheels), *_requirements(),
         "pip", "setuptools")  # fmt: skip
    _run("fetching Debian's packages", {}, "mmdebstrap", "--quiet", "--variant=apt", f"--include={','.join(_PACKAGES)}",
         "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*", system.suite,
         str(root))  # fmt: skip
    _run("setting up the tests' environment", {"root": root, "wheels": wheels}, "sh", "-ec", _ROOT_SCRIPT, "root",
         *_requirements())  # fmt: skip
    (root / "etc" / "fstab").write_text(_FSTAB)
    (root / "etc" / "hostname").write_text(f"debian{system.name}\n")
    (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost debian{system.name}\n")
    units = root / "etc" / "systemd" / "system"
    (units / _UNIT_NAME).write_text(_UNIT)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants" / _UNIT_NAME).symlink_to(f"../{_UNIT_NAME}")
    for name in _UNWANTED:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")


def _make_disk(packages: Path, folder: Path) -> None:
    scratch = folder.parent
    tree = scratch / "tree"
    for path in _sources():
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    paths = {"packages": packages, "tree": tree, "scratch": scratch, "root": scratch / "root", "disk": folder / "disk"}
    for name in ("upper", "work", "root"):
        (scratch / name).mkdir()
    programs = [f"{name} tests/targets/{source} {flags}" for name, (source, flags) in _PROGRAMS.items()]
    _run("installing this tree", paths, "sh", "-ec", _DISK_SCRIPT, "disk", *programs)


def _run(what: str, paths: dict[str, Path], *command: str) -> None:
    """Run a command in mount and pid namespaces of its own. paths: variables of its environment. Raises ImageError."""
    # however this process ends, the command ends with it
    apart = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
    variables = {**os.environ, **{name: str(path) for name, path in paths.items()}}
    try:
        subprocess.run(
            [*apart, *command], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", check=True, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"{what} took longer than {_SECONDS} s") from error
    except subprocess.CalledProcessError as error:
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{what.replace(' ', '-')}.log"
        log.write_text(error.stdout)
        last = error.stdout.strip().rpartition("\n")[2]
        raise ImageError(f"{what} failed: {last} (more in {log.relative_to(ROOT)})") from error
