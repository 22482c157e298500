"""`python -m tests.vm --kernel NAME [--seconds N] -- COMMAND…`: one command in a guest, in this tree's folder."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.vm import guest, kernels, machines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm")
    parser.add_argument("--kernel", required=True, help="6.1, 6.12:arm64, or the name of a package")
    parser.add_argument("--seconds", type=float, default=600, help="when to give up (600)")
    parser.add_argument("--cpus", type=int, default=2, help="of the guest (2)")
    parser.add_argument("--share", type=Path, help="a folder that the guest has as /run/share, for files to hand over")
    parser.add_argument("command", nargs="+", help="runs as root in this folder")
    options = parser.parse_args()
    try:
        machine = machines.find(options.kernel)
        with tempfile.TemporaryDirectory() as scratch:
            share = options.share or Path(scratch)
            return guest.run(machine, options.command, share, seconds=options.seconds, cpus=options.cpus)
    except (kernels.KernelUnavailableError, guest.GuestError) as error:
        print(f"vm: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
