"""Goal: after a fault of ours all jobs and landings of a device end, and its thread lives on."""

import threading

import numpy as np
import pytest

from kvstore.handoff import device_copies
from kvstore.handoff.effects import Landing, PushJob
from kvstore.handoff.landings import DeviceLandings
from kvstore.handoff.memory import AuxSlots, digests_of
from kvstore.handoff.places import STATE_PLANE, PushRange
from kvstore.handoff.states import FailureCode
from tests.handoff.test_device_reads import BLOCK_BYTES, SLOTS, Device, Told, told  # noqa: F401


class Faulty(RuntimeError):
    """No error that the code knows of."""


def fail_once(call):
    """The same function, which fails when it is called first."""
    left = [Faulty("ours")]

    def tried(*given):
        if left:
            raise left.pop()
        return call(*given)

    return tried


def has_slots(told, wait_until):  # noqa: F811
    """Assert that as many jobs as there are slots are read; ends them."""
    jobs = [told.submit(number, bytes([number])) for number in range(10, 10 + SLOTS)]
    wait_until(lambda: {job.number for job in jobs} <= set(told.numbers))
    for job in jobs:
        told.reads.ended(job)


def test_a_fence_that_fails_ends_its_job_only(told, wait_until):  # noqa: F811
    told.device.done = fail_once(told.device.done)
    told.submit(1, b"a")
    wait_until(lambda: [job.number for job, _ in told.failed] == [1])
    assert "ours" in told.failed[0][1]
    wait_until(lambda: not told.reads.holds_blocks(1))
    has_slots(told, wait_until)


def test_a_job_that_cannot_be_begun_ends(told, wait_until):  # noqa: F811
    share, none = told.device.pool.shape.whole, np.zeros(0, dtype=np.uint64)
    ranges = [PushRange(STATE_PLANE, 0, 1)]  # of a buffer that is not there
    told.reads.submit(PushJob(1, b"a", 1, ranges, [0], np.array([0]), none, share, []))
    wait_until(lambda: [job.number for job, _ in told.failed] == [1])
    assert not told.reads.holds_blocks(1)
    has_slots(told, wait_until)


def test_who_fails_when_told_an_end_leaves_the_others_theirs(told, wait_until):  # noqa: F811
    told.reads._ready = fail_once(told.reads._ready)
    told.submit(1, b"a")
    told.submit(2, b"b")
    told.submit(3, b"c")
    wait_until(lambda: len(told.numbers) == 2)


def test_a_copy_of_which_nobody_knows_whether_it_runs_keeps_its_blocks(
    told, wait_until, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    told.device.copy = fail_once(told.device.copy)
    told.submit(1, b"a")
    wait_until(lambda: told.failed)
    told.submit(2, b"b")
    wait_until(lambda: sorted(job.number for job, _ in told.failed) == [1, 2])
    assert told.reads.holds_blocks(1)
    assert not told.reads.holds_blocks(2), "it was never begun, as the device is late"


def test_a_device_that_does_not_even_take_a_copy_holds_up_no_close(wait_until, monkeypatch, caplog):
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.1)
    made = Told()
    blocked = Blocked(made.device)
    made.submit(1, b"a")
    wait_until(lambda: blocked.taken)
    try:
        closing = threading.Thread(target=made.reads.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert not blocked.closed, "its memory may still be used"
        assert "did not finish on the device" in caplog.text
    finally:
        blocked.goes_on.set()
        for thread in made.reads._copies._threads:
            thread.join(10)


class Blocked:
    """A device that takes no copy until it is told to; torch waits in the call."""

    def __init__(self, device):
        self.goes_on, self.taken, self.closed, self._copy = threading.Event(), [], [], device.copy
        device.copy, device.close = self.copy, lambda: self.closed.append(True)

    def copy(self, *given):
        self.taken.append(given)
        assert self.goes_on.wait(30)
        return self._copy(*given)


def test_a_copy_that_the_device_does_not_take_fails_in_time_and_so_do_those_behind_it(
    wait_until, monkeypatch
):
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    made = Told()
    blocked = Blocked(made.device)
    made.submit(1, b"a")
    wait_until(lambda: blocked.taken)
    made.submit(2, b"b")

    wait_until(lambda: sorted(job.number for job, _ in made.failed) == [1, 2])
    why = {job.number: why for job, why in made.failed}
    assert why[1] == "the device has not taken a copy after 0 s"
    assert "staging" in why[2]
    assert made.reads.holds_blocks(1)
    assert not made.reads.holds_blocks(2)
    blocked.goes_on.set()
    wait_until(lambda: not made.reads.holds_blocks(1))
    assert made.ready == []
    monkeypatch.setattr(device_copies, "DEVICE_S", 10.0)
    has_slots(made, wait_until)
    made.reads.close()
    assert blocked.closed


def test_a_landing_that_the_device_does_not_take_is_told_in_time(landings, wait_until, monkeypatch):
    """Its reader waits in the call; the others are told that the device is late."""
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    blocked = Blocked(landings.device)
    landing = landings.landing()

    def land():
        landings.landings.land("peer", landing, lambda _places, _seeds: landing.digests)

    reader = threading.Thread(target=land, daemon=True)
    reader.start()
    try:
        wait_until(lambda: landings.stuck)
        assert landings.stuck == [(1, "the device has not taken a copy after 0 s")]
        landings.landings.land("peer", landing, lambda _places, _seeds: b"")
        assert landings.ended[-1][1:] == (
            FailureCode.DEVICE,
            "no staging is free: the device is late, or links of this peer are slow",
        )  # fmt: skip
        landings.landings.close()
        assert not blocked.closed, "its memory may still be used"
    finally:
        blocked.goes_on.set()
        reader.join(10)


class Landings:
    """Landings of a device of one link, and what they have told."""

    def __init__(self):
        self.device, self.ended, self.stuck = Device(), [], []
        self.device.way_in = self.device.way_out
        self.landings = DeviceLandings(
            self.device.pool, AuxSlots(1, 64), lambda *end: self.ended.append(end),
            lambda *end: self.stuck.append(end),
        )  # fmt: skip

    def landing(self, plane=0):
        share, ranges = self.device.pool.shape.whole, [PushRange(plane, 0, 1)]
        data = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        place = [(int(data.ctypes.data), BLOCK_BYTES)]
        digests = digests_of(share.seed_of(1), ranges, place)
        return Landing(b"link", 1, ranges, [0], digests, share, [])


@pytest.fixture
def landings():
    made = Landings()
    yield made
    made.landings.close()


def test_links_whose_bytes_trickle_leave_slots_to_other_peers(landings, wait_until, monkeypatch):
    """A peer has many links, and may send each a byte now and then for as long as a handoff."""
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.2)
    slow, begun, goes_on = landings.landing(), [], threading.Event()

    def trickle(_places, seeds):
        begun.append(bool(seeds))  # there are none for bytes that belong nowhere
        goes_on.wait(30)
        return slow.digests

    def land():
        landings.landings.land("slow", slow, trickle)

    readers = [threading.Thread(target=land, daemon=True) for _ in range(SLOTS)]
    for reader in readers:
        reader.start()
    try:
        share = SLOTS // 2
        wait_until(lambda: len(begun) == SLOTS)
        assert sum(begun) == share
        monkeypatch.setattr(device_copies, "DEVICE_S", 10.0)
        for number in range(2 * SLOTS):
            whole = landings.landing()
            landings.landings.land("quick", whole, lambda _places, _seeds: whole.digests)  # noqa: B023
            wait_until(lambda: [end[1] for end in landings.ended].count(None) == number + 1)  # noqa: B023
    finally:
        goes_on.set()
        for reader in readers:
            reader.join(10)
    wait_until(lambda: [end[1] for end in landings.ended].count(None) == 2 * SLOTS + share)


@pytest.mark.parametrize("fault", ["receive", "rows"])
def test_a_landing_that_fails_in_its_reader_has_ended(fault, landings, wait_until):
    landing = landings.landing(plane=STATE_PLANE if fault == "rows" else 0)

    def receive(_places, _seeds):
        if fault == "receive":
            raise Faulty("ours")
        return landing.digests

    for number in range(2 * SLOTS):
        with pytest.raises((Faulty, IndexError)):
            landings.landings.land("peer", landing, receive)
        assert len(landings.ended) == number + 1
        assert landings.ended[-1][1] is FailureCode.PEER_CLOSED
    settled = []
    landings.landings.settle(b"link", lambda: settled.append(True))
    assert settled

    whole = landings.landing()
    landings.landings.land("peer", whole, lambda _places, _seeds: whole.digests)
    wait_until(lambda: landings.ended[-1][1] is None)


def test_a_landing_whose_copy_cannot_be_begun_fails_and_is_held(landings, wait_until):
    landings.device.copy = fail_once(landings.device.copy)
    landing = landings.landing()
    landings.landings.land("peer", landing, lambda _places, _seeds: landing.digests)
    wait_until(lambda: landings.stuck)
    assert landings.ended == []
    settled = []
    landings.landings.settle(b"link", lambda: settled.append(True))
    assert not settled, "the device may still write"
