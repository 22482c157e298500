"""Which runtimes there are on this host, and why one of them may have no probes.

Only programs that $PATH leads to are run, with a question about themselves; they are what the user would run anyway.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, glob

from stapsdtd.globs import matches

NO_NOTES = "has no stapsdt note"
"""What the server says of a file without probes, whose list is refused."""
_TIMEOUT_SECONDS = 20.0
_PYTHON_REMEDY = (
    "configure it --with-dtrace, for which systemtap-sdt-dev has dtrace, or use one that was, such as Debian 12's"
)
_JAVA_CAUSE = "it was built without --enable-dtrace"
_JAVA_REMEDY = "use one that was configured with --enable-dtrace, such as Debian's openjdk-17-jre-headless or Temurin"
_PHP_REMEDY = "configure it with --enable-dtrace; it fires most only with USE_ZEND_DTRACE=1 in its environment"
_PYTHON = """
import json, os, sys, sysconfig
get = sysconfig.get_config_var
shared = os.path.join(get("LIBDIR") or "", get("INSTSONAME") or "") if get("Py_ENABLE_SHARED") else ""
executable = os.path.realpath(sys.executable)
print(json.dumps([executable, shared, sys.version.split()[0], get("WITH_DTRACE")]))
"""
_RUBY = """
require "json"
config = RbConfig::CONFIG
shared = config["ENABLE_SHARED"] == "yes" ? File.join(config["libdir"], config["LIBRUBY_SO"]) : ""
puts JSON.generate([RbConfig.ruby, shared, RUBY_VERSION])
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """A runtime in $PATH. files: the first with probes has its own. cause: why it may have none; remedy: what helps."""

    name: str
    files: tuple[str, ...]
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Runtime:
    """programs: what it is called. providers: of its probes. installed: asks a program about itself. libraries: where
    others than the program have the probes, as globs from the program's folder. cause: why one may have none, and
    remedy: what helps, as far as that does not depend on its version.
    """

    programs: re.Pattern[str]
    providers: tuple[str, ...]
    installed: Callable[[str], Installed | None]
    cause: str
    remedy: str
    libraries: tuple[str, ...] = ()


def _python(program: str) -> Installed | None:
    try:
        # isolated, so that no module of the current directory is run
        executable, shared, version, with_dtrace = _answer(_output(program, "-I", "-c", _PYTHON))
    except (ValueError, TypeError):
        return None
    cause = f"it was configured {'--with-dtrace, but lacks them' if with_dtrace else 'without --with-dtrace'}"
    # Debian's program has a copy of what its library has
    return Installed(f"CPython {version}", (executable, *filter(None, [shared])), cause, _PYTHON_REMEDY)


def _java(program: str) -> Installed | None:
    said = _output(program, "-XshowSettings:properties", "-version")
    properties = dict(re.findall(r"^ *(java\.home|java\.version|java\.vm\.name) = (.*)$", said, re.MULTILINE))
    home = properties.get("java.home", "")
    files = [path for where in ("lib", "lib/*") for path in glob(f"{escape(home)}/{where}/server/libjvm.so")]
    if not home or not files:
        return None
    name = f"{properties.get('java.vm.name', 'the JVM')} {properties.get('java.version', '')}".rstrip()
    return Installed(name, (files[0],), _JAVA_CAUSE, _JAVA_REMEDY)


def _node(program: str) -> Installed | None:
    version, _, executable = _output(program, "-p", "process.version + ' ' + process.execPath").strip().partition(" ")
    match = re.fullmatch(r"v(\d+)\.\d+\.\d++.*", version)
    if match is None:
        return None
    if int(match[1]) >= 19:
        remedy = "no build of it has any; up to 18, configure it --with-dtrace"
        return Installed(f"Node.js {version}", (executable,), "Node.js 19 and later have none", remedy)
    return Installed(
        f"Node.js {version}", (executable,), "it was configured without --with-dtrace", "configure it --with-dtrace"
    )


def _php(program: str) -> Installed | None:
    match = re.match(r"PHP (\d[\w.+~-]*)", _output(program, "-v"))
    if match is None:
        return None
    cause = "it was configured without --enable-dtrace"
    return Installed(f"PHP {match[1]}", (os.path.realpath(program),), cause, _PHP_REMEDY)


def _ruby(program: str) -> Installed | None:
    try:
        executable, shared, version = _answer(_output(program, "-rrbconfig", "-e", _RUBY))
    except (ValueError, TypeError):
        return None
    cause, remedy = "it was configured without --enable-dtrace", "configure it with --enable-dtrace"
    return Installed(f"Ruby {version}", (executable, *filter(None, [shared])), cause, remedy)


def _mysql(program: str) -> Installed | None:
    said = _output(program, "--version")
    match = re.search(r"Ver (\d+)\.(\d[\w.-]*)", said)
    if match is None:
        return None
    file, version = os.path.realpath(program), f"{match[1]}.{match[2]}"
    if "MariaDB" in said:
        cause, remedy = (
            "it was built without ENABLE_DTRACE",
            "build it with -DENABLE_DTRACE=1, where its source has that",
        )
        return Installed(f"MariaDB {version}", (file,), cause, remedy)
    if int(match[1]) >= 8:
        remedy = "no build of it has any; MySQL 5.7 can be built with -DENABLE_DTRACE=1"
        return Installed(f"MySQL {version}", (file,), "MySQL 8.0 and later have none", remedy)
    cause, remedy = "it was built without ENABLE_DTRACE", "build it with -DENABLE_DTRACE=1"
    return Installed(f"MySQL {version}", (file,), cause, remedy)


RUNTIMES: Mapping[str, Runtime] = {
    "python": Runtime(
        re.compile(r"python(3(\.\d+)?t?)?"),
        ("python",),
        _python,
        "it was configured without --with-dtrace",
        _PYTHON_REMEDY,
        libraries=("../lib/libpython3*.so.*", "../lib/*/libpython3*.so.*"),
    ),
    "java": Runtime(
        re.compile(r"java"),
        ("hotspot", "hotspot_jni"),
        _java,
        _JAVA_CAUSE,
        _JAVA_REMEDY,
        libraries=("../lib/server/libjvm.so", "../lib/*/server/libjvm.so", "../jre/lib/*/server/libjvm.so"),
    ),
    "node": Runtime(
        re.compile(r"node(js)?"),
        ("node",),
        _node,
        "it was configured without --with-dtrace, or is version 19 or later, which has none",
        "up to 18, configure it --with-dtrace",
    ),
    "php": Runtime(
        re.compile(r"php(-fpm)?[\d.]*"), ("php",), _php, "it was configured without --enable-dtrace", _PHP_REMEDY
    ),
    "ruby": Runtime(
        re.compile(r"ruby[\d.]*"),
        ("ruby",),
        _ruby,
        "it was configured without --enable-dtrace",
        "configure it with --enable-dtrace",
        libraries=("../lib/libruby*.so.*", "../lib/*/libruby*.so.*"),
    ),
    "mysql": Runtime(
        re.compile(r"mysqld|mariadbd"),
        ("mysql",),
        _mysql,
        "it was built without ENABLE_DTRACE, or is MySQL 8.0 or later, which has none",
        "build it with -DENABLE_DTRACE=1, where its source has that",
    ),
}


def runtime_of(program: str) -> str | None:
    """Return which runtime a program is, by its name, None if none is known."""
    name = os.path.basename(program.removesuffix(" (deleted)"))
    return next((each for each, runtime in RUNTIMES.items() if runtime.programs.fullmatch(name)), None)


def has_runtime(runtime: Runtime, files: Iterable[str]) -> bool:
    """Report whether files, of one program, are called like the runtime's program or one of its libraries."""
    libraries = [os.path.basename(each) for each in runtime.libraries]
    names = [os.path.basename(each.removesuffix(" (deleted)")) for each in files]
    return any(runtime.programs.fullmatch(name) or any(matches(name, each) for each in libraries) for name in names)


def files_of(runtime: Runtime, program: str) -> list[str]:
    """Return the files of a program that may have its probes: it, and its libraries."""
    real = os.path.realpath(program)
    found = (path for each in runtime.libraries for path in glob(f"{escape(os.path.dirname(real))}/{each}"))
    return list(dict.fromkeys([real, *map(os.path.realpath, found)]))


def installed(runtime: Runtime, path: str) -> list[Installed]:
    """Return the runtimes that a $PATH leads to, each once."""
    found = (each for program in _programs(runtime, path) if (each := runtime.installed(program)))
    return list({each.files: each for each in found}.values())


def running(runtime: Runtime) -> dict[int, str]:
    """Return the processes that run it, and their programs: those of this user, for root all."""
    processes = {}
    for entry in glob("/proc/[0-9]*/exe"):
        # it may have ended, or be another user's
        with suppress(OSError):
            program = os.readlink(entry)
            if runtime.programs.fullmatch(os.path.basename(program.removesuffix(" (deleted)"))):
                processes[int(entry.split("/")[2])] = program
    return processes


def _programs(runtime: Runtime, path: str) -> Iterator[str]:
    seen = set()
    for folder in filter(None, path.split(os.pathsep)):
        names: list[str] = []
        with suppress(OSError):
            names = sorted(os.listdir(folder))
        for program in (os.path.join(folder, name) for name in names if runtime.programs.fullmatch(name)):
            # a script that chooses a version may have several names
            if (real := os.path.realpath(program)) not in seen and os.access(program, os.X_OK):
                seen.add(real)
                yield program


def _answer(said: str) -> list[str]:
    """Return what a program says of itself in its last line, behind what it warns of. Raises ValueError."""
    *_, last = said.splitlines() or [""]
    answer: list[str] = json.loads(last)
    return answer


def _output(*command: str) -> str:
    """Return what a program says; nothing if it cannot be run, fails or takes too long."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_SECONDS,
            check=True,
            text=True,
            errors="replace",
        ).stdout
    return ""
