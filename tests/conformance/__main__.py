"""`./dev conformance`: runs the D programs, and shows where they print something else than DTrace."""

from __future__ import annotations

import difflib
import sys

from tests.conformance.outputs import CASES, expected, output_of, program


def main() -> int:
    differing = 0
    for name in CASES:
        wanted, printed = expected(name).splitlines(), output_of(program(name)).splitlines()
        lines = list(difflib.unified_diff(wanted, printed, f"{name}.out", f"{name}.d", lineterm=""))
        print("\n".join(lines) if lines else f"{name}: as expected")
        differing += bool(lines)
    print(f"{len(CASES) - differing} of {len(CASES)} programs print what is expected")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
