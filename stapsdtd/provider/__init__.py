"""Declare and fire static probes from Python, with the standard library alone.

    from stapsdtd.provider import INT32, Provider

    provider = Provider("myapp")
    request_start = provider.probe("request__start", str, INT32)
    provider.load()

    request_start.fire("/index", 200)           # only checks the arguments and reads the semaphore while not traced
    if request_start.enabled:                   # where preparing the arguments is expensive
        request_start.fire(describe(request), 200)

Loading writes a shared library into a memfd, as libstapsdt does, and maps it. Any tool that supports SDT probes then
sees `myapp:request__start` in this process: stapsdtd, bpftrace, perf, bcc, SystemTap.

    argtypes ──► architecture ──► image (pure: declarations -> ELF bytes) ──► library (memfd, mmap) ──► probes
"""

from stapsdtd.provider.argtypes import (
    INT8,
    INT16,
    INT32,
    INT64,
    MAX_ARGUMENTS,
    STRING,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    ArgType,
)
from stapsdtd.provider.probes import Probe, Provider

__all__ = [
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "MAX_ARGUMENTS",
    "STRING",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "ArgType",
    "Probe",
    "Provider",
]
