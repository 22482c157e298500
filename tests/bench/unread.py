"""How many strings of real programs were not in memory at the hit, and so came as unavailable.

Each program is traced from its start, where pages are coldest.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

from tests.bench.report import Figure
from tests.bench.setup import BUFFER_KIB, Setup
from tests.kernel import test_openjdk, test_postgresql
from tests.support import SYSTEM_PYTHON, Daemon, Recorder

_QUEUE_BYTES = 256 << 20
_MODULES = "import sys; sys.setprofile(lambda *_: None); import asyncio, email.message, http.client, json, unittest"
_STATEMENTS = [f"SELECT {number}, 'text', now();" for number in range(2000)]


def run(setup: Setup) -> list[Figure]:
    programs: dict[str, Callable[[Daemon, ExitStack], Recorder]] = {
        "CPython": _python,
        "OpenJDK": _openjdk,
        "PostgreSQL": _postgresql,
    }
    figures = []
    with setup.daemon() as daemon:
        for name, traced in programs.items():
            with ExitStack() as stack:
                recorder = traced(daemon, stack)
                recorder.finish()
            strings = [value for event in recorder.events for value in event.values if not isinstance(value, int)]
            if not strings:
                print(f"bench: {name} is not here, or fired nothing", file=sys.stderr)
                continue
            unavailable = strings.count(None)
            note = f"{unavailable} of {len(strings)}"
            figures.append(Figure(f"strings unavailable, {name}", 100 * unavailable / len(strings), "%", note=note))
    return figures


def _recorder(daemon: Daemon, stack: ExitStack, *selectors: str) -> Recorder:
    wanted = Recorder(daemon.target, *selectors, kernel_buffer_kib=BUFFER_KIB, queue_bytes=_QUEUE_BYTES)
    return stack.enter_context(wanted)


def _python(daemon: Daemon, stack: ExitStack) -> Recorder:
    # so that the file is known, and armed before the process begins
    idle = subprocess.Popen([SYSTEM_PYTHON, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    stack.callback(idle.communicate)
    recorder = _recorder(
        daemon,
        stack,
        "python:function__entry(arg0:str,arg1:str)",
        "python:function__return(arg0:str,arg1:str)",
        "python:import__find__load__start(arg0:str)",
    )
    subprocess.run([SYSTEM_PYTHON, "-S", "-I", "-c", _MODULES], check=True)
    return recorder


def _openjdk(daemon: Daemon, stack: ExitStack) -> Recorder:
    java = test_openjdk.Java(test_openjdk.java_home())
    stack.enter_context(test_openjdk.IdleJvm(java))
    recorder = _recorder(
        daemon,
        stack,
        "hotspot:class__loaded(arg0:str)",
        "hotspot:method__compile__begin(arg0:str,arg2:str,arg4:str)",
        "hotspot:method__entry(arg1:str,arg3:str)",
        "hotspot:thread__start(arg0:str)",
    )
    java.run("-XX:+DTraceMethodProbes", "-Xshare:off")
    return recorder


def _postgresql(daemon: Daemon, stack: ExitStack) -> Recorder:
    cluster = stack.enter_context(test_postgresql.running_cluster())
    recorder = _recorder(
        daemon,
        stack,
        "postgresql:query__start(arg0:str)",
        "postgresql:query__parse__start(arg0:str)",
        "postgresql:query__rewrite__start(arg0:str)",
    )
    for _ in range(3):
        with test_postgresql.Session(cluster) as session:
            session.do(*_STATEMENTS)
    return recorder
