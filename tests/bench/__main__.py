"""`./dev bench [--json] [--repeats N]`"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from tests.bench import arming, stream
from tests.bench.report import table


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench")
    parser.add_argument("--json", action="store_true", help="one line for each figure, times in seconds")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    figures = []
    for benchmark in (arming, stream):
        with tempfile.TemporaryDirectory() as folder:
            figures += benchmark.run(Path(folder), options.repeats)
    if options.json:
        for figure in figures:
            print(json.dumps(dataclasses.asdict(figure)))
    else:
        print(table(figures))


if __name__ == "__main__":
    main()
