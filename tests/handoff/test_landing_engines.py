"""Goal: what nobody can stop lands in no block that was given away, and every block comes back.

The model is a transport over which bytes of a failed write arrive whenever they like, until the
engine that they go through has ended.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.handoff import rooms
from kvstore.handoff.effects import EndEngine, SendTo
from kvstore.handoff.landing_engines import DOUBT_S_MAX, DOUBT_SHARE, LandingEngines
from kvstore.handoff.messages import (
    Abort,
    Announce,
    Done,
    Drained,
    Failed,
    LandingPlace,
    RangesHead,
    RangesWritten,
)
from kvstore.handoff.owners import LIMBO_SHARE
from kvstore.handoff.places import AUX_PLANE, PushRange, pack_numbers
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffSide, Layer, Patience, State
from kvstore.protocol.errors import CapacityError

SECOND = 1_000_000_000
BLOCKS = 60
SHAPE = PoolShape(1, 1, 64, 1, BLOCKS)
PLACE = LandingPlace("mooncake", "10.0.0.1:15000", b"\0\0\1\0\0\0\0\0")
FAILURE = HandoffFailure(FailureCode.WRITE, HandoffSide.PREFILL, 0, Layer.TRANSPORT, "for a test")


def test_the_engine_is_ended_once_for_all_when_its_other_handoffs_have_ended():
    engines = LandingEngines(1_000)
    assert engines.enter(9, 3) is None, "there is no engine"
    engines.up(1, PLACE)
    assert [engines.enter(room, 3) for room in (1, 2, 3, 4)] == [PLACE] * 4
    engines.doubt(1)
    assert engines.enter(5, 3) is None, "else the wait may have no end"
    engines.doubt(2)
    engines.leave(2)
    engines.leave(3)
    assert engines.due(0) == 0
    engines.leave(4)
    assert engines.due(0) == 1
    assert engines.due(0) == 0, "it is told once"
    assert engines.enter(6, 3) is None
    assert sorted(engines.ended(1)) == [1, 2]
    assert engines.ended(1) == []
    assert engines.enter(7, 3) is None
    engines.up(2, PLACE)
    assert engines.enter(7, 3) == PLACE


def test_the_engine_is_ended_for_doubts_that_are_old_or_many():
    engines = LandingEngines(100)
    engines.up(1, PLACE)
    engines.enter(1, 100 // DOUBT_SHARE)
    engines.enter(2, 1)
    engines.enter(3, 1)
    engines.doubt(1)
    assert engines.due(5) == 0
    assert engines.due(5 + DOUBT_S_MAX * SECOND - 1) == 0
    engines.doubt(2)
    assert engines.due(6) == 1, "more than a tenth of the pool"
    engines.ended(1)

    engines.up(2, PLACE)
    engines.enter(1, 1)
    engines.enter(2, 1)
    engines.doubt(1)
    assert engines.due(7) == 0
    assert engines.due(7 + DOUBT_S_MAX * SECOND) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        LandingPlace("mooncake", "10.0.0.1", bytes(range(1, 9))),
        LandingPlace("mooncake", "etcd://10.0.0.1:2379", bytes(range(1, 9))),
        LandingPlace("mooncake", "10.0.0.1:0", bytes(range(1, 9))),
        LandingPlace("mooncake", "10.0.0.1:65536", bytes(range(1, 9))),
        LandingPlace("mooncake", "h" * 300 + ":1", bytes(range(1, 9))),
        LandingPlace("m" * 300, "10.0.0.1:15000", bytes(range(1, 9))),
        LandingPlace("mooncake", "10.0.0.1:15000", bytes(range(1, 8))),
        LandingPlace("mooncake", "10.0.0.1:15000", bytes(range(1, 17))),
        LandingPlace("mooncake", "10.0.0.1:15000", bytes(8)),
        LandingPlace("mooncake", "10.0.0.1:15000", b"\xff" * 8),
    ],
)
def test_prefill_refuses_a_place_that_cannot_be_one(wrong):
    core = Senders(SHAPE, Patience())
    progress, _ = core.open(1, 2, 0)
    core.received(b"L", Announce(1, 2, 0, pack_numbers([4, 5]), 0, wrong), 0)

    assert progress.failure.code == FailureCode.REFUSED


def test_a_place_on_the_network_is_taken():
    for endpoint in ("10.0.0.1:15000", "[fe80::1]:15000", "node-7.rack:1"):
        place = LandingPlace("mooncake", endpoint, PLACE.planes)
        core = Senders(SHAPE, Patience())
        core.open(1, 2, 0)
        core.received(b"L", Announce(1, 2, 0, pack_numbers([4, 5]), 0, place), 0)
        (submit,) = core.push(1, range(1), range(2), [7, 8], np.zeros(0, dtype=np.uint64), 0)

        assert submit.job.place == place
        assert submit.job.targets == [4]


def test_prefill_says_that_a_write_has_not_ended_well_also_after_the_room_is_forgotten():
    core = Senders(SHAPE, Patience())
    core.open(1, 2, 0)
    core.received(b"L", Announce(1, 2, 0, pack_numbers([4, 5]), 0, PLACE), 0)
    (submit,) = core.push(1, range(1), range(2), [7, 8], np.zeros(0, dtype=np.uint64), 0)
    assert core.received(b"L", Abort(1, FAILURE), 0) == []
    said = core.completed(submit.job.number, FAILURE, 0, doubtful=True)

    assert said == [SendTo(b"L", Drained(1, doubtful=True))]
    assert core.received(b"L", Abort(1, FAILURE), 0) == said
    core.close(1, 0)
    assert core.received(b"L", Abort(1, FAILURE), 0) == said


def test_one_write_that_ended_badly_makes_no_other_room_doubtful(monkeypatch):
    core = Senders(SHAPE, Patience())
    monkeypatch.setattr(rooms, "DOUBTS_KEPT", 2)
    for room in (1, 2, 3, 4):
        core.open(room, 2, 0)
        core.received(
            b"L", Announce(room, 2, 0, pack_numbers([2 * room, 2 * room + 1]), 0, PLACE), 0
        )
    for room in (1, 2, 4):
        (submit,) = core.push(room, range(1), range(2), [7, 8], np.zeros(0, dtype=np.uint64), 0)
        core.completed(submit.job.number, FAILURE, 0, doubtful=True)
        if room == 2:
            for one in (1, 2, 3):
                core.close(one, 0)
            said = [core.received(b"L", Abort(one, FAILURE), 0)[0] for one in (1, 2, 3, 9)]
            doubts = [one.message.doubtful for one in said]
            assert doubts == [True, True, False, False], "nothing was written for 3 and 9"
    (late,) = core.received(b"L", Abort(3, FAILURE), 0)
    assert late.message.doubtful, "some have been forgotten"


@pytest.mark.parametrize("wrong", [PushRange(AUX_PLANE, 0, 8), PushRange(0, 2, 1)])
def test_what_another_transport_cannot_have_written_ends_the_handoff(wrong):
    core = Receivers(SHAPE, 8, 64, Patience())
    core.engine_up(1, PLACE)
    core.linked("p", b"L", 0, writes=True)
    progress, _ = core.open(1, "p", 2, 0)
    core.announce(1, 0, [4, 5], 0)
    head = RangesWritten(1, pack_numbers(wrong), bytes(16))

    assert core.arriving(b"L", head, 0)[0] is None
    assert progress.failure.code == FailureCode.PROTOCOL


def test_ranges_that_were_written_without_a_place_end_the_handoff():
    core = Receivers(SHAPE, 8, 64, Patience())
    core.engine_up(1, PLACE)
    core.linked("p", b"L", 0, writes=False)
    progress, _ = core.open(1, "p", 2, 0)
    core.announce(1, 0, [4, 5], 0)
    head = RangesWritten(1, pack_numbers(PushRange(0, 0, 2)), bytes(16))

    assert core.arriving(b"L", head, 0)[0] is None
    assert progress.failure.code == FailureCode.PROTOCOL


@dataclass
class Stray:
    """A write under way, or one that prefill has given up and that lands when it likes."""

    engine: int
    room: int
    position: int
    block: int


@dataclass
class Announced:
    """What prefill knows of a room."""

    link: bytes
    blocks: list[int]
    place: LandingPlace | None
    engine: int
    written: int = 0
    doubtful: bool = False
    aborted: bool = False


class LateWrites(RuleBasedStateMachine):
    """Decode's core, an engine, and a prefill engine all of whose writes may be late."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Receivers(SHAPE, 8, 64, Patience())
        self.now = 0
        self.room = 0
        self.free = list(range(BLOCKS))
        self.used: dict[int, list[int]] = {}  # of the engine, by room
        self.said: dict[int, Announced] = {}
        self.moving: list[Stray] = []
        self.strays: list[Stray] = []
        self.engine, self.asked = 0, False
        self.engines = 0
        self.links = 0
        self.link = b""

    # ---- decode's engine --------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def ask(self, count: int) -> None:
        if len(self.free) < count or len(self.used) >= 8:
            return
        self.room += 1
        try:
            _, effects = self.core.open(self.room, "p", count, self.now)
        except CapacityError:
            assert self.core.limbo_blocks("p") * LIMBO_SHARE > BLOCKS
            return
        blocks, self.free = self.free[:count], self.free[count:]
        self.used[self.room] = blocks
        self.do(effects + self.core.announce(self.room, 0, blocks, self.now))

    @rule(at=st.integers(0, 7))
    def abort(self, at: int) -> None:
        if self.used:
            self.do(self.core.abort(sorted(self.used)[at % len(self.used)], self.now))

    @rule()
    def collect(self) -> None:
        """Blocks of handoffs that have ended are used for other things at once."""
        for room in list(self.used):
            if self.core._rooms[room].progress.ended and not self.core.holds_blocks(room):
                self.do(self.core.close(room, self.now))
                self.free += self.used.pop(room)

    @rule(seconds=st.sampled_from([0.1, 0.1, 1.0, 6.0, 20.0]))
    def time(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)
        self.do(self.core.tick(self.now))

    # ---- the engine of the transport --------------------------------------------------------

    @precondition(lambda self: not self.engine)
    @rule()
    def engine_up(self) -> None:
        self.engines += 1
        self.engine, self.asked = self.engines, False
        self.core.engine_up(self.engine, PLACE)

    @precondition(lambda self: self.engine)
    @rule(crash=st.integers(0, 9))
    def engine_ends(self, crash: int) -> None:
        if not self.asked and crash:
            return
        ended, self.engine = self.engine, 0
        self.strays = [one for one in self.strays if one.engine != ended]
        self.do(self.core.engine_ended(ended, self.now))
        for one in [one for one in self.moving if one.engine == ended]:
            self.fail(one)

    # ---- prefill ----------------------------------------------------------------------------

    @precondition(lambda self: not self.link)
    @rule(writes=st.booleans())
    def linked(self, writes: bool) -> None:
        self.links += 1
        self.link = self.links.to_bytes(2, "big")
        self.do(self.core.linked("p", self.link, self.now, writes=writes))

    @precondition(lambda self: self.link)
    @rule()
    def killed(self) -> None:
        """Prefill dies, or is stopped: what it wrote may land as long as the engine is there."""
        link, self.link = self.link, b""
        self.core.closed(link, FailureCode.PEER_SILENT, "it is silent", self.now)
        self.core.settled(link)
        self.strays += self.moving
        self.moving = []
        self.said = {room: one for room, one in self.said.items() if one.link != link}

    @rule(at=st.integers(0, 7))
    def begin(self, at: int) -> None:
        rooms = [room for room, one in self.said.items() if not one.aborted]
        if not rooms:
            return
        room = rooms[at % len(rooms)]
        one = self.said[room]
        busy = {stray.position for stray in self.moving if stray.room == room}
        position = one.written + len(busy)
        if position < len(one.blocks) and one.place is not None:
            self.moving.append(Stray(one.engine, room, position, one.blocks[position]))

    @precondition(lambda self: self.moving)
    @rule(at=st.integers(0, 7))
    def arrives(self, at: int) -> None:
        """The first write of a room has ended well: it has landed, and decode is told."""
        room = self.moving[at % len(self.moving)].room
        one = next(stray for stray in self.moving if stray.room == room)
        self.moving.remove(one)
        self.lands(one)
        self.said[room].written += 1
        self.arrive(room, PushRange(0, one.position, 1), RangesWritten)
        self.drain(room)

    @precondition(lambda self: self.moving)
    @rule(at=st.integers(0, 7))
    def fails(self, at: int) -> None:
        one = self.moving[at % len(self.moving)]
        self.strays.append(one)
        self.fail(one)

    @precondition(lambda self: self.strays)
    @rule(at=st.integers(0, 7))
    def late(self, at: int) -> None:
        self.lands(self.strays.pop(at % len(self.strays)))

    @rule()
    def finish(self) -> None:
        """All blocks of a room are there, or come over the link; then its aux data."""
        for room, one in list(self.said.items()):
            busy = any(stray.room == room for stray in self.moving)
            if one.aborted or busy or (one.place is not None and one.written < len(one.blocks)):
                continue
            for position in range(one.written, len(one.blocks)):
                self.arrive(room, PushRange(0, position, 1), RangesHead)
            one.written = len(one.blocks)
            slot = self.core._rooms[room].slot if room in self.core._rooms else 0
            self.arrive(room, PushRange(AUX_PLANE, slot, 8), RangesHead)

    # ---- inside -----------------------------------------------------------------------------

    def do(self, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, EndEngine):
                assert effect.number == self.engine
                assert not self.asked
                self.asked = True
            if not isinstance(effect, SendTo) or effect.link != self.link:
                continue
            match effect.message:
                case Announce() as said:
                    blocks = self.used[said.room]
                    self.said[said.room] = Announced(self.link, blocks, said.place, self.engine)
                    assert said.place is None or self.engine
                case Abort(room=room):
                    if room in self.said:
                        self.said[room].aborted = True
                        self.drain(room)
                    else:
                        self.do(self.core.received(self.link, Drained(room, True), self.now))
                case Done(room=room):
                    assert not any(one.room == room for one in [*self.moving, *self.strays])
                    del self.said[room]

    def fail(self, one: Stray) -> None:
        self.moving.remove(one)
        said = self.said[one.room]
        said.doubtful = said.aborted = True
        self.do(self.core.received(self.link, Failed(one.room, FAILURE), self.now))
        self.drain(one.room)

    def drain(self, room: int) -> None:
        """Prefill answers when nothing of the room is under way."""
        one = self.said.get(room)
        if one is not None and one.aborted and not any(it.room == room for it in self.moving):
            del self.said[room]
            self.do(self.core.received(self.link, Drained(room, one.doubtful), self.now))

    def arrive(self, room: int, place: PushRange, kind: type) -> None:
        head = kind(room, pack_numbers(place), bytes(16))
        landing, _, effects = self.core.arriving(self.link, head, self.now)
        self.do(effects)
        if landing is not None:
            self.do(self.core.landed(landing, None, "", self.now))

    def lands(self, one: Stray) -> None:
        """Bytes are written: nobody else may have the block."""
        assert one.engine == self.engine
        assert self.used.get(one.room, []).count(one.block), "it was given away"

    @invariant()
    def holds(self) -> None:
        self.core.check()
        for one in [*self.moving, *self.strays]:
            assert one.engine == self.engine
            assert self.core.holds_blocks(one.room), "the blocks may be given away"

    def teardown(self) -> None:
        """Everything that is asked for is done: nothing is held for good."""
        if self.link:
            self.killed()
        for room in list(self.used):
            self.do(self.core.abort(room, self.now))
        self.do(self.core.unreachable("p", FailureCode.UNREACHABLE, "no", self.now))
        self.time(0.1)
        assert self.asked or not any(map(self.core.holds_blocks, self.used))
        if self.asked:
            self.engine_ends(0)
        self.collect()
        assert len(self.free) == BLOCKS
        assert not self.used
        states = {one.progress.state for one in self.core._rooms.values()}
        assert states <= {State.FAILED}


TestLateWrites = LateWrites.TestCase
TestLateWrites.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
