"""python -m tests.fuzz [--cases N] [--seed S]: mutated objects until one breaks something.

python -m tests.fuzz --seed 5 --only 1234      one case again
python -m tests.fuzz --adversarial             the objects that are built to hurt, as JSON
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz import adversarial
from tests.fuzz.run import FailedCaseError, run


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz")
    options.add_argument("--cases", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options.add_argument("--only", type=int, metavar="NUMBER", help="this case alone")
    options.add_argument("--output", type=Path, default=Path("/tmp"), help="where a failing file goes")
    options.add_argument("--adversarial", action="store_true")
    chosen = options.parse_args()
    if chosen.adversarial:
        adversarial.main()
        return 0
    print(f"seed {chosen.seed}", flush=True)
    numbers = range(chosen.cases) if chosen.only is None else range(chosen.only, chosen.only + 1)
    begin = time.monotonic()
    try:
        tally = run(chosen.seed, numbers, chosen.output)
    except FailedCaseError as failed:
        traceback.print_exc()
        print(failed)
        return 1
    took = time.monotonic() - begin
    print(f"{len(numbers)} cases, {len(numbers) / took:.0f} a second")
    for what, count in tally.most_common():
        print(f"{count:8} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
