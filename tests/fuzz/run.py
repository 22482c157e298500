"""Case after case."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.checks import check, known_bug
from tests.fuzz.mutations import Mutator


class FailedCaseError(AssertionError):
    """Its text says how to repeat it."""


def run(seed: int, numbers: Iterable[int], output: Path) -> Counter[str]:
    """Answer how the cases went; raise FailedCaseError at the first that fails, whose file is then in `output`."""
    mutator = Mutator(seed)
    tally: Counter[str] = Counter()
    for number in numbers:
        what, image = mutator.case(number)
        try:
            parsed = check(io.BytesIO(image))
        except Exception as error:
            known = known_bug(error)
            if known is None:
                path = output / f"fuzz-{seed}-{number}.elf"
                path.write_bytes(image)
                raise FailedCaseError(
                    f"{what}: {error!r}\nrepeat with: python -m tests.fuzz --seed {seed} --only {number}; file: {path}"
                ) from error
            tally[f"known: {known}"] += 1
        else:
            tally["unreadable" if parsed is None else "with sites" if parsed.sites else "without sites"] += 1
    return tally
