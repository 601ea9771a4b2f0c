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


def test_a_device_that_does_not_even_take_a_copy_holds_up_no_close(monkeypatch, caplog):
    """Its queue is full, and it is stuck: torch waits in the call."""
    monkeypatch.setattr(device_copies, "DEVICE_S", 0.1)
    stuck, taken, closed = threading.Event(), threading.Event(), []
    made = Told()
    copy = made.device.copy

    def blocked(*given):
        taken.set()
        assert stuck.wait(30)
        return copy(*given)

    made.device.copy, made.device.close = blocked, lambda: closed.append(True)
    made.submit(1, b"a")
    assert taken.wait(10)
    try:
        closing = threading.Thread(target=made.reads.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert not closed, "its memory may still be used"
        assert "not finished by the device" in caplog.text
    finally:
        stuck.set()
        made.reads._copies._thread.join(10)


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


@pytest.mark.parametrize("fault", ["receive", "rows"])
def test_a_landing_that_fails_in_its_reader_has_ended(fault, landings, wait_until):
    landing = landings.landing(plane=STATE_PLANE if fault == "rows" else 0)

    def receive(_places, _seeds):
        if fault == "receive":
            raise Faulty("ours")
        return landing.digests

    for number in range(2 * SLOTS):
        with pytest.raises((Faulty, IndexError)):
            landings.landings.land(landing, receive)
        assert len(landings.ended) == number + 1
        assert landings.ended[-1][1] is FailureCode.PEER_CLOSED
    settled = []
    landings.landings.settle(b"link", lambda: settled.append(True))
    assert settled

    whole = landings.landing()
    landings.landings.land(whole, lambda _places, _seeds: whole.digests)
    wait_until(lambda: landings.ended[-1][1] is None)


def test_a_landing_whose_copy_cannot_be_begun_fails_and_is_held(landings, wait_until):
    landings.device.copy = fail_once(landings.device.copy)
    landing = landings.landing()
    landings.landings.land(landing, lambda _places, _seeds: landing.digests)
    wait_until(lambda: landings.stuck)
    assert landings.ended == []
    settled = []
    landings.landings.settle(b"link", lambda: settled.append(True))
    assert not settled, "the device may still write"
