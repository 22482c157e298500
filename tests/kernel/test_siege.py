"""The short form of `./dev siege`: who is attacked beside loses nothing, sees nothing of others, and waits for no one's
work in a shared thread. How long calls take is not asserted; see tests/siege.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.siege.report import details, line
from tests.siege.siege import Siege, besieged

pytestmark = [pytest.mark.kernel, pytest.mark.alone]

_SECONDS = 1.0
_LONGEST_SLICE_SECONDS = 0.5
"""Of processor time in a shared thread. It is to become 5 ms: arming a group of sites, in each process of a scope, and
reporting them takes up to 0.25 s."""

SHORT = [
    "costly_alternatives", "malformed", "forbidden", "escapes", "wide_list", "frames_rapid_reset", "frames_settings",
    "frames_idle", "frames_hpack_bomb", "frames_unread", "late_filter", "late_filter_flood", "flood", "stalled_readers",
    "shared_file", "subscription_churn", "watches_with_changes", "memfds", "forks", "many_pids", "provider_socket",
    "many_sites", "many_sites_of_process", "many_sites_of_file", "many_sites_filtered", "files_churn",
    "list_everything", "large_aggregations", "slow_readers_of_counts", "idle_crowd", "renames", "passing_many_mappers",
    "mapping_bursts", "mapped_often", "unread_lists", "descriptions", "list_one_probe", "watch_one_probe", "statuses",
    "list_wide_subscriptions", "waiting_processes",
]  # fmt: skip
"""One or more of each kind; the others are of the same kinds, and `./dev siege` takes all of them."""

REFUSED = {
    "costly_alternatives": {"INVALID_ARGUMENT"},
    "malformed": {"INVALID_ARGUMENT"},
    "forbidden": {"PERMISSION_DENIED", "NOT_FOUND"},
    "escapes": {"INVALID_ARGUMENT", "FAILED_PRECONDITION"},
}
"""Codes with which the daemon has to refuse something of an attack."""


@pytest.fixture(scope="module")
def siege() -> Iterator[Siege]:
    with besieged() as begun:
        yield begun


@pytest.mark.parametrize("attack", SHORT)
def test_bystander_suffers_nothing(siege: Siege, attack: str) -> None:
    row = siege.under([attack], _SECONDS)
    shown = "\n".join([line(row), *details(row)])
    print(shown)
    assert row.round.is_exact, shown
    assert row.round.foreign == 0, shown
    assert not row.round.failures, shown
    assert not row.problems, shown
    assert max(row.slices.values()) <= _LONGEST_SLICE_SECONDS, row.slices
    assert row.gained.refusals.keys() >= REFUSED.get(attack, set()), shown
