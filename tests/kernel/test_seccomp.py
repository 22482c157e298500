"""A daemon that has the capabilities, in a container whose seccomp profile does not know what they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from stapsdtd.client import Client
from stapsdtd.kernel import function_hooks
from tests.refusing import refusing
from tests.support import TICKER, Recorder, Ticker, running_daemon

pytestmark = pytest.mark.kernel


def test_it_says_what_refuses_it_and_serves_with_the_other_engine(
    tmp_path: Path, ticker: Ticker, ticker_program: Path
) -> None:
    with running_daemon(tmp_path, prefix=refusing("bpf", "perf_event_open")) as daemon:
        with Client(daemon.target) as client:
            info = client.info()
        assert info.engine == "ftrace"
        missing = [feature for feature in info.features if not feature.available]
        lacking = {feature.name: feature for feature in missing if feature.name not in function_hooks.NAMES}
        assert lacking.keys() == {"mapping records", "bpf programs", "overlays' inodes"}
        assert "Operation not permitted" in lacking["bpf programs"].detail
        assert all("seccomp profile" in feature.remedy for feature in lacking.values())
        with Recorder(daemon.target, f"{TICKER}:{ticker_program}::tick(arg0)") as recorder:
            ticker.do("fire 2")
        assert recorder.values() == [(0,), (1,)]
