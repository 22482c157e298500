"""Have programs run at tracepoints and perf events. See `uprobe_links` for places of files, and `function_links`."""

from __future__ import annotations

import ctypes

from stapsdtd.kernel.host_calls import BPF_LINK_CREATE, BPF_RAW_TRACEPOINT_OPEN
from stapsdtd.kernel.libbpf import last_error, library

_ATTACH_TYPE_PERF_EVENT = 41


class LinkOptions(ctypes.Structure):
    """struct bpf_link_create_opts, up to its union, of which a subclass has a member."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("iter_info", ctypes.c_void_p),
        ("iter_info_len", ctypes.c_uint32),
        ("target_btf_id", ctypes.c_uint32),
    ]


class CookieOptions(LinkOptions):
    """The members perf_event and tracing, which are alike."""

    _fields_ = [("cookie", ctypes.c_uint64)]


class MultiOptions(LinkOptions):
    """The member kprobe_multi."""

    _fields_ = [
        ("multi_flags", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("symbols", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("cookies", ctypes.c_void_p),
    ]


def attach_to_tracepoint(program: int) -> int:
    """Run a program at the tracepoint that it was made for, until the returned descriptor is closed. Raises OSError."""
    link: int = library().bpf_raw_tracepoint_open(None, program)
    if link < 0:
        raise last_error(BPF_RAW_TRACEPOINT_OPEN, "the program's tracepoint")
    return link


def link_perf_event(program: int, perf_event: int, cookie: int) -> int:
    """Run a program, given the cookie, at each hit of a perf event. Return the link's descriptor.

    The program runs for all perf events of the same tracefs event. Raises OSError.
    """
    return create_link(program, perf_event, _ATTACH_TYPE_PERF_EVENT, CookieOptions(cookie=cookie), "a perf event")


def create_link(program: int, target: int, attach_type: int, options: LinkOptions, subject: str) -> int:
    """Return the descriptor of a link. target: a descriptor, or 0 for what the program or the options say. subject:
    names the target in errors.

    Raises OSError.
    """
    options.sz = ctypes.sizeof(options)
    link: int = library().bpf_link_create(program, target, attach_type, ctypes.byref(options))
    if link < 0:
        raise last_error(BPF_LINK_CREATE, subject)
    return link
