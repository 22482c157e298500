"""Asks a question several times under a load."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kernel.test_postgresql import running_cluster
from tests.support import running_daemon
from tests.truth.answer import Answer
from tests.truth.loads import LOADS
from tests.truth.questions import QUESTIONS, Asked
from tests.truth.runtimes import FIRST, Postgres, python_calls

_POSTGRESQL = "postgresql"
ALL = [*QUESTIONS, "python-calls", _POSTGRESQL, *FIRST]


def answers(question: str, load: str, engine: str, runs: int, folder: Path) -> Iterator[Answer]:
    """Yield the answers of all runs. folder: for what is compiled, and for sockets and logs."""
    if question in FIRST:
        for _ in range(runs):
            with TemporaryDirectory(dir=folder) as own:
                yield _answer(partial(FIRST[question], Path(own), load, engine))
        return
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(folder, "--engine", engine))
        ask = QUESTIONS.get(question, python_calls)
        if question == _POSTGRESQL:
            ask = Postgres(stack.enter_context(running_cluster()))
        stack.enter_context(LOADS[load](daemon.target, folder))
        for _ in range(runs):
            yield _answer(partial(ask, Asked(daemon.target, folder)))


def _answer(ask: Callable[[], Answer]) -> Answer:
    """What failed is no answer, and no reason to ask nothing else."""
    try:
        return ask()
    except (AssertionError, OSError, subprocess.SubprocessError, pytest.fail.Exception) as error:
        return Answer(problems=[f"it failed: {error}"])
