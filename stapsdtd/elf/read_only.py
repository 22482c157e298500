"""Find the segments mapped without write permission, whose memory has the same contents as the file.

    LOAD  0x2000 0x0000000000002000 … 0x00080 0x00080  R      readelf -lW: constants, such as the texts of a program

RELRO is not among them: it is part of a writable segment, which the loader writes to first.
"""

from __future__ import annotations

import numpy as np

from stapsdtd.elf.container import PF_W, PT_LOAD, Container
from stapsdtd.model import ReadOnlySegment

MAX_READ_ONLY_SEGMENTS = 64
_PT_DYNAMIC = 2
_MAX_DYNAMIC_BYTES = 1 << 16
_DT_TEXTREL, _DT_FLAGS = 22, 30
_DF_TEXTREL = 4


def read_only_segments(container: Container) -> tuple[ReadOnlySegment, ...]:
    """Return the read-only segments; none if the loader relocates them too, as DT_TEXTREL indicates (System V gABI)."""
    if _has_text_relocations(container):
        return ()
    segments = [
        ReadOnlySegment(segment.vaddr, segment.offset, segment.file_size)
        for segment in container.segments(PT_LOAD)
        if not segment.flags & PF_W and 0 < segment.file_size <= container.file.size - segment.offset
    ]
    return tuple(segments[:MAX_READ_ONLY_SEGMENTS])


def _has_text_relocations(container: Container) -> bool:
    word = f"{container.byte_order}u{container.word_bytes}"
    for segment in container.segments(_PT_DYNAMIC):
        data = container.file.read(segment.offset, min(segment.file_size, _MAX_DYNAMIC_BYTES))
        words = np.frombuffer(data[: len(data) // container.word_bytes * container.word_bytes], word).tolist()
        for tag, value in zip(words[::2], words[1::2], strict=False):
            if tag == _DT_TEXTREL or (tag == _DT_FLAGS and value & _DF_TEXTREL):
                return True
    return False
