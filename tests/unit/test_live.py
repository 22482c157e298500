"""Which of the objects that a subscription arms may be the same file as another one."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from stapsdtd.model import ObjectKey
from stapsdtd.sessions.choices import Choices
from stapsdtd.sessions.live import ConsideredObject, LiveSubscription
from stapsdtd.sessions.session import Session
from stapsdtd.sessions.subscription import Subscription
from tests.unit.samples import sample_object, site

# two overlays' of one layer, whose own file has the same inode number
ONE = ObjectKey(0x37, 1000, 4096, 7, is_certain=False)
OTHER = replace(ONE, dev=0x27)
LAYERS = ObjectKey(0xFE00, 1000, 4096, 7)


def live_with(*keys: ObjectKey) -> LiveSubscription:
    live = LiveSubscription(cast("Subscription", None), cast("Session", None), lambda: None, Choices(()))
    for key in keys:
        live.add(ConsideredObject(sample_object(site(), of=key), (), is_ephemeral=False, user=0, since=0.0))
    return live


@pytest.mark.parametrize("armed", [OTHER, LAYERS, replace(OTHER, inode=(3 << 61) + 1000)])
def test_uncertain_files_that_look_alike_are_candidates(armed: ObjectKey) -> None:
    live = live_with(armed)
    found = live.candidate_for(ONE)
    assert found is not None
    assert found.object.key == armed
    live.pop(armed)
    assert live.candidate_for(ONE) is None


@pytest.mark.parametrize("armed", [replace(OTHER, inode=1001), replace(OTHER, size=1), replace(OTHER, mtime_ns=8)])
def test_others_are_not(armed: ObjectKey) -> None:
    assert live_with(armed).candidate_for(ONE) is None


def test_certain_files_are_what_they_are() -> None:
    """Snapshots have the same inode numbers, sizes and times."""
    snapshot = replace(LAYERS, instance=5)
    assert snapshot.file != LAYERS.file
    assert live_with(LAYERS, replace(LAYERS, instance=4)).candidate_for(snapshot) is None
    # such as a file that is on a disk and one that an overlay shows
    assert live_with(LAYERS).candidate_for(OTHER) is not None
