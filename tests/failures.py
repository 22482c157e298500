"""Tell whether so few tests of a run failed that another run of them may say that it was an accident."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_MAX_ACCIDENTS = 3
_FAILED = "v/cache/lastfailed"


def main(cache: Path) -> str | None:
    """Return what is to be said where these are not to run again; `cache` is pytest's folder."""
    try:
        failed: dict[str, bool] = json.loads((cache / _FAILED).read_bytes())
    except FileNotFoundError:
        return "pytest ended before it had run its tests"
    if not failed:
        return "pytest failed, and no test did"
    if len(failed) > _MAX_ACCIDENTS:
        return f"{len(failed)} tests failed; {_MAX_ACCIDENTS} at most are run again"
    print("failed beside others:", *failed, sep="\n  ", file=sys.stderr)
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
