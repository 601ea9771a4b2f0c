"""Goal: links share the staging of a device, and who finds none for too long is told."""

import threading

import numpy as np
import pytest

from kvstore.handoff import device_copies
from kvstore.handoff.device_reads import LINK_SLOTS_MAX, DeviceReads
from kvstore.handoff.effects import PushJob
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.places import PushRange
from kvstore.mover.kvpool import KVPool
from kvstore.mover.push_way import StartedCopy, slot_count

BLOCKS, BLOCK_BYTES, SLOTS = 8, 64, 4


class Device:
    """A device without torch; it copies when it is told to go on."""

    device = "cpu:0"

    def __init__(self, slots=SLOTS):
        self.memory = np.arange(BLOCKS, dtype=np.uint8).repeat(BLOCK_BYTES).reshape(BLOCKS, -1)
        self.slots = np.zeros((slots, 1 << 20), dtype=np.uint8)
        self.goes_on = threading.Event()
        self.goes_on.set()
        pool = KVPool((int(self.memory.ctypes.data),), BLOCK_BYTES, BLOCK_BYTES, BLOCKS, 1, "cpu:0")
        self.pools = (pool,)
        self.pool = HandoffPool(pool, 16, device=self)

    def fence(self):
        return self

    def way_out(self, slot_bytes, rows_max):
        assert slot_bytes == self.slots.shape[1]
        assert rows_max > slot_bytes // BLOCK_BYTES
        return self

    def copy(self, slot, rows, heads, after):
        assert heads is None
        found = np.concatenate([self.memory[one.blocks].reshape(-1) for one in rows])
        self.slots[slot, : len(found)] = found
        return StartedCopy(self, "")

    def done(self):
        return self.goes_on.is_set()

    def close(self):
        pass


class Told:
    """What reads have told."""

    def __init__(self, slots=SLOTS):
        self.ready, self.failed = [], []
        self.device = Device(slots)
        self.reads = DeviceReads(
            self.device.pool, self.ready.append, lambda job, why: self.failed.append((job, why))
        )

    def submit(self, number, link, block=0, receiver=b""):
        share, none = self.device.pool.shape.whole, np.zeros(0, dtype=np.uint64)
        ranges, blocks = [PushRange(0, 0, 1)], np.array([block])
        job = PushJob(
            number, link, number, ranges, [block], blocks, none, share, [],
            receiver=receiver or link,
        )  # fmt: skip
        self.reads.submit(job)
        return job

    @property
    def numbers(self):
        return sorted(job.number for job in self.ready)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("slot_bytes", "slots"), [(MIB, 8), (32 * MIB, 8), (33 * MIB, 7), (128 * MIB, 2), (1 << 30, 2)]
)
def test_large_slots_are_fewer(slot_bytes, slots):
    """They are as large as a block of state data, and pinned."""
    assert slot_count(slot_bytes) == slots


def test_of_two_slots_a_link_has_one(wait_until):
    made = Told(slots=2)
    jobs = [made.submit(1, b"slow"), made.submit(2, b"slow"), made.submit(3, b"fast")]
    wait_until(lambda: made.numbers == [1, 3])
    made.reads.ended(jobs[0])
    wait_until(lambda: made.numbers == [1, 2, 3])
    made.reads.close()


@pytest.fixture
def told():
    made = Told()
    yield made
    made.device.goes_on.set()
    for link in (b"slow", b"fast", b"a", b"b"):
        made.reads.drop(link)
    made.reads.close()


def test_a_slow_link_leaves_slots_to_the_others(told, wait_until):
    for number in range(1, 7):
        told.submit(number, b"slow")
    wait_until(lambda: told.numbers == [1, 2])
    assert LINK_SLOTS_MAX == 2
    for number in range(11, 20):
        job = told.submit(number, b"fast", number % BLOCKS)
        wait_until(lambda number=number: number in told.numbers)
        places, _ = told.reads.read(job)
        assert places[0][1] == BLOCK_BYTES
        told.reads.ended(job)
    assert [number for number in told.numbers if number < 10] == [1, 2]
    told.reads.ended(told.ready[0])
    wait_until(lambda: [number for number in told.numbers if number < 10] == [1, 2, 3])
    assert [job.number for job in told.reads.drop(b"slow")] == [4, 5, 6]


def test_who_finds_no_staging_for_too_long_is_told_and_a_slow_link_is_not_late(
    told, wait_until, monkeypatch
):
    for number, link in enumerate([b"a", b"a", b"b", b"c"], 1):
        told.submit(number, link)
        wait_until(lambda number=number: number in told.numbers)
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    told.submit(5, b"a")
    told.submit(6, b"slow")
    wait_until(lambda: [job.number for job, _ in told.failed] == [6])
    assert "staging" in told.failed[0][1]
    assert told.numbers == [1, 2, 3, 4], "the third of the first link waits for its own"


def test_a_link_has_two_slots_although_its_engine_may_have_more(wait_until):
    """One is filled while the other is sent; more would only wait."""
    made = Told(slots=8)
    for number in range(1, 5):
        made.submit(number, b"slow")
    for number in range(11, 15):
        job = made.submit(number, b"fast")
        wait_until(lambda number=number: number in made.numbers)
        made.reads.ended(job)
    assert [number for number in made.numbers if number < 10] == [1, 2]
    made.reads.drop(b"slow")
    made.reads.close()


def test_slow_links_of_one_engine_leave_slots_to_other_engines(wait_until):
    """One for each of its ranks, perhaps."""
    made = Told(slots=8)
    links = [bytes([65 + number]) for number in range(6)]
    for number in range(24):
        made.submit(number, links[number % 6], receiver=b"slow")
    wait_until(lambda: len(made.numbers) == 4)
    held = {job.link for job in made.ready}
    assert len(held) == 4, "each link has one before any has two"
    for number in range(31, 40):
        job = made.submit(number, b"fast", number % BLOCKS)
        wait_until(lambda number=number: number in made.numbers)
        made.reads.ended(job)
    other = made.submit(41, b"other")
    wait_until(lambda: 41 in made.numbers)
    assert sum(job.receiver == b"slow" for job in made.ready) == 4

    made.reads.ended(made.ready[0])
    wait_until(lambda: sum(job.receiver == b"slow" for job in made.ready) == 5)
    assert made.ready[-1].link not in held, "the link that has none is next"
    for link in links:
        made.reads.drop(link)
    made.reads.ended(other)
    made.reads.close()


def test_a_link_whose_engine_has_slots_is_not_late(told, wait_until, monkeypatch):
    """It waits for its own engine, and not for others."""
    jobs = [told.submit(number, bytes([number]), receiver=b"slow") for number in (1, 2)]
    wait_until(lambda: told.numbers == [1, 2])
    told.submit(3, b"a", receiver=b"slow")
    jobs += [told.submit(4, b"b"), told.submit(5, b"fast")]
    wait_until(lambda: told.numbers == [1, 2, 4, 5])
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    told.submit(6, b"last")
    wait_until(lambda: [job.number for job, _ in told.failed] == [6])
    monkeypatch.setattr(device_copies, "DEVICE_S", 10.0)
    told.reads.ended(jobs[0])
    told.reads.ended(jobs[2])
    wait_until(lambda: 3 in told.numbers)


def test_an_engine_that_had_a_slot_once_is_late_like_others(told, wait_until, monkeypatch):
    job = told.submit(1, b"a", receiver=b"once")
    wait_until(lambda: told.numbers == [1])
    told.reads.ended(job)
    for number in range(2, 2 + SLOTS):
        told.submit(number, bytes([number]), receiver=bytes([number]))
    wait_until(lambda: len(told.numbers) == 1 + SLOTS)
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    told.submit(9, b"a", receiver=b"once")
    wait_until(lambda: [job.number for job, _ in told.failed] == [9])


def test_a_late_copy_keeps_its_slot_and_blocks_until_the_device_has_finished(
    told, wait_until, monkeypatch
):
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    told.device.goes_on.clear()
    job = told.submit(1, b"a")
    wait_until(lambda: told.failed)
    told.reads.ended(job)
    assert told.reads.holds_blocks(1)
    assert told.reads.copying == 1
    told.device.goes_on.set()
    wait_until(lambda: not told.reads.holds_blocks(1))
    assert told.ready == []
    monkeypatch.setattr(device_copies, "DEVICE_S", 10.0)
    for number in range(2, 2 + SLOTS):
        told.submit(number, bytes([number]))
    wait_until(lambda: len(told.ready) == SLOTS)
