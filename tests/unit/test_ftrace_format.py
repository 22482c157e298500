from __future__ import annotations

import pytest

from stapsdtd.capture.ftrace.format import EventFormat, FieldPlace, PageFormat

EVENT = """\
name: e1
ID: 2327
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:unsigned char common_preempt_count;	offset:3;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

	field:unsigned long __probe_ip;	offset:8;	size:8;	signed:0;
	field:u32 site;	offset:16;	size:4;	signed:0;
	field:__data_loc char[] comm;	offset:20;	size:4;	signed:1;
	field:u8 b0;	offset:24;	size:1;	signed:0;
	field:u8 b1;	offset:25;	size:1;	signed:0;
	field:__data_loc char[] s0;	offset:26;	size:4;	signed:1;
	field:char name[16];	offset:30;	size:16;	signed:0;

print fmt: "(%lx) site=%u comm=\\"%s\\" b0=%u b1=%u s0=\\"%s\\"", REC->__probe_ip, REC->site, __get_str(comm), REC->b0
"""
PAGE = """\
	field: u64 timestamp;	offset:0;	size:8;	signed:0;
	field: local_t commit;	offset:8;	size:8;	signed:1;
	field: int overwrite;	offset:8;	size:1;	signed:1;
	field: char data;	offset:16;	size:4080;	signed:0;
"""


def test_event_of_linux_6_18() -> None:
    found = EventFormat.parse(EVENT)
    assert found.id == 2327
    assert found.fields == {
        "common_type": FieldPlace(0, 2),
        "common_flags": FieldPlace(2, 1),
        "common_preempt_count": FieldPlace(3, 1),
        "common_pid": FieldPlace(4, 4),
        "__probe_ip": FieldPlace(8, 8),
        "site": FieldPlace(16, 4),
        "comm": FieldPlace(20, 4),
        "b0": FieldPlace(24, 1),
        "b1": FieldPlace(25, 1),
        "s0": FieldPlace(26, 4),
        "name": FieldPlace(30, 16),
    }


def test_page_of_linux_6_18() -> None:
    assert PageFormat.parse(PAGE) == PageFormat(data_offset=16, bytes=4096)


def test_larger_sub_buffers() -> None:
    assert PageFormat.parse(PAGE.replace("4080", "16368")) == PageFormat(16, 16384)


def test_what_is_no_format_file() -> None:
    with pytest.raises(ValueError, match="no ID"):
        EventFormat.parse("name: e1\n")
    with pytest.raises(ValueError, match="no data field"):
        PageFormat.parse("")
