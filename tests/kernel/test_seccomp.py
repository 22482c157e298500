"""A daemon that has the capabilities, in a container whose seccomp profile does not know what they are for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stapsdtd.client import Client
from stapsdtd.kernel import function_hooks
from tests.support import TICKER, Recorder, Ticker, running_daemon

pytestmark = pytest.mark.kernel

_REFUSE = """
import ctypes, errno, os, platform, struct, sys
# bpf, perf_event_open
numbers = {"x86_64": (321, 298), "aarch64": (280, 241)}[platform.machine()]
LOAD_NUMBER, IS, ANSWER = 0x20, 0x15, 0x06
lines = [(LOAD_NUMBER, 0, 0, 0), (IS, 1, 0, numbers[0]), (IS, 0, 1, numbers[1])]
lines += [(ANSWER, 0, 0, 0x50000 | errno.EPERM), (ANSWER, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
assert ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_it_says_what_refuses_it_and_serves_with_the_other_engine(
    tmp_path: Path, ticker: Ticker, ticker_program: Path
) -> None:
    with running_daemon(tmp_path, prefix=(sys.executable, "-c", _REFUSE)) as daemon:
        with Client(daemon.target) as client:
            info = client.info()
        assert info.engine == "ftrace"
        missing = [feature for feature in info.features if not feature.available]
        lacking = {feature.name: feature for feature in missing if feature.name not in function_hooks.NAMES}
        assert lacking.keys() == {"mapping records", "bpf programs"}
        assert "Operation not permitted" in lacking["bpf programs"].detail
        assert all("seccomp profile" in feature.remedy for feature in lacking.values())
        with Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick(arg0)") as recorder:
            ticker.do("fire 2")
        assert recorder.values() == [(0,), (1,)]
