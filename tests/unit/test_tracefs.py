"""Tracefs on a folder of ordinary files; what the kernel says is tested in the kernel's ring."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stapsdtd.errors import TracefsRejectedError
from stapsdtd.kernel.host_calls import TRACEFS_WRITE
from stapsdtd.kernel.tracefs import Tracefs
from tests.support import descriptors

ERROR_LOG = """\
[  100.001] trace_uprobe: error: Older
  Command: p:g/e /bin/true:0x1
                 ^
[  579.123] trace_uprobe: error: Invalid ref_ctr_offset
  Command: p:g/e /bin/true:0x10(zz)
                                ^
"""
EVENTS = """\
p:stapsdtd_1_2_3/e0 /proc/self/fd/7:0x0000000000001139 site=\\0:u32 comm=$comm
p:stapsdtd_1_2_3/e0 /proc/self/fd/7:0x0000000000001150(0x4010) site=\\1:u32 comm=$comm
r:other/ret /bin/bash:0x0000000000001139
p:uprobes/p_bash_0x1 /bin/bash:0x0000000000001139
"""


@pytest.fixture
def tracefs(tmp_path: Path) -> Tracefs:
    (tmp_path / "instances").mkdir()
    (tmp_path / "uprobe_events").write_text(EVENTS)
    (tmp_path / "error_log").write_text(ERROR_LOG)
    return Tracefs(str(tmp_path))


INVALID = "/proc/self/oom_score_adj"
"""To the kernel, what is no number is invalid here."""
FULL = "/dev/full"


def refuse_definitions(tracefs: Tracefs, like: str) -> None:
    """Have the kernel refuse them for the reason for which it refuses what is written to another file."""
    os.unlink(tracefs.path("uprobe_events"))
    os.symlink(like, tracefs.path("uprobe_events"))


def test_definitions_are_appended(tracefs: Tracefs) -> None:
    tracefs.append_definition("-:g/e")
    assert tracefs.read("uprobe_events") == EVENTS + "-:g/e\n"


def test_refusal_carries_the_kernels_explanation_of_this_line(tracefs: Tracefs) -> None:
    refuse_definitions(tracefs, INVALID)
    before = descriptors(os.getpid())
    with pytest.raises(TracefsRejectedError) as raised:
        tracefs.append_definition("p:g/e /bin/true:0x10(zz)")
    error = raised.value
    assert (error.path, error.line, error.errno, error.kernel_message) == (
        "uprobe_events", "p:g/e /bin/true:0x10(zz)", errno.EINVAL, "Invalid ref_ctr_offset",
    )  # fmt: skip
    assert str(error).endswith("Invalid argument: Invalid ref_ctr_offset")
    assert descriptors(os.getpid()) == before


def test_explanation_of_another_line_is_not_taken(tracefs: Tracefs) -> None:
    refuse_definitions(tracefs, FULL)
    with pytest.raises(TracefsRejectedError) as raised:
        tracefs.append_definition("p:g/e /bin/true:0x1")
    assert raised.value.kernel_message == ""
    assert str(raised.value).endswith(f"No space left on device; {TRACEFS_WRITE.remedy(errno.ENOSPC)}")


def test_host_without_an_error_log(tracefs: Tracefs) -> None:
    os.unlink(tracefs.path("error_log"))
    with pytest.raises(TracefsRejectedError) as raised:
        tracefs.write("missing/enable", "1")
    assert (raised.value.errno, raised.value.kernel_message) == (errno.ENOENT, "")


def test_instances(tracefs: Tracefs) -> None:
    tracefs.make_instance("a")
    assert tracefs.instances() == ["a"]
    with pytest.raises(TracefsRejectedError, match="mkdir a"):
        tracefs.make_instance("a")
    tracefs.remove_instance("a")
    with pytest.raises(TracefsRejectedError, match="rmdir a"):
        tracefs.remove_instance("a")


def test_each_event_is_listed_once(tracefs: Tracefs) -> None:
    assert tracefs.uprobe_events() == [
        ("stapsdtd_1_2_3", "e0"), ("other", "ret"), ("uprobes", "p_bash_0x1"),
    ]  # fmt: skip
    assert tracefs.events("stapsdtd_1_2_3") == ["e0"]
    assert tracefs.events("nobody") == []
