"""The last check of a site before it is armed: its instruction now, and what the kernel would do to it.

The file may have been written to since it was parsed: in place, or through a mapping of a memfd, which changes no time
stamp. Once the first process is armed, the kernel uses its own copy (prepare_uprobe in kernel/events/uprobes.c).
"""

from __future__ import annotations

import os

from stapsdtd.elf.nops import nop_at
from stapsdtd.elf.notes import UnusableNoteError
from stapsdtd.kernel.host_calls import READ_FILE
from stapsdtd.kernel.nops import NopRewriting
from stapsdtd.model import LONGEST_NOP_BYTES, Site


def why_not_armed(descriptor: int, architecture: str, site: Site, nops: NopRewriting) -> str | None:
    """Return why a site of the file open at the descriptor must not be armed, or None if it may be."""
    reason = nops.why_not(site.nop_bytes)
    if reason is not None:
        return reason
    try:
        nop = nop_at(architecture, os.pread(descriptor, LONGEST_NOP_BYTES, site.site_offset))
    except UnusableNoteError as error:
        return f"the file changed since it was read: {error.reason}"
    except OSError as error:
        return str(READ_FILE.of(error, "the file"))
    if nop.length != site.nop_bytes:
        return f"the file changed since it was read: a nop of {nop.length} bytes instead of {site.nop_bytes}"
    return nop.refused
