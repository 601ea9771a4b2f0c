"""Goal: a handoff only goes forward, ends once, and no state outlasts its deadline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.handoff import rooms
from kvstore.handoff.aux_data import decode_aux, prompt_digest
from kvstore.handoff.rooms import BOOT_MAX, ROOM_MAX, RoomNumbers, SeenRooms
from kvstore.handoff.states import (
    FailureCode,
    HandoffFailure,
    HandoffProgress,
    HandoffSide,
    Layer,
    Patience,
    State,
    least,
)
from kvstore.protocol.errors import InvalidArgument, ProtocolError

SECOND = 1_000_000_000
PATIENCE = Patience(bootstrapping_s=3, waiting_s=5, transferring_s=2, total_s=20)
FORWARD = [State.BOOTSTRAPPING, State.WAITING_FOR_INPUT, State.TRANSFERRING, State.SUCCESS]


def failure(code: FailureCode = FailureCode.ABORTED) -> HandoffFailure:
    return HandoffFailure(code, HandoffSide.DECODE, 0, Layer.PROTOCOL, "for a test")


class ProgressModel(RuleBasedStateMachine):
    """A progress beside the plainest description of what it should do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 7 * SECOND
        self.progress = HandoffProgress(PATIENCE, self.now)
        self.state = State.BOOTSTRAPPING
        self.opened = self.heard = self.now
        self.failure: HandoffFailure | None = None

    @rule(state=st.sampled_from(FORWARD))
    def advance(self, state: State) -> None:
        moves = self.state not in (State.FAILED, State.SUCCESS) and state > self.state
        assert self.progress.advance(state, self.now) is moves
        if moves:
            self.state, self.heard = state, self.now

    @rule(code=st.sampled_from(list(FailureCode)))
    def fail(self, code: FailureCode) -> None:
        ends = self.state not in (State.FAILED, State.SUCCESS)
        said = failure(code)
        assert self.progress.fail(said, self.now) is ends
        if ends:
            self.state, self.failure = State.FAILED, said

    @rule(tenths=st.integers(0, 40))
    def wait(self, tenths: int) -> None:
        self.now += tenths * SECOND // 10

    @precondition(lambda self: self.state not in (State.FAILED, State.SUCCESS))
    @rule()
    def hear(self) -> None:
        self.heard = self.now
        self.progress.heard(self.now)

    @invariant()
    def agrees(self) -> None:
        ended = self.state in (State.FAILED, State.SUCCESS)
        limits = {FORWARD[0]: 3, FORWARD[1]: 5, FORWARD[2]: 2}
        late = not ended and (
            self.now - self.heard >= limits[self.state] * SECOND
            or self.now - self.opened >= 20 * SECOND
        )
        assert self.progress.state == self.state
        assert self.progress.failure == self.failure
        assert self.progress.ended is ended
        assert bool(self.progress.expired(self.now)) is late


ProgressModel.TestCase.settings = settings(stateful_step_count=30)
TestProgress = ProgressModel.TestCase


@pytest.mark.parametrize("ended", [State.FAILED, State.SUCCESS])
def test_a_handoff_that_has_ended_stays_as_it_is(ended):
    progress = HandoffProgress(PATIENCE, 0)
    first = failure(FailureCode.DIGEST)
    if ended == State.FAILED:
        progress.fail(first, 1)
    else:
        progress.advance(ended, 1)
    assert not any(progress.advance(state, 2) for state in FORWARD)
    assert not progress.fail(failure(), 2)
    assert progress.state == ended
    assert progress.failure == (first if ended == State.FAILED else None)
    assert progress.expired(1000 * SECOND) == ""


def test_what_an_engine_reads_of_a_handoff_does_not_change_while_it_reads():
    progress = HandoffProgress(PATIENCE, 0)
    progress.advance(State.WAITING_FOR_INPUT, SECOND)
    reading = iter(progress.seconds.items())
    progress.advance(State.TRANSFERRING, 3 * SECOND)  # by a thread of the manager

    assert list(reading) == [("BOOTSTRAPPING", 1.0)]
    assert progress.seconds == {"BOOTSTRAPPING": 1.0, "WAITING_FOR_INPUT": 2.0}


def test_the_state_of_a_request_is_the_lowest_of_its_ranks():
    assert least([State.SUCCESS, State.TRANSFERRING]) is State.TRANSFERRING
    assert least([State.SUCCESS, State.FAILED, State.BOOTSTRAPPING]) is State.FAILED


def test_no_room_is_drawn_twice_and_each_has_63_bits():
    rooms = RoomNumbers(BOOT_MAX)
    drawn = [rooms.draw() for _ in range(100)]

    assert len(set(drawn)) == 100
    assert all(0 <= room <= ROOM_MAX for room in drawn)
    assert set(drawn).isdisjoint(RoomNumbers(BOOT_MAX - 1).draw() for _ in range(100))


def test_a_boot_of_more_than_31_bits_is_refused():
    with pytest.raises(InvalidArgument, match="boot"):
        RoomNumbers(BOOT_MAX + 1)


def test_the_last_rooms_are_remembered(monkeypatch):
    monkeypatch.setattr(rooms, "ROOMS_KEPT", 100)
    seen, numbers = SeenRooms(), RoomNumbers(3)
    numbers.draw()  # for another engine: what was seen has a gap
    drawn = [numbers.draw() for _ in range(300)]
    for room in drawn:
        assert room not in seen
        seen.add(room)
        seen.add(room)

    assert [room in seen for room in drawn] == [False] * 200 + [True] * 100
    assert numbers.draw() not in seen
    assert len(seen._rooms) == 100


def test_an_engine_that_gets_every_room_remembers_one_number_for_each_boot(monkeypatch):
    monkeypatch.setattr(rooms, "ROOMS_KEPT", 100)
    monkeypatch.setattr(rooms, "BOOTS_KEPT", 2)
    seen = SeenRooms()
    for boot in range(4):
        numbers = RoomNumbers(boot)
        drawn = [numbers.draw() for _ in range(300)]
        for at in range(0, 300, 3):
            for room in drawn[at : at + 3][::-1]:  # not quite in order
                seen.add(room)
        assert all(room in seen for room in drawn)
        assert numbers.draw() not in seen
        assert not seen._rooms
    assert len(seen._below) == 2


ROOMS = st.one_of(st.integers(0, 12), st.integers(BOOT_MAX << 32, (BOOT_MAX << 32) + 12))


@given(st.lists(st.one_of(ROOMS, st.integers(0, ROOM_MAX)), max_size=60), ROOMS)
def test_made_up_rooms_make_no_other_one_count_as_seen(made_up, room):
    """Also of the same boot, and with the highest numbers there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "ROOMS_KEPT", 8)
        seen = SeenRooms()
        for one in made_up:
            seen.add(one)
        assert (room in seen) <= (room in made_up)


def test_rooms_of_another_boot_are_other_rooms():
    seen = SeenRooms()
    seen.add(RoomNumbers(1).draw())

    assert RoomNumbers(2).draw() not in seen


def test_the_digest_of_a_prompt_is_that_of_its_token_ids_in_order():
    assert prompt_digest([]).hex() == "99aa06d3014798d86001c324468d497f"
    assert len({prompt_digest(one) for one in ([1, 2], [2, 1], [1], [1, 2, 0], [258])}) == 5
    assert prompt_digest([1, 2]).hex() == "556c70b5fae5b2a44967295965e4d325"
    assert prompt_digest([1, 2]) == prompt_digest(range(1, 3))


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x80", b"\x81\xa1x" + b"\x91" * 60_000 + b"\0"])
def test_aux_data_that_cannot_be_read_are_a_fault_of_the_other_side(packed):
    with pytest.raises(ProtocolError, match="aux data"):
        decode_aux(packed)
