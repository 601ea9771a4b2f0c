"""A writer vanishes, or loses its connection, in the middle of a put."""

import signal

import numpy as np
import pytest

from kvstore.protocol.errors import CapacityError
from tests.conftest import WaitUntil
from tests.faults import content
from tests.faults.conftest import CAPACITY_BYTES, PAGES, Scene, StatsUntil

WRITTEN = 8
CHAIN, OTHER = 1, 2


def fill(scene: Scene, count: int) -> list[int]:
    """Put ``count`` pages of OTHER from this process, read them back; which are wrong."""
    space = content.open_space(scene.client())
    names, bytes_ = content.keys(OTHER, count), content.pages(OTHER, count)
    for start in range(0, count, 16):  # the quota bounds what one put may reserve
        part = slice(start, start + 16)
        assert space.put(names[part], bytes_[part]).refused == 0
    return read(scene, count)


def read(scene: Scene, count: int) -> list[int]:
    space = content.open_space(scene.client())
    out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(count)]
    names = content.keys(OTHER, count)
    for start in range(0, count, 16):
        part = out[start : start + 16]
        assert space.get(names[start : start + 16], out=part) == len(part)
    return content.wrong_pages(OTHER, out)


@pytest.mark.parametrize("when", ["before", "middle"])
def test_a_writer_killed_in_the_middle_of_a_put_leaves_no_page_and_no_used_slot(
    scene: Scene, stats_until: StatsUntil, when: str
):
    writer = scene.puppet()
    writer.do("arm", where="gather", when=when)
    writer.begin("put", chain=CHAIN, count=WRITTEN)
    writer.at("gather")
    during = scene.daemon.stats()
    assert during["host"]["writing_bytes"] == WRITTEN * content.PAGE_BYTES
    assert during["puts"] == 1

    writer.process.kill()

    stats_until(lambda stats: not stats["sessions"])
    after = scene.daemon.stats()
    assert after["host"]["free_bytes"] == CAPACITY_BYTES
    assert after["pages"] == 0
    space = content.open_space(scene.client())
    assert space.lookup(content.keys(CHAIN, WRITTEN))[:2] == (0, 0)


def test_a_lookup_that_waits_for_a_killed_writer_is_answered_with_a_miss(
    scene: Scene, stats_until: StatsUntil
):
    writer, reader = scene.puppet(), scene.puppet()
    writer.do("arm", where="gather", when="middle")
    writer.begin("put", chain=CHAIN, count=WRITTEN)
    writer.at("gather")
    waiting = reader.begin("lookup", chain=CHAIN, count=WRITTEN, wait_s=60.0)
    stats_until(lambda stats: stats["waiting_requests"] == 1)

    writer.process.kill()

    assert reader.end(waiting, timeout_s=10.0) == 0


def test_a_late_write_over_a_cut_connection_lands_in_no_slot_that_others_use(
    scene: Scene, stats_until: StatsUntil, wait_until: WaitUntil
):
    writer = scene.puppet()
    writer.do("arm", where="gather", when="middle")
    put = writer.begin("put", chain=CHAIN, count=WRITTEN)
    writer.at("gather")

    writer.do("cut")
    written_bytes = WRITTEN * content.PAGE_BYTES
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == written_bytes)
    wait_until(lambda: writer.do("state")["connected"])
    rest = PAGES - WRITTEN
    assert fill(scene, rest) == []
    space = content.open_space(scene.client())
    with pytest.raises(CapacityError):
        space.put(content.keys(OTHER, rest + 1), content.pages(OTHER, rest + 1))

    assert scene.daemon.host("limbo") == written_bytes
    assert scene.daemon.host("free") == 0

    writer.go()
    outcome = writer.end(put)

    assert outcome["error"] in ("invalid_argument", "peer_unreachable")
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == 0)
    assert read(scene, rest) == []
    assert writer.do("put", chain=CHAIN, count=WRITTEN)["stored"] == WRITTEN


def test_a_put_whose_connection_was_cut_fails_retryably(scene: Scene, wait_until: WaitUntil):
    writer = scene.puppet()
    writer.do("arm", where="gather", when="middle")
    put = writer.begin("put", chain=CHAIN, count=WRITTEN)
    writer.at("gather")
    writer.do("cut")
    wait_until(lambda: writer.do("state")["connected"])
    writer.go()

    assert writer.end(put)["retryable"]


def test_slots_of_a_cut_writer_come_back_when_its_process_dies(
    scene: Scene, stats_until: StatsUntil
):
    writer = scene.puppet()
    writer.do("arm", where="gather", when="middle")
    writer.begin("put", chain=CHAIN, count=WRITTEN)
    writer.at("gather")
    writer.do("cut")
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == WRITTEN * content.PAGE_BYTES)

    writer.signal(signal.SIGKILL)

    stats_until(lambda stats: stats["host"]["free_bytes"] == CAPACITY_BYTES)


def test_another_connection_of_the_writers_process_does_not_declare_its_write_over(
    scene: Scene, stats_until: StatsUntil
):
    writer, other = scene.puppet(), scene.puppet()
    other.do("arm", where="gather", when="before")
    pending = other.begin("put", chain=OTHER, count=1)
    other.at("gather")
    writer.do("arm", where="gather", when="middle")
    put = writer.begin("put", chain=CHAIN, count=WRITTEN)
    writer.at("gather")
    writer.do("cut")
    written_bytes = WRITTEN * content.PAGE_BYTES
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == written_bytes)

    # A lookup that waits has a connection of its own; making it must not free what is written to.
    waiting = writer.begin("lookup", chain=OTHER, count=1, wait_s=30.0)
    stats_until(lambda stats: stats["waiting_requests"] == 1)
    assert scene.daemon.host("limbo") == written_bytes

    other.go()
    other.end(pending)
    assert writer.end(waiting) == 1
    writer.go()
    writer.end(put)
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == 0)
