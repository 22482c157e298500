"""Whether events can be captured: what is told of it, and when."""

from __future__ import annotations

import asyncio
import logging

import pytest

from stapsdtd.runtime.health import Health

pytestmark = pytest.mark.timeout(30)


class Host:
    """What checks answer, and what was told; looked counts."""

    def __init__(self) -> None:
        self.wrong: list[str | None] = [None, None]
        self.told: list[str] = []
        self.looked = 0
        self.failure: Exception | None = None

    def first(self) -> str | None:
        self.looked += 1
        if self.failure is not None:
            raise self.failure
        return self.wrong[0]

    async def tell(self, problem: str) -> None:
        self.told.append(problem)

    async def looks(self) -> None:
        """Until it was looked twice, of which the second was after this call."""
        since = self.looked
        while self.looked < since + 2:  # noqa: ASYNC110 - what looks knows nothing of this
            await asyncio.sleep(0.001)


def test_each_change_is_told_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()

    async def scenario() -> None:
        health = Health([host.first, lambda: host.wrong[1]], host.tell, pause_seconds=0.001)
        health.start()
        await host.looks()
        assert health.is_serving
        for wrong in (["no tracefs", None], ["no tracefs", "no thread"], [None, None]):
            host.wrong = list(wrong)
            await host.looks()
            await host.looks()
            assert health.is_serving == (not any(wrong))
        await health.stop()
        since = host.looked
        await asyncio.sleep(0.01)
        assert host.looked == since

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert host.told == ["no tracefs", "no tracefs; no thread", ""]
    assert [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name == "stapsdtd.runtime.health"
    ] == [
        ("ERROR", "NOT_SERVING: events cannot be captured: no tracefs"),
        ("ERROR", "NOT_SERVING: events cannot be captured: no tracefs; no thread"),
        ("INFO", "SERVING: events can be captured again"),
    ]


def test_check_that_fails_does_not_end_the_looking() -> None:
    host = Host()

    async def scenario() -> None:
        health = Health([host.first], host.tell, pause_seconds=0.001)
        health.start()
        host.failure = OSError("no")
        await host.looks()
        host.failure = None
        host.wrong[0] = "no tracefs"
        await host.looks()
        await health.stop()

    asyncio.run(scenario())
    assert host.told == ["no tracefs"]


def test_what_never_began_can_be_stopped() -> None:
    asyncio.run(Health([], Host().tell).stop())
