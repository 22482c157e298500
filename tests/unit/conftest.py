"""How examples are tried, so that a busy machine fails no test; the bpf engine over a kernel in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from stapsdtd.capture.bpf.engine import BpfEngine
from tests.unit.bpf_rig import made_engine, opened
from tests.unit.fake_bpf import FakeKernel, RecordingSink, descriptors_of, running

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[FakeKernel]:
    binary = tmp_path / "app"
    binary.touch()
    with closing(FakeKernel(str(binary))) as made:
        yield made


@pytest.fixture
def engine(kernel: FakeKernel) -> Iterator[BpfEngine]:
    made = made_engine(kernel)
    yield made
    kernel.fail = lambda _step: None
    kernel.before_step = lambda: None
    made.shutdown()
    assert (kernel.events, descriptors_of(kernel.path)) == ({}, 0)
    assert kernel.loaded.is_closed
    assert not running("stapsdtd-reader")


@pytest.fixture
def sink(engine: BpfEngine) -> RecordingSink:
    return opened(engine, 1)


@pytest.fixture
def other(engine: BpfEngine) -> RecordingSink:
    return opened(engine, 2)
