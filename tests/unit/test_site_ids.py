from __future__ import annotations

from stapsdtd.sessions.site_ids import SiteIds
from tests.unit.samples import captured, sample_object, site

A = site("a", 1)
STAYING = sample_object(A)


def test_only_so_many_sites_of_gone_objects_are_remembered() -> None:
    ids = SiteIds(lambda *_: None, retired_kept=2)
    ids.arm([ids.id_of(STAYING, captured(A))])
    for inode in range(2, 8):
        site_id = ids.id_of(sample_object(A, inode=inode), captured(A))
        ids.arm([site_id])
        ids.retire([site_id], next_seq=1)
        ids.forget_unused(first_kept=1)
    assert sorted(ids.known(range(1, 10))) == [1, 6, 7]
    assert ids.armed == 1
    assert ids.id_of(STAYING, captured(A)) == 1
    assert ids.id_of(sample_object(A, inode=7), captured(A)) == 7
    assert ids.id_of(sample_object(A, inode=2), captured(A)) == 8


def test_site_that_is_about_to_be_armed_is_not_forgotten() -> None:
    """Its events may come before anyone is told that it is armed."""
    now = 0.0
    ids = SiteIds(lambda *_: None, clock=lambda: now, retired_kept=0)
    site_id = ids.id_of(STAYING, captured(A))
    ids.retire([site_id], next_seq=1)
    now += 100
    assert ids.id_to_arm(STAYING, captured(A)) == site_id
    for inode in range(2, 8):
        ids.id_of(sample_object(A, inode=inode), captured(A))
        ids.forget_unused(first_kept=1)
    assert sorted(ids.known(range(1, 10))) == [site_id]
    ids.retire([site_id], next_seq=1)
    now += 100
    ids.forget_unused(first_kept=1)
    assert ids.known([site_id]) == {}
