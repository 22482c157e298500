"""The short form of `./dev truth`: each question once, on a host without a load of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.truth.questions import QUESTIONS
from tests.truth.runs import ALL, answers

pytestmark = pytest.mark.kernel


# of rates it is asked when: what others do beside would be in the answer
_RATES = "top-stalled"


@pytest.mark.parametrize(
    "question", [pytest.param(each, marks=[pytest.mark.alone] if each == _RATES else []) for each in ALL]
)
def test_answer_is_what_the_program_says_of_itself(question: str, tmp_path: Path) -> None:
    (answer,) = answers(question, "none", "bpf", 1, tmp_path)
    assert answer.problems == []


@pytest.mark.parametrize("question", [each for each in QUESTIONS if each != _RATES])
def test_answer_of_the_ftrace_engine(question: str, tmp_path: Path) -> None:
    (answer,) = answers(question, "none", "ftrace", 1, tmp_path)
    assert answer.problems == []
