"""Programs in $PATH that answer as runtimes do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stapsdtd.cli.runtimes import RUNTIMES, Installed, has_runtime, installed, running


def program(folder: Path, name: str, said: str, *, code: int = 0) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return path


def found(name: str, *folders: Path) -> list[Installed]:
    return installed(RUNTIMES[name], os.pathsep.join(map(str, folders)))


def test_this_python_says_how_it_was_configured() -> None:
    # an environment may have copies of it
    by_file = {each.files[0]: each for each in found("python", Path(sys.executable).parent)}
    each = by_file[os.path.realpath(sys.executable)]
    assert each.name == f"CPython {sys.version.split()[0]}"
    assert each.cause.startswith("it was configured ")


def test_a_jvm_is_looked_for_where_it_says_it_is(tmp_path: Path) -> None:
    library = tmp_path / "[jdk]" / "lib" / "server" / "libjvm.so"
    library.parent.mkdir(parents=True)
    library.touch()
    said = f"    java.home = {tmp_path / '[jdk]'}\n    java.version = 17.0.1\n    java.vm.name = OpenJDK VM"
    program(tmp_path, "java", said)
    (each,) = found("java", tmp_path)
    assert (each.name, each.files) == ("OpenJDK VM 17.0.1", (str(library),))
    library.unlink()
    assert found("java", tmp_path) == []


@pytest.mark.parametrize(
    ("called", "said", "is_named", "cause"),
    [
        ("node", "v18.1.0 /opt/node", "Node.js v18.1.0", "configured without --with-dtrace"),
        ("nodejs", "v19.0.0 /opt/node", "Node.js v19.0.0", "Node.js 19 and later have none"),
        ("php8.2", "PHP 8.2.5 (cli)", "PHP 8.2.5", "configured without --enable-dtrace"),
        ("php-fpm8.2", "PHP 8.2.5 (fpm-fcgi)", "PHP 8.2.5", "configured without --enable-dtrace"),
        ("ruby3.1", '["/opt/ruby", "", "3.1.2"]', "Ruby 3.1.2", "configured without --enable-dtrace"),
        ("mysqld", "mysqld  Ver 8.0.36 for Linux", "MySQL 8.0.36", "MySQL 8.0 and later have none"),
        ("mysqld", "mysqld  Ver 5.7.44 for Linux", "MySQL 5.7.44", "built without ENABLE_DTRACE"),
        ("mariadbd", "mariadbd  Ver 10.11.6-MariaDB", "MariaDB 10.11.6-MariaDB", "built without ENABLE_DTRACE"),
    ],
)
def test_a_runtime_is_known_by_what_it_says(tmp_path: Path, called: str, said: str, is_named: str, cause: str) -> None:
    program(tmp_path, called, said)
    (each,) = [each for name in RUNTIMES for each in found(name, tmp_path)]
    assert each.name == is_named
    assert cause in each.cause
    assert each.remedy


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_what_is_no_runtime_is_left_out(tmp_path: Path, name: str) -> None:
    for called in ("python3", "java", "node", "php", "ruby", "mysqld"):
        program(tmp_path, called, "hello")
        (tmp_path / f"{called}-config").symlink_to(called)
    assert found(name, tmp_path, tmp_path / "missing") == []


def test_the_current_directory_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the code of somebody else')\n")
    monkeypatch.chdir(tmp_path)
    assert found("python", Path(sys.executable).parent)


@pytest.mark.parametrize("said", ["5", "null", '["too", "short"]', "no JSON"])
def test_odd_answers_are_those_of_no_runtime(tmp_path: Path, said: str) -> None:
    program(tmp_path, "python3", said)
    program(tmp_path, "ruby", said)
    assert found("python", tmp_path) == found("ruby", tmp_path) == []


def test_warnings_come_before_the_answer(tmp_path: Path) -> None:
    program(tmp_path, "ruby", 'warning: setlocale\n["/usr/bin/ruby", "", "3.1.2"]')
    assert [each.name for each in found("ruby", tmp_path)] == ["Ruby 3.1.2"]


def test_a_program_that_fails_or_may_not_run_is_left_out(tmp_path: Path) -> None:
    program(tmp_path, "node", "v18.1.0 /opt/node", code=1)
    program(tmp_path, "nodejs", "v18.1.0 /opt/node").chmod(0o644)
    assert found("node", tmp_path) == []


def test_a_runtime_with_several_names_is_told_once(tmp_path: Path) -> None:
    program(tmp_path, "node", "v18.1.0 /opt/node")
    (tmp_path / "nodejs").symlink_to("node")
    assert len(found("node", tmp_path, tmp_path)) == 1


def test_running_ones_are_known_by_their_program() -> None:
    assert running(RUNTIMES["python"])[os.getpid()] == os.readlink("/proc/self/exe")


@pytest.mark.parametrize(
    ("runtime", "files", "is_one"),
    [
        ("python", ["/usr/bin/sleep", "/usr/lib/x86_64-linux-gnu/libc.so.6"], False),
        ("python", ["/opt/python/bin/python3.12"], True),
        ("python", ["/opt/python/bin/python3.12 (deleted)"], True),
        ("python", ["/usr/sbin/app", "/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0"], True),
        ("java", ["/usr/bin/app", "/opt/jdk/lib/server/libjvm.so"], True),
        ("java", ["/usr/bin/python3.11"], False),
    ],
)
def test_a_runtime_is_known_by_the_names_of_its_files(runtime: str, files: list[str], *, is_one: bool) -> None:
    assert has_runtime(RUNTIMES[runtime], files) is is_one
