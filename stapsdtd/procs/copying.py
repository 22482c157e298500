"""Copies a file to standard output, in a process that may be given up: `python -I -S copying.py PATH MAX_BYTES`.

Writes the file's identity, `DEV INODE SIZE MTIME_NS`, to standard error; or why there is no copy, and fails.
"""

import os
import stat
import sys

_CHUNK_BYTES = 1 << 20


def main(path: str, max_bytes: int) -> str:
    """Return why there is no copy, or an empty string."""
    try:
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        if status.st_size > max_bytes:
            return f"it has {status.st_size} bytes, more than {max_bytes}"
        offset = 0
        while offset < status.st_size and (
            data := os.pread(source, min(_CHUNK_BYTES, status.st_size - offset), offset)
        ):
            offset += len(data)
            while data:
                data = data[os.write(1, data) :]
    except OSError as error:
        return error.strerror or str(error)
    sys.stderr.write(f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])) or 0)
