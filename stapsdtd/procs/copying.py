"""Copy a file to standard output, in a process that may be given up: `python -I -S copying.py PATH MOST_BYTES`.

Standard error gets what fstat says of the file, `DEV INODE SIZE MTIME_NS`; or why there is no copy, and it fails then.
"""

import os
import stat
import sys

_PIECE = 1 << 20


def main(path: str, most_bytes: int) -> str:
    """Return why there is no copy; nothing where there is one."""
    try:
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        if status.st_size > most_bytes:
            return f"it has {status.st_size} bytes, more than {most_bytes}"
        at = 0
        while at < status.st_size and (data := os.pread(source, min(_PIECE, status.st_size - at), at)):
            at += len(data)
            while data:
                data = data[os.write(1, data) :]
    except OSError as error:
        return error.strerror or str(error)
    sys.stderr.write(f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])) or 0)
