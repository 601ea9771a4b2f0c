"""A reader vanishes, or stops, while it holds leases and views."""

import signal

import numpy as np
import pytest

from kvstore.protocol.errors import CapacityError
from tests.conftest import WaitUntil
from tests.faults import content
from tests.faults.conftest import CAPACITY_BYTES, PAGES, Scene, StatsUntil

QUOTA_PAGES = PAGES // 2
HELD = 16
LEASED, OTHER, THIRD = 1, 2, 3


def put(scene: Scene, chain: int, start: int, stop: int) -> None:
    """Store a stretch of a chain, in parts that the quota admits."""
    space = content.open_space(scene.client())
    names = content.keys(chain, stop)
    for at in range(start, stop, 16):
        end = min(at + 16, stop)
        bytes_ = [content.page(chain, index) for index in range(at, end)]
        assert space.put(names[at:end], bytes_).stored == end - at


def hit(scene: Scene, chain: int, count: int) -> int:
    return content.open_space(scene.client()).lookup(content.keys(chain, count)).pages


def test_pins_of_a_killed_reader_come_back_and_its_pages_can_be_evicted(
    scene: Scene, stats_until: StatsUntil
):
    put(scene, LEASED, 0, HELD)
    reader = scene.puppet()
    assert reader.do("view", name="a", chain=LEASED, count=HELD) == HELD
    assert scene.daemon.host("pinned") == HELD * content.PAGE_BYTES
    assert scene.daemon.stats()["leases"] == 1

    reader.signal(signal.SIGKILL)

    stats_until(lambda stats: stats["leases"] == stats["host"]["pinned_bytes"] == 0)
    assert hit(scene, LEASED, HELD) == HELD, "what was only read is still there"
    put(scene, OTHER, 0, PAGES)
    assert hit(scene, LEASED, HELD) == 0
    assert hit(scene, OTHER, PAGES) == PAGES


def test_what_a_stopped_reader_blocks_is_bounded_by_its_quota(
    scene: Scene, stats_until: StatsUntil
):
    put(scene, LEASED, 0, QUOTA_PAGES)
    reader = scene.puppet()
    held = QUOTA_PAGES - 1
    assert reader.do("view", name="a", chain=LEASED, count=held) == held
    assert reader.do("view", name="b", chain=LEASED, count=2) == 0, "beyond its quota"
    assert reader.do("state")["troubles"] == {"capacity": 1}
    reader.signal(signal.SIGSTOP)

    room = PAGES - QUOTA_PAGES
    put(scene, OTHER, 0, room)

    assert hit(scene, OTHER, room) == room
    assert scene.daemon.host("pinned") == held * content.PAGE_BYTES
    put(scene, THIRD, 0, room)
    assert hit(scene, THIRD, room) == room
    assert hit(scene, LEASED, held) == held, "what it holds was not evicted"


def test_slots_under_an_expired_lease_of_a_stopped_reader_are_not_used_again(
    scene: Scene, stats_until: StatsUntil, wait_until: WaitUntil
):
    put(scene, LEASED, 0, HELD)
    reader = scene.puppet()
    reader.do("lease_s", seconds=0.1)
    assert reader.do("view", name="a", chain=LEASED, count=HELD) == HELD
    reader.signal(signal.SIGSTOP)
    wait_until(lambda: scene.counted("expired_leases") == 1)

    # Its pages may go now, but nobody else may get their slots.
    put(scene, OTHER, 0, PAGES - HELD)
    put(scene, THIRD, 0, PAGES - HELD)
    with pytest.raises(CapacityError):
        put(scene, THIRD, PAGES - HELD, PAGES)

    assert hit(scene, LEASED, HELD) == 0
    assert hit(scene, THIRD, PAGES) == PAGES - HELD
    assert scene.daemon.host("limbo") == HELD * content.PAGE_BYTES
    reader.signal(signal.SIGCONT)
    assert reader.do("check_view", name="a", chain=LEASED) == []

    reader.signal(signal.SIGKILL)
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == 0)
    put(scene, THIRD, PAGES - HELD, PAGES)
    assert hit(scene, THIRD, PAGES) == PAGES


def test_a_stopped_reader_that_wakes_up_and_closes_its_view_gives_the_slots_back(
    scene: Scene, stats_until: StatsUntil, wait_until: WaitUntil
):
    put(scene, LEASED, 0, HELD)
    reader = scene.puppet()
    reader.do("lease_s", seconds=0.1)
    assert reader.do("view", name="a", chain=LEASED, count=HELD) == HELD
    reader.signal(signal.SIGSTOP)
    wait_until(lambda: scene.counted("expired_leases") == 1)
    put(scene, OTHER, 0, PAGES - HELD)
    put(scene, THIRD, 0, QUOTA_PAGES)
    assert scene.daemon.host("limbo") > 0

    reader.signal(signal.SIGCONT)
    reader.do("close_view", name="a")

    stats_until(lambda stats: stats["leases"] == stats["host"]["limbo_bytes"] == 0)
    assert hit(scene, THIRD, QUOTA_PAGES) == QUOTA_PAGES


def test_a_pool_with_every_page_pinned_refuses_retryably_until_one_is_released(
    scene: Scene, stats_until: StatsUntil
):
    for chain in (LEASED, OTHER):
        put(scene, chain, 0, QUOTA_PAGES)
    first, second = scene.puppet(), scene.puppet()
    assert first.do("view", name="a", chain=LEASED, count=QUOTA_PAGES) == QUOTA_PAGES
    assert second.do("view", name="a", chain=OTHER, count=QUOTA_PAGES) == QUOTA_PAGES
    assert scene.daemon.host("pinned") == CAPACITY_BYTES
    store = scene.client()
    space = content.open_space(store)

    with pytest.raises(CapacityError) as refused:
        space.put(content.keys(THIRD, 1), content.pages(THIRD, 1))

    assert refused.value.retryable
    assert space.lookup(content.keys(THIRD, 1)).pages == 0
    assert first.do("check_view", name="a", chain=LEASED) == []
    first.do("close_view", name="a")
    stats_until(lambda stats: stats["leases"] == 1)
    assert space.put(content.keys(THIRD, 1), content.pages(THIRD, 1)).stored == 1
    assert second.do("check_view", name="a", chain=OTHER) == []


def test_a_view_over_a_cut_connection_keeps_its_bytes_until_it_is_closed(
    scene: Scene, stats_until: StatsUntil, wait_until: WaitUntil
):
    put(scene, LEASED, 0, HELD)
    store = scene.client()
    space = content.open_space(store)
    reader = scene.puppet()
    reader.do("lease_s", seconds=0.1)
    assert reader.do("view", name="a", chain=LEASED, count=HELD) == HELD
    reader.do("cut")
    wait_until(lambda: scene.counted("expired_leases") == 1)

    put(scene, OTHER, 0, PAGES - HELD)
    put(scene, THIRD, 0, QUOTA_PAGES)
    assert reader.do("check_view", name="a", chain=LEASED) == []
    assert scene.daemon.stats()["leases"] == 1

    reader.do("close_view", name="a")
    stats_until(lambda stats: stats["leases"] == stats["host"]["limbo_bytes"] == 0)
    out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(QUOTA_PAGES)]
    assert space.get(content.keys(THIRD, QUOTA_PAGES), out=out) == QUOTA_PAGES
    assert content.wrong_pages(THIRD, out) == []
