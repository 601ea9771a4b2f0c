"""Goal: whatever the process that moves bytes does, each transfer has one end, by its deadline, and
is settled only when nothing can arrive any more."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.protocol.errors import CapacityError, InvalidArgument, TransferError, TransferTimeout
from kvstore.transport.attempts import AVOIDED_NS, CONTACT_NS, Attempts, Give, Replace
from kvstore.transport.base import PageTransfer, Range, TransferEnd, TransferSettled

MAX_BYTES = 1000
ENDPOINTS = ("a:1", "b:1", "c:1")


def transfer(number: int, endpoint: str = "a:1", deadline_ns: int = 10**9, pages: int = 2):
    one = np.zeros(pages, dtype=np.uint64)
    ranges = [Range(0, 0, 100 * at, 100) for at in range(pages)]
    return PageTransfer(
        number, endpoint, bytes(16), ranges, one, one, bytes(16 * pages), deadline_ns
    )


def started() -> Attempts:
    attempts = Attempts(MAX_BYTES)
    attempts.started()
    return attempts


def test_a_failed_read_settles_with_the_end_of_the_process_and_the_others_go_on():
    attempts = started()
    for number, endpoint in ((1, "a:1"), (2, "b:1")):
        attempts.submit(transfer(number, endpoint), 0)
    attempts.failed(1, b"\1\0", "broken", 5, touched=True)
    (end,) = attempts.events
    assert (end.number, end.good, end.settled) == (1, b"\1\0", False)
    assert attempts.effects[-1] == Replace()
    attempts.effects.clear()

    attempts.gone()
    attempts.started()
    assert attempts.events[1:] == [TransferSettled(1)]
    assert [one.transfer.number for one in attempts.effects] == [2]
    attempts.arrived(2, b"\1\1")
    assert attempts.events[-1] == TransferEnd(2, b"\1\1", None, settled=True)
    assert attempts.in_flight_bytes == 0


def test_a_read_that_never_reached_its_peer_is_settled_with_its_end():
    attempts = started()
    attempts.submit(transfer(1), 0)
    attempts.failed(1, b"\0\0", "nobody there", 5, touched=False)
    assert attempts.events[-1].settled
    assert Replace() not in attempts.effects


def test_a_peer_that_failed_is_not_asked_for_a_while():
    attempts = started()
    attempts.submit(transfer(1), 0)
    attempts.failed(1, b"\0\0", "nobody there", 5, touched=False)
    attempts.submit(transfer(2, deadline_ns=10**12), 6)
    assert attempts.events[-1].settled
    assert "not asked again yet" in str(attempts.events[-1].error)
    assert attempts.avoids("a:1", 6)
    attempts.submit(transfer(3, deadline_ns=10**12), 5 + AVOIDED_NS)
    assert attempts.effects[-1].transfer.number == 3


def test_a_first_contact_that_takes_too_long_ends_the_read_and_the_process():
    attempts = started()
    attempts.submit(transfer(1, deadline_ns=10**12), 0)
    attempts.submit(transfer(2, "b:1", 10**12), 0)
    attempts.contacting(1, 0)
    assert attempts.next_ns() == CONTACT_NS
    attempts.advance(CONTACT_NS)
    assert isinstance(attempts.events[-1].error, TransferTimeout)
    assert attempts.effects[-1] == Replace()
    assert len(attempts.events) == 1, "the other read goes on"


def test_a_read_that_ends_three_processes_is_not_given_to_a_fourth():
    attempts = started()
    attempts.submit(transfer(1), 0)
    for _ in range(2):
        attempts.gone()
        assert not attempts.events
        attempts.started()
    attempts.gone()
    assert isinstance(attempts.events[-1].error, TransferError)
    assert attempts.events[-1].settled


def test_a_write_is_given_to_one_process_only():
    attempts = started()
    attempts.submit(transfer(1), 0, write=True)
    assert [one.write for one in attempts.effects] == [True]
    attempts.gone()
    (end,) = attempts.events
    assert isinstance(end.error, TransferError)
    assert end.settled, "our memory is not read any more"
    attempts.started()
    assert not attempts.effects


def test_where_there_are_only_writes_those_that_run_end_before_the_process_is_replaced():
    attempts = Attempts(MAX_BYTES, patient=True)
    attempts.started()
    for number, endpoint in ((1, "a:1"), (2, "b:1"), (3, "b:1")):
        attempts.submit(transfer(number, endpoint), 0, write=True)
    attempts.failed(1, b"\0\0", "broken", 5, touched=True)
    assert Replace() not in attempts.effects
    assert not attempts.up, "it gets no more"
    attempts.arrived(2, b"\1\1")
    assert Replace() not in attempts.effects
    attempts.advance(10**9)  # the third is late
    assert attempts.effects[-1] == Replace()
    attempts.gone()
    ends = {
        one.number: one.error is None for one in attempts.events if isinstance(one, TransferEnd)
    }
    assert ends == {1: False, 2: True, 3: False}


def test_a_process_that_hangs_in_a_contact_is_replaced_at_once():
    attempts = Attempts(MAX_BYTES, patient=True)
    attempts.started()
    for number, endpoint in ((1, "a:1"), (2, "b:1"), (3, "c:1")):
        attempts.submit(transfer(number, endpoint, 10**12), 0, write=True)
    attempts.failed(1, b"\0\0", "broken", 5, touched=True)
    attempts.contacting(2, 10)
    attempts.advance(10 + CONTACT_NS)
    assert attempts.effects[-1] == Replace()


def test_a_transfer_that_no_process_got_says_that_it_has_not_begun():
    attempts = Attempts(MAX_BYTES)
    attempts.submit(transfer(1), 0, write=True)
    attempts.advance(10**9)
    attempts.submit(transfer(2, deadline_ns=10**9), 10**9, write=True)
    attempts.started()
    attempts.submit(transfer(3, deadline_ns=10**10), 10**9, write=True)
    attempts.failed(3, b"\0\0", "nobody there", 10**9, touched=False)
    assert [one.begun for one in attempts.events] == [False, False, True]


def test_numbers_and_bytes_are_bounded():
    attempts = started()
    attempts.submit(transfer(1), 0)
    with pytest.raises(InvalidArgument):
        attempts.submit(transfer(1), 0)
    attempts.submit(transfer(2, pages=9), 0)
    assert isinstance(attempts.events[-1].error, CapacityError)


class Processes(RuleBasedStateMachine):
    """Processes that read, fail, say nothing and end, in any order."""

    writes = False

    def __init__(self):
        super().__init__()
        self.attempts = Attempts(MAX_BYTES, patient=self.writes)
        self.ran = False
        self.now_ns = 0
        self.number = 0
        self.deadlines: dict[int, int] = {}
        self.ends: dict[int, TransferEnd] = {}
        self.settled: set[int] = set()
        #: What the present process has, and may still write.
        self.given: set[int] = set()
        self.killed = False

    def carry(self):
        for event in self.attempts.events:
            if isinstance(event, TransferEnd):
                assert event.number not in self.ends, "a transfer has two ends"
                self.ends[event.number] = event
                if event.settled:
                    self.settle(event.number)
            else:
                self.settle(event.number)
        self.attempts.events.clear()
        for effect in self.attempts.effects:
            if isinstance(effect, Give):
                assert not self.killed
                self.given.add(effect.transfer.number)
            else:
                self.killed = True
        self.attempts.effects.clear()

    def settle(self, number):
        assert number in self.ends
        assert number not in self.settled
        assert number not in self.given, "the process may still write it"
        self.settled.add(number)

    @rule(at=st.sampled_from(ENDPOINTS), left_ns=st.integers(1, 5), pages=st.integers(1, 6))
    def submit(self, at, left_ns, pages):
        self.number += 1
        self.deadlines[self.number] = self.now_ns + left_ns * CONTACT_NS
        self.attempts.submit(
            transfer(self.number, at, self.deadlines[self.number], pages), self.now_ns,
            write=self.writes,
        )  # fmt: skip
        self.carry()

    @rule(step=st.integers(1, CONTACT_NS))
    def pass_time(self, step):
        self.now_ns += step
        self.attempts.advance(self.now_ns)
        self.carry()

    @precondition(lambda self: not self.attempts.up)
    @rule()
    def start(self):
        self.given.clear()
        self.attempts.gone()
        self.killed = False
        self.carry()
        self.attempts.started()
        self.ran = True
        self.carry()

    @precondition(lambda self: self.attempts.up)
    @rule()
    def crash(self):
        self.ran = False
        self.given.clear()
        self.attempts.gone()
        self.carry()

    @precondition(lambda self: self.given)
    @rule(
        data=st.data(),
        how=st.sampled_from(["arrives", "fails", "is refused", "contacts", "contacted"]),
    )
    def say(self, data, how):
        number = data.draw(st.sampled_from(sorted(self.given)))
        match how:
            case "arrives":
                self.given.discard(number)
                if number not in self.ends:
                    self.attempts.arrived(number, b"\1")
            case "fails":
                self.attempts.failed(number, b"\0", "x", self.now_ns, touched=True)
            case "is refused":
                self.given.discard(number)
                self.attempts.failed(number, b"\0", "x", self.now_ns, touched=False)
            case "contacts":
                self.attempts.contacting(number, self.now_ns)
            case "contacted":
                self.attempts.contacted()
        self.carry()

    @rule(number=st.integers(1, 50))
    def cancel(self, number):
        self.attempts.cancel(number)
        self.carry()

    @invariant()
    def no_transfer_is_late(self):
        late = [one for one, at_ns in self.deadlines.items() if at_ns <= self.now_ns]
        assert all(one in self.ends for one in late)
        assert self.attempts.in_flight_bytes <= MAX_BYTES

    @invariant()
    def what_is_to_be_replaced_is_killed_or_moves_something(self):
        if self.ran and not self.attempts.up and not self.killed:
            assert self.given - set(self.ends)

    def teardown(self):
        self.now_ns += 10**10
        self.attempts.advance(self.now_ns)
        self.carry()
        self.given.clear()
        self.attempts.gone()
        self.carry()
        assert self.settled == set(self.deadlines)
        assert self.attempts.in_flight_bytes == 0


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class PatientProcesses(Processes):
    """The same with writes only."""

    writes = True


TestPatientProcesses = PatientProcesses.TestCase
TestPatientProcesses.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
