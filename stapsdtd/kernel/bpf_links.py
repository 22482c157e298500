"""Have programs run at tracepoints and perf events. See `uprobe_links` for places of files."""

from __future__ import annotations

import ctypes

from stapsdtd.kernel.libbpf import last_error, library

_ATTACH_TYPE_PERF_EVENT = 41


class _LinkOptions(ctypes.Structure):
    """struct bpf_link_create_opts, with the perf_event member of its union."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("iter_info", ctypes.c_void_p),
        ("iter_info_len", ctypes.c_uint32),
        ("target_btf_id", ctypes.c_uint32),
        ("bpf_cookie", ctypes.c_uint64),
    ]


def attach_to_tracepoint(program: int) -> int:
    """Run a program at the tracepoint that it was made for, until the returned descriptor is closed. Raises OSError."""
    link: int = library().bpf_raw_tracepoint_open(None, program)
    if link < 0:
        raise last_error()
    return link


def link_perf_event(program: int, perf_event: int, cookie: int) -> int:
    """Run a program, given the cookie, at each hit of a perf event. Return the link's descriptor.

    The program runs for all perf events of the same tracefs event. Raises OSError.
    """
    options = _LinkOptions(sz=ctypes.sizeof(_LinkOptions), bpf_cookie=cookie)
    link: int = library().bpf_link_create(program, perf_event, _ATTACH_TYPE_PERF_EVENT, ctypes.byref(options))
    if link < 0:
        raise last_error()
    return link
