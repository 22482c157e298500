"""What the daemon lets go of is freed at once: no garbage collection, which stops all threads, has to find it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from stapsdtd.sessions.attacher import Outcome
from stapsdtd.sessions.choices import Choices
from stapsdtd.sessions.clause import Clause
from stapsdtd.sessions.live import Choosing, ConsideredObject, FirstArming, LiveSubscription
from stapsdtd.sessions.session import Session
from stapsdtd.sessions.site_ids import KnownSite
from stapsdtd.sessions.subscription import Subscription
from stapsdtd.sessions.targets import ArmRequest
from stapsdtd.v1 import stapsdt_pb2 as pb
from tests.api.served import PATIENCE_SECONDS, Served, processes, served
from tests.support import wait_for
from tests.unit.samples import site

_OF_SUBSCRIPTIONS = (
    ArmRequest, Choices, Choosing, Clause, ConsideredObject, FirstArming, KnownSite, LiveSubscription, Outcome, Session,
    Subscription,
)  # fmt: skip


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), ended_kept_seconds=0.01) as made:
        made.servicer.arm_seconds = PATIENCE_SECONDS
        yield made


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> Counter[str]:
    """Count what there is of subscriptions."""
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, _OF_SUBSCRIPTIONS))


def test_ended_subscriptions_are_freed(server: Served) -> None:
    with processes(2) as pids:
        # so many that they are matched in the matching thread
        server.map(
            pids[0], server.file_object(*(site(f"n{number}", number) for number in range(600)), name="many"), "many"
        )
        server.map(pids[1], server.file_object(site("odd"), name="odd"), "odd")
        server.engine.refuse["odd"] = "no"
        before = left()
        requests = (
            pb.SubscribeRequest(selectors=["app:*"]),
            pb.SubscribeRequest(selectors=["app:n1*"], where="arg1 > 2", fields=["arg1 + 1"]),
            pb.SubscribeRequest(selectors=["app:*"], scope=pb.Scope(pids=pids)),
            pb.SubscribeRequest(
                selectors=["app:*"],
                aggregation=pb.Aggregation(
                    functions=[pb.AggregateFunction(function=pb.AggregateFunction.FUNCTION_COUNT)]
                ),
            ),
        )
        for request in requests:
            answer = server.stub.Subscribe(request, timeout=PATIENCE_SECONDS)
            assert len(answer.sites) > 10
            call = server.stream(answer.subscription_id)
            server.unsubscribe(answer.subscription_id)
            for _ in call:
                pass
        wait_for(lambda: left() == before, "subscriptions to be freed")
