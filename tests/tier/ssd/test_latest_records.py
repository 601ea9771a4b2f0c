"""Goal: of all records of a page the latest counts, unless it was removed; nothing else goes."""

from time import thread_time

import msgspec
import numpy as np
import pytest

from kvstore.protocol.page import SpaceIdentity, pack_pair
from kvstore.state.disk.jobs import DiskTombstone
from kvstore.state.tree.places import Place
from kvstore.testing.tiers import SHARD, SPACE, TierDriver, laid_out
from kvstore.tier import recovery
from kvstore.tier.record import ENTRY, Kind, segment_name
from kvstore.tier.recovery import LoadedSegment, SegmentScan, Tombstone, combine
from tests.tier.ssd.conftest import HOME, open_log, pages, recovered


def test_of_two_records_of_a_page_the_later_stands_and_a_tombstone_takes_both(disk):
    (page, other) = pages(2)
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write((Place(0, 0), page), (Place(0, 8192), other))
    driver.write((Place(1, 0), page))
    log.close()
    log = open_log(disk)
    before = log.recover()
    driver = TierDriver(log)
    assert driver.tombstone(Place(1, 8192), page.record.key).error is None
    assert driver.seal(1).error is None
    log.close()
    log = open_log(disk)
    after = log.recover()
    TierDriver(log).write((Place(2, 0), page))
    log.close()
    again = open_log(disk).recover()

    def live(found):
        return [segment.entries["key"].tolist() for segment in found.segments]

    assert live(before) == [[other.record.key], [page.record.key]]
    assert live(after) == [[other.record.key], []]
    assert live(again) == [[other.record.key], [], [page.record.key]]


def test_a_tombstone_takes_only_pages_of_its_own_space(disk):
    (page,) = pages(1)
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write((Place(0, 0), page))
    space = SpaceIdentity(model="other", kv_dtype="uint8", page_tokens=16)

    def tombstone(job):

        return DiskTombstone(job, Place(0, 8192), space, SHARD, page.record.key)

    driver.run(tombstone)
    log.close()

    assert len(open_log(disk).recover().segments[0].entries) == 1


@pytest.mark.parametrize("buried", [True, False])
def test_what_comes_after_a_page_of_one_shard_takes_no_page_of_another(disk, buried):
    """The pages of all ranks of an engine have the same keys."""
    second = msgspec.structs.replace(SHARD, heads=(1, 2))
    mine, theirs = pages(3), pages(3, shard=second)
    keys = [page.record.key for page in mine]
    assert keys == [page.record.key for page in theirs]
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write(*laid_out(0, [*mine, *theirs]))
    driver.write((Place(1, 0), theirs[0]))
    if buried:
        driver.run(lambda job: DiskTombstone(job, Place(1, 8192), SPACE, second, keys[1]))
    log.close()

    found = open_log(disk).recover()

    assert found.pairs == [(SPACE, SHARD), (SPACE, second)]
    old, new = [
        list(zip(one.entries["key"].tolist(), one.entries["pair"].tolist(), strict=True))
        for one in found.segments
    ]
    assert old == [(one, 0) for one in keys] + [(one, 1) for one in keys[1 + buried :]]
    assert new == [(keys[0], 1)]


def test_a_tombstone_that_ends_within_a_key_stops_no_start(disk):
    """No node writes one; its checksum is right."""
    first, second = pages(2)
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write((Place(0, 0), first), (Place(0, 8192), second))
    driver.tombstone(Place(0, 16384), b"abcd" + bytes(28) + second.record.key + b"abcd")
    log.close()

    [segment] = open_log(disk).recover().segments

    assert segment.entries["key"].tolist() == [first.record.key]


def test_of_too_many_shards_the_oldest_segments_are_not_used(disk, monkeypatch):
    """A page names its space and shard by a number of 16 bits, and clients choose these."""
    monkeypatch.setattr(recovery, "PAIRS_MAX", 2)
    log = recovered(disk)
    driver = TierDriver(log)
    shards = [msgspec.structs.replace(SHARD, heads=(at, at + 1)) for at in range(3)]
    for number, shard in enumerate([shards[1], *shards]):
        driver.write((Place(number, 0), pages(number + 1, shard=shard)[-1]))
    log.close()

    found = open_log(disk).recover()

    assert [one.number for one in found.segments] == [2, 3], "0 has no new shard, but is older"
    assert found.pairs == [(SPACE, shard) for shard in shards[1:]]
    assert [int(one.entries["pair"][0]) for one in found.segments] == [0, 1]
    assert len(found.untouched) == 2
    assert found.next_segment == 4


def test_a_damaged_tombstone_takes_every_older_page_of_its_space(disk):
    first, second = pages(2)
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write((Place(0, 0), first))
    driver.tombstone(Place(0, 8192), bytes(32))
    driver.write((Place(0, 16_384), second))
    driver.seal(0)
    log.close()
    disk.change(HOME / "0" / segment_name(0), lambda content: content.__setitem__(8192 + 4096, 1))

    (segment,) = open_log(disk).recover().segments

    assert segment.entries["key"].tolist() == [second.record.key]


@pytest.mark.parametrize("order", [1, -1])
def test_of_the_tombstones_for_all_pages_of_a_space_the_last_one_counts(disk, order):
    """Each spares what was written after it, unless a later one takes that, too."""
    second = msgspec.structs.replace(SHARD, heads=(1, 2))
    mine, theirs = pages(4), pages(4, shard=second)
    log = recovered(disk)
    driver = TierDriver(log)
    places = [Place(0, at * 8192) for at in range(6)][::order]
    segments = [Place(at, 0) for at in range(1, 9)]
    for at in range(4):
        driver.write((segments[2 * at], mine[at]), (segments[2 * at + 1], theirs[at]))
        if at < 3:
            driver.tombstone(places[at], bytes(32))
    driver.run(lambda job: DiskTombstone(job, places[4], SPACE, second, bytes(32)))
    log.close()

    found = open_log(disk).recover()

    live = [key for one in found.segments for key in one.entries["key"].tolist()]
    assert live == [mine[3].record.key]


def test_a_start_looks_at_its_records_a_few_times_however_many_tombstones_there_are():
    """A `clear` of a space writes one for all of its pages: 2,000 of them took seconds."""
    pair = pack_pair(SPACE, SHARD)
    entries = np.zeros(200_000, ENTRY)
    entries["key"] = np.arange(1, 200_001).astype("<u8").view("V8").astype("V32")
    entries["sequence"] = np.arange(200_000) + 10**6
    entries["kind"] = Kind.PAGE

    def took_s(tombstones: int) -> float:
        many = [Tombstone(at + 1, pair, bytes(32)) for at in range(tombstones)]
        scan = SegmentScan(1, 0, HOME, 1 << 20, LoadedSegment(entries, [pair], many, True, 0))
        begun = thread_time()
        [segment] = combine([scan]).segments
        assert len(segment.entries) == len(entries)
        return thread_time() - begun

    assert took_s(2_000) < 5 * max(took_s(1), took_s(1)) + 0.05
