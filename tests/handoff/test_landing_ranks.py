"""Goal: ranks that write to one pool are told places of their own, and all must have ended."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.handoff.effects import EndEngine, SendTo
from kvstore.handoff.landing_engines import LandingEngines
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
from kvstore.handoff.places import AUX_PLANE, PushRange, pack_numbers
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.shape import LinkShare, PoolShape, check_place
from kvstore.handoff.states import FailureCode, Patience
from kvstore.handoff.tables import LinkSource
from kvstore.protocol.errors import CapacityError
from tests.handoff.test_landing_engines import BLOCKS, FAILURE, PLACE


def test_memory_for_heads_belongs_to_one_handoff_until_its_writes_have_ended():
    engines = LandingEngines(100)
    engines.up(1, PLACE, range(1_000, 1_100))
    for room in (1, 2, 3):
        engines.enter(room, 1)
    assert [engines.stage(1, 40), engines.stage(2, 30)] == [range(40), range(40, 70)]
    assert engines.stage(1, 20) == range(70, 90)
    assert engines.stage(3, 11) is None
    assert engines.stage(3, 10) == range(90, 100)
    engines.leave(2)
    assert engines.stage(3, 30) == range(40, 70)
    engines.doubt(1)
    engines.leave(1)
    assert engines.stage(3, 1) is None, "bytes may still arrive"
    engines.ended(1)
    engines.up(2, PLACE, range(5_000, 5_100))
    engines.enter(4, 1)
    assert engines.stage(4, 100) == range(100)


HALVES = [LinkShare(range(1), heads, 32, is_staged=True, has_aux=not heads[0])
          for heads in ((0, 1), (1, 2))]  # fmt: skip
TWO_HEADS = PoolShape(1, 1, 64, 1, BLOCKS, heads=(0, 2))


def with_two_ranks(staged: range) -> tuple[Receivers, dict[bytes, Announce]]:
    """A handoff from two ranks of prefill that have one head each; and what they are told."""
    core = Receivers(TWO_HEADS, 8, 64, Patience())
    core.engine_up(1, PLACE, staged)
    links = {b"%d" % rank: LinkSource(rank, HALVES[rank], writes=True) for rank in (0, 1)}
    core.linked("p", links, 0)
    core.open(1, "p", 2, 0)
    effects = core.announce(1, 0, [4, 5], 0)
    return core, {one.link: one.message for one in effects}


def test_each_rank_is_told_a_place_of_its_own_for_its_heads_and_they_are_found_there():
    core, told = with_two_ranks(range(1_000, 1_128))
    places = [told[link].place for link in (b"0", b"1")]
    assert [int.from_bytes(one.planes, "little") for one in places] == [1_000, 1_064]
    for rank, place in enumerate(places):
        check_place(HALVES[rank], place, [4, 5])
    head = RangesWritten(1, pack_numbers(PushRange(0, 1, 1)), bytes(16))
    landing, _, _ = core.arriving(b"1", head, 0)
    assert landing.staged_at == [64 + 32]
    assert [rows.tolist() for rows in landing.rows] == [[5]]


def test_heads_for_which_there_is_no_memory_come_over_the_link():
    core, told = with_two_ranks(range(1_000, 1_064))
    assert told[b"0"].place is not None
    assert told[b"1"].place is None
    head = RangesWritten(1, pack_numbers(PushRange(0, 0, 2)), bytes(16))
    assert core.arriving(b"1", head, 0)[0] is None, "it cannot have written"
    core, told = with_two_ranks(range(1_000, 1_063))
    assert told[b"0"].place is told[b"1"].place is None
    assert core.counts["unstaged_handoffs"] == 1
    core.engine_ended(1, 0)
    assert core.arriving(b"1", RangesHead(1, head.ranges, head.digests), 0)[0] is not None


def test_blocks_are_held_until_no_rank_can_write_to_them_any_more():
    core, _ = with_two_ranks(range(1_000, 1_128))
    core.abort(1, 0)
    core.received(b"0", Drained(1), 0)
    assert core.tick(1) == [], "the other rank may be writing"
    assert core.holds_blocks(1)
    core.received(b"1", Drained(1), 2)
    assert not core.holds_blocks(1)

    core, _ = with_two_ranks(range(1_000, 1_128))
    core.abort(1, 0)
    core.received(b"0", Drained(1), 0)
    core.received(b"1", Drained(1, doubtful=True), 0)
    assert core.holds_blocks(1)
    assert core.tick(1) == [EndEngine(1)]
    core.engine_ended(1, 2)
    assert not core.holds_blocks(1)


SHARES = [
    LinkShare(range(1), (0, 2), 64, is_staged=False, has_aux=False),
    LinkShare(range(1, 2), (0, 1), 32, is_staged=True, has_aux=True),
]
"""Rank 0 writes to the pool, rank 1 into the memory beside it."""
STAGED = range(10_000, 10_000 + 12 * 32)
LAYERS = PoolShape(2, 1, 64, 1, BLOCKS, heads=(0, 2))


@dataclass
class Leg:
    """What one rank of prefill knows of a room."""

    blocks: list[int]
    place: LandingPlace | None
    written: int = 0
    moving: int = 0
    doubtful: bool = False
    aborted: bool = False


class Stray(NamedTuple):
    """A write under way, or one that its rank has given up and that lands when it likes."""

    engine: int
    room: int
    rank: int
    address: int


class LateRanks(RuleBasedStateMachine):
    """Decode's core, an engine, and two ranks of prefill all of whose writes may be late."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Receivers(LAYERS, 8, 64, Patience())
        self.now = self.room = self.engines = self.engine = self.links = 0
        self.asked = False
        self.free = list(range(BLOCKS))
        self.used: dict[int, list[int]] = {}
        self.legs: dict[tuple[int, int], Leg] = {}
        self.moving: list[Stray] = []
        self.strays: list[Stray] = []
        self.up: list[bytes] = []
        self.closed: list[bytes] = []

    @initialize()
    def begins_with_all(self) -> None:
        self.engine_up()
        self.linked((True, True))
        for _ in range(2):
            self.ask(3)
        for at in range(4):
            self.begin(at)

    # ---- decode -----------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def ask(self, count: int) -> None:
        if len(self.free) < count or len(self.used) >= 8:
            return
        self.room += 1
        try:
            _, effects = self.core.open(self.room, "p", count, self.now)
        except CapacityError:
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

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 20.0]))
    def time(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)
        self.do(self.core.tick(self.now))

    @precondition(lambda self: not self.engine)
    @rule()
    def engine_up(self) -> None:
        self.engines += 1
        self.engine, self.asked = self.engines, False
        place = LandingPlace(
            "mooncake", "10.0.0.1:15000", np.array([1 << 20, 2 << 20], "<u8").tobytes()
        )
        self.core.engine_up(self.engine, place, STAGED)

    @precondition(lambda self: self.engine)
    @rule(crash=st.integers(0, 9))
    def engine_ends(self, crash: int) -> None:
        if not self.asked and crash:
            return
        ended, self.engine = self.engine, 0
        self.strays.clear()
        self.do(self.core.engine_ended(ended, self.now))
        while self.moving:
            self.fail(self.moving[0])

    # ---- prefill ----------------------------------------------------------------------------

    @precondition(lambda self: not self.up and not self.closed)
    @rule(writes=st.tuples(st.booleans(), st.booleans()))
    def linked(self, writes: tuple[bool, bool]) -> None:
        self.links += 1
        self.up = [b"%d.%d" % (self.links, rank) for rank in (0, 1)]
        sources = {self.up[at]: LinkSource(at, SHARES[at], writes=writes[at]) for at in (0, 1)}
        self.do(self.core.linked("p", sources, self.now))

    @precondition(lambda self: self.up)
    @rule(luck=st.integers(0, 5))
    def killed(self, luck: int = 0) -> None:
        """The links break; what is under way lands as long as the engine is there."""
        if luck:
            return
        self.closed, self.up = self.up, []
        self.strays += self.moving
        self.moving.clear()
        self.legs.clear()
        for link in self.closed:
            self.do(self.core.closed(link, FailureCode.PEER_SILENT, "it is silent", self.now))

    @precondition(lambda self: self.closed)
    @rule()
    def settled(self) -> None:
        self.core.settled(self.closed.pop())

    @rule(at=st.integers(0, 15))
    def begin(self, at: int) -> None:
        legs = [key for key, leg in self.legs.items() if not leg.aborted and leg.place is not None]
        if not legs:
            return
        room, rank = legs[at % len(legs)]
        leg = self.legs[room, rank]
        position = leg.written + leg.moving
        if position < len(leg.blocks):
            leg.moving += 1
            (plane,) = np.frombuffer(leg.place.planes, "<u8").tolist()
            before = position if SHARES[rank].is_staged else leg.blocks[position]
            address = plane + before * SHARES[rank].block_bytes
            self.moving.append(Stray(self.engine, room, rank, address))

    @precondition(lambda self: self.moving)
    @rule(at=st.integers(0, 7))
    def arrives(self, at: int) -> None:
        """The first write of a leg has ended well: it has landed, and decode is told."""
        wanted = self.moving[at % len(self.moving)]
        one = next(it for it in self.moving if it[:3] == wanted[:3])
        self.moving.remove(one)
        leg = self.legs[one.room, one.rank]
        leg.moving -= 1
        leg.written += 1
        place = PushRange(SHARES[one.rank].planes.start, leg.written - 1, 1)
        self.arrive(one.room, one.rank, place, RangesWritten)
        self.drain(one.room, one.rank)

    @precondition(lambda self: self.moving)
    @rule(at=st.integers(0, 7))
    def fails(self, at: int) -> None:
        self.strays.append(self.moving[at % len(self.moving)])
        self.fail(self.strays[-1])

    @rule()
    def finish(self) -> None:
        """All that was not written comes over the link; then the aux data."""
        for (room, rank), leg in list(self.legs.items()):
            over = leg.place is None or leg.written == len(leg.blocks)
            if leg.aborted or leg.moving or not over or (room, rank) not in self.legs:
                continue
            for position in range(leg.written, len(leg.blocks)):
                place = PushRange(SHARES[rank].planes.start, position, 1)
                self.arrive(room, rank, place, RangesHead)
            leg.written = len(leg.blocks)
            if rank == 1 and room in self.core._rooms:
                slot = self.core._rooms[room].slot
                self.arrive(room, rank, PushRange(AUX_PLANE, slot, 8), RangesHead)

    # ---- inside -----------------------------------------------------------------------------

    def do(self, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect, EndEngine):
                assert effect.number == self.engine
                assert not self.asked
                self.asked = True
            if not isinstance(effect, SendTo) or effect.link not in self.up:
                continue
            rank = self.up.index(effect.link)
            match effect.message:
                case Announce() as said:
                    assert said.place is None or self.engine
                    self.legs[said.room, rank] = Leg(self.used[said.room], said.place)
                case Abort(room=room):
                    if (room, rank) in self.legs:
                        self.legs[room, rank].aborted = True
                        self.drain(room, rank)
                    else:
                        self.do(self.core.received(effect.link, Drained(room), self.now))
                case Done(room=room):
                    assert not any(one.room == room for one in [*self.moving, *self.strays])
                    del self.legs[room, rank]

    def fail(self, one: Stray) -> None:
        self.moving.remove(one)
        leg = self.legs[one.room, one.rank]
        leg.moving -= 1
        leg.doubtful = leg.aborted = True
        self.do(self.core.received(self.up[one.rank], Failed(one.room, FAILURE), self.now))
        self.drain(one.room, one.rank)

    def drain(self, room: int, rank: int) -> None:
        """A rank answers when nothing of the room is under way there."""
        leg = self.legs.get((room, rank))
        if leg is not None and leg.aborted and not leg.moving:
            del self.legs[room, rank]
            said = Drained(room, leg.doubtful)
            self.do(self.core.received(self.up[rank], said, self.now))

    def arrive(self, room: int, rank: int, place: PushRange, kind: type) -> None:
        head = kind(room, pack_numbers(place), bytes(16))
        landing, _, effects = self.core.arriving(self.up[rank], head, self.now)
        self.do(effects)
        if landing is not None:
            self.do(self.core.landed(landing, None, "", self.now))

    @invariant()
    def what_may_land_is_held(self) -> None:
        self.core.check()
        extents = self.core._engines._extents
        taken = sorted((one.start, one.stop) for some in extents.values() for one in some)
        assert all(one[1] <= other[0] for one, other in pairwise(taken)), "one has two owners"
        assert all(self.core._engines.holds(room) for room in extents)
        for one in [*self.moving, *self.strays]:
            assert one.engine == self.engine
            assert self.core.holds_blocks(one.room), "the blocks may be given away"
            if one.rank == 1:
                mine = extents[one.room]
                assert any(one.address - STAGED.start in extent for extent in mine)

    def teardown(self) -> None:
        """Nothing is held for good."""
        if self.up:
            self.killed()
        while self.closed:
            self.settled()
        for room in list(self.used):
            self.do(self.core.abort(room, self.now))
        self.do(self.core.unreachable("p", FailureCode.UNREACHABLE, "no", self.now))
        self.time(0.1)
        assert self.asked or not any(map(self.core.holds_blocks, self.used))
        if self.asked:
            self.engine_ends(0)
        self.collect()
        assert len(self.free) == BLOCKS
        assert not self.core._engines._extents


TestLateRanks = LateRanks.TestCase
TestLateRanks.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
