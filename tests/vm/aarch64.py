"""An aarch64 root: Debian's packages, unpacked and not configured, and the wheels that the daemon and pytest need.

Nothing of it runs on this host. It stays in the cache until something that it is made of changes.
"""

from __future__ import annotations

import hashlib
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.ground_truth import SDT_HEADERS
from tests.support import ROOT, TARGETS
from tests.vm import initrd, kernels
from tests.vm.guest import Machine
from tests.vm.kernels import CACHE, KernelUnavailableError

_SUITE = "bookworm"
_PYTHON = "3.11"
"""The suite's."""
_PACKAGES = ("python3", "libbpf1", "libstdc++6", "dash", "coreutils", "util-linux", "mount", "procps", "busybox-static")
_TESTING = ("pytest", "pytest-timeout")
_WHEELS = ("manylinux_2_28", "manylinux_2_27", "manylinux2014", "manylinux_2_17")
_COMMAND = "#!/usr/bin/python3\nimport sys\nfrom stapsdtd.cli.{name} import main\nsys.exit(main())\n"
_BPF_OBJECT = "stapsdtd/capture/bpf/stapsdt.bpf.o"


def machine(name: str) -> Machine:
    """Return a machine with the newest kernel of a series. Raises KernelUnavailableError."""
    # the packages of all architectures are released together, and this host's apt may know none of the others
    package = kernels.resolve(name, "amd64").removesuffix("amd64") + "arm64"
    folder = CACHE / f"aarch64-{_key(package)}"
    if not folder.is_dir():
        for old in CACHE.glob("aarch64-*"):
            shutil.rmtree(old)
        _make(package, folder)
    root = folder / "root"
    return Machine(
        "aarch64", kernels.load(name, package, folder / "kernel"), ("qemu-system-aarch64", "-M", "virt", "-cpu",
        "max,pauth-impdef=on"), "ttyAMA0", root, root / "bin" / "busybox", "/usr/bin",
        {"STAPSDTD_TARGETS": initrd.SHARE}, _provide, f"cp {initrd.SHARE}/stapsdt.bpf.o {_BPF_OBJECT}",
    )  # fmt: skip


def _requirements() -> list[str]:
    client, daemon = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in ("deploy/client", ".")
    )
    needed = {*client["dependencies"], *daemon["dependencies"]}
    testing = daemon["optional-dependencies"]["dev"]
    return [
        *sorted(each for each in needed if not each.startswith("stapsdtd")),
        *(each for each in testing if re.split(r"[<>=]", each)[0] in _TESTING),
    ]


def _key(package: str) -> str:
    parts = [package, *_PACKAGES, *_requirements(), Path(__file__).read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _make(package: str, folder: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        made = Path(name) / "made"
        root = made / "root"
        made.mkdir()
        include = ",".join([*_PACKAGES, package])
        _run("mmdebstrap", "--arch=arm64", "--variant=extract", f"--include={include}", _SUITE, str(root))
        kernels.keep(root, made / "kernel")
        for each in (root / "boot", root / "lib" / "modules"):
            shutil.rmtree(each)
        _configure(root)
        _install(root / "usr" / "lib" / "python3" / "dist-packages")
        # else every start compiles what it imports
        _run(sys.executable, "-m", "compileall", "-q", "-s", str(root), str(root / "usr" / "lib" / f"python{_PYTHON}"))
        made.rename(folder)


def _configure(root: Path) -> None:
    """What the packages' own scripts would have done, as far as it is needed."""
    (root / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "usr" / "bin" / "python").symlink_to("python3")
    for mount_point in ("proc", "sys", "dev", "run", "tmp", "root", str(ROOT).lstrip("/")):
        (root / mount_point).mkdir(parents=True, exist_ok=True)
    for name in ("stapsdt", "stapsdtd"):
        command = root / "usr" / "bin" / name
        command.write_text(_COMMAND.format(name=name))
        command.chmod(0o755)


def _install(folder: Path) -> None:
    platforms = [f"--platform={each}_aarch64" for each in _WHEELS]
    wanted = ["--python-version", _PYTHON, "--only-binary=:all:", "--target", str(folder)]
    _run(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *platforms, *wanted,
         *_requirements())  # fmt: skip
    (folder / "stapsdtd.pth").write_text(f"{ROOT}\n")


def _provide(share: Path) -> None:
    """Compile what the guest, which has no compiler, would."""
    build = runpy.run_path(str(ROOT / "bpf" / "build.py"))["command"]
    _run(*build("aarch64", "/usr/aarch64-linux-gnu/include", share / "stapsdt.bpf.o"))
    # apart from the host's other headers, which are not those of another machine
    headers = share / "include" / "sys"
    headers.mkdir(parents=True, exist_ok=True)
    for header in SDT_HEADERS.glob("sdt*.h"):
        shutil.copy(header, headers)
    compiler = ("aarch64-linux-gnu-gcc", "-O2", "-g", f"-I{headers.parent}")
    for name in ("ticker", "calls"):
        _run(*compiler, "-o", str(share / name), str(TARGETS / f"{name}.c"), "-lpthread")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise KernelUnavailableError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise KernelUnavailableError(f"'{' '.join(command)}' failed: {error.stderr.strip()}") from error
