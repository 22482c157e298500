"""Which objects a subscription looks at further, and to whom the processes belong that map them."""

from __future__ import annotations

import asyncio

import pytest

from stapsdtd.catalog.selectors import parse
from stapsdtd.sessions import matcher
from stapsdtd.sessions.choices import Choices
from stapsdtd.sessions.matcher import Belonging
from stapsdtd.sessions.spec import ClauseSpec
from tests.unit.samples import sample_object, site

ANNE, BERT = frozenset({1000}), frozenset({1001})


@pytest.mark.parametrize(
    ("selectors", "may"),
    [
        (["app:query"], True),
        (["other:query"], False),
        (["other:query", "app:nothing"], True),
        # which of its names a glob matches is not asked yet
        (["a*:query"], True),
        (["z*:query"], True),
        (["*:*"], True),
        (["my-app:query"], True),
        (["app12:::query"], True),
        (["app12:query"], False),
        ([":/bin/app::query"], True),
        (["other:/bin/app::query"], False),
    ],
)
def test_providers_that_are_no_globs_tell_what_may_be_chosen(selectors: list[str], may: bool) -> None:
    found = sample_object(site("query", provider="app"), site("query", 2, provider="my__app"))
    choices = Choices([ClauseSpec(tuple(map(parse, selectors)))])
    assert choices.may_choose(found) == may
    assert may or not choices.of(found, [found.path])


def test_of_a_span_the_starts_count_too() -> None:
    found = sample_object(site("begin", provider="app"))
    ends, starts = (Choices([ClauseSpec((parse(text),))]) for text in ("other:end", "app:begin"))
    assert (ends.may_choose(found), starts.may_choose(found)) == (False, True)


def test_to_whom_a_process_belongs_is_asked_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, frozenset[int]]] = []
    owners = {7: 1000}

    def belongs(pid: int, users: frozenset[int]) -> bool:
        asked.append((pid, users))
        return owners.get(pid) in users

    monkeypatch.setattr(matcher, "belongs", belongs)

    async def scenario() -> None:
        belonging = Belonging(asyncio.get_running_loop())
        assert [belonging(7, ANNE), belonging(7, BERT), belonging(8, ANNE)] == [True, False, False]
        assert [belonging(7, ANNE), belonging(7, BERT), belonging(8, ANNE)] == [True, False, False]
        assert asked == [(7, ANNE), (7, BERT), (8, ANNE)]
        owners[7] = 1001
        await asyncio.sleep(0)
        assert [belonging(7, ANNE), belonging(7, BERT)] == [False, True]

    asyncio.run(scenario())
