"""Goal: whatever the ranks and the order of events, a room succeeds at a rank of decode only with
every plane and head of every position, and blocks come back to both sides.

The cores of all ranks, with links that deliver in order, or break.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.handoff.effects import EndLink, Landing, PushJob, SendTo, Submit
from kvstore.handoff.messages import Announce, RangesHead, RenewRoom
from kvstore.handoff.places import AUX_PLANE, pack_numbers
from kvstore.handoff.ranks import plan_ranks
from kvstore.handoff.receiving import Receivers
from kvstore.handoff.sending import Senders
from kvstore.handoff.shape import LinkShare, PoolShape
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffSide, Layer, Patience, State
from kvstore.handoff.tables import LinkSource, LinkTarget
from tests.handoff.test_ranks import grid, split

LAYERS, HEADS, TOKENS, HEAD_BYTES, BLOCKS = 2, 2, 4, 2, 16
POSITIONS = 3
ROOM = 7
EMPTY = np.zeros(0, dtype=np.uint64)
LOST = HandoffFailure(FailureCode.PEER_CLOSED, HandoffSide.PREFILL, 0, Layer.TRANSPORT, "lost")


def test_decode_names_the_ranks_of_prefill_that_have_said_nothing():
    heads = [PoolShape(4, 2, 64, TOKENS, BLOCKS, 0, (rank, rank + 1)) for rank in range(2)]
    core = Receivers(PoolShape(4, 2, 128, TOKENS, BLOCKS, 0, (0, 2)), 4, 64, Patience())
    core.open(ROOM, "p", TOKENS, 0)
    assert core.describe(0)[0].missing == [0]
    idle = LinkShare(range(0), (0, 0), 1, is_staged=False, has_aux=False)
    links = {b"a": LinkSource(0, heads[0].whole), b"b": LinkSource(1, heads[1].whole)}
    core.linked("p", links | {b"c": LinkSource(2, idle)}, 0)
    core.announce(ROOM, 0, [1], 0)
    assert core.describe(0)[0].missing == [0, 1]
    core.received(b"b", RenewRoom(ROOM), 0)
    assert core.describe(0)[0].missing == [0]
    core.arriving(b"a", RangesHead(ROOM, pack_numbers([0, 0, 1]), bytes(16)), 0)
    assert core.describe(0)[0].missing == []


@dataclass
class Link:
    prefill: int
    decode: int
    is_up: bool = True
    is_idle: bool = False
    has_kv: bool = True
    to_prefill: deque = field(default_factory=deque)
    to_decode: deque = field(default_factory=deque)  # messages, and jobs


class World:
    """Both engines; with ``mute``, ranks of prefill that send nothing hear and say nothing."""

    def __init__(self, prefill, decode, *, mute: bool) -> None:
        self.mute = mute

        def shape(part):
            layers, heads = (stop - first for first, stop in (part.layers, part.heads))
            size = heads * TOKENS * HEAD_BYTES
            return PoolShape(2 * layers, 2, size, TOKENS, BLOCKS, part.layers[0], part.heads)

        here, there = [shape(part) for part in prefill], [shape(part) for part in decode]
        self.decode_shapes = there
        self.prefill = [Senders(one, Patience(), rank) for rank, one in enumerate(here)]
        self.decode = [Receivers(one, 4, 64, Patience(), rank) for rank, one in enumerate(there)]
        self.plan = plan_ranks(prefill, decode)
        self.links = {}
        self.left = [list(self._sends(one)) for one in here]
        self.arrived = [[] for _ in there]
        sources = [{} for _ in there]
        for share in self.plan.shares:
            number = bytes([share.prefill, share.decode])
            has_kv = share.part is not None
            link = Link(share.prefill, share.decode, is_idle=share.is_idle, has_kv=has_kv)
            self.links[number] = link
            receivers = frozenset(one.decode for one in self.plan.of_prefill(share.prefill))
            moved = here[share.prefill].share(share, decode[share.decode])
            assert moved == there[share.decode].share(share, prefill[share.prefill])
            target = LinkTarget(b"d", share.decode, moved, receivers)
            self.prefill[share.prefill].linked(number, target)
            sources[share.decode][number] = LinkSource(share.prefill, moved)
        self.senders = []
        for core in self.prefill:
            self.senders.append(core.open(ROOM, POSITIONS * TOKENS, 0)[0])
        self.receivers = []
        for core, links in zip(self.decode, sources, strict=True):
            core.linked("p", links, 0)
            progress, effects = core.open(ROOM, "p", POSITIONS * TOKENS, 0)
            self.receivers.append(progress)
            self.carry_out(effects, by_prefill=False)
        self.announced = set()

    @staticmethod
    def _sends(shape):
        for position in range(POSITIONS):
            for layer in range(shape.plane_count // 2):
                yield layer, position
        yield None

    def carry_out(self, effects, *, by_prefill: bool) -> None:
        for effect in effects:
            link = self.links[effect.job.link if isinstance(effect, Submit) else effect.link]
            assert not isinstance(effect, EndLink)
            if not link.is_up:
                assert not isinstance(effect, Submit)
            elif isinstance(effect, SendTo):
                (link.to_decode if by_prefill else link.to_prefill).append(effect.message)
            else:
                link.to_decode.append(effect.job)

    def choices(self) -> list:
        found = [(self.announce, rank) for rank in range(len(self.decode))
                 if rank not in self.announced]  # fmt: skip
        found += [(self.send, rank) for rank, left in enumerate(self.left) if left]
        heard = {at: it for at, it in self.links.items() if not (it.is_idle and self.mute)}
        found += [(self.deliver_prefill, one) for one, it in heard.items() if it.to_prefill]
        found += [(self.deliver_decode, one) for one, it in self.links.items() if it.to_decode]
        return found

    def announce(self, rank: int) -> None:
        self.announced.add(rank)
        effects = self.decode[rank].announce(ROOM, 0, [5, 9, 10], 0)
        self.carry_out(effects, by_prefill=False)

    def send(self, rank: int) -> None:
        what = self.left[rank].pop(0)
        core = self.prefill[rank]
        if what is None:
            effects = core.finish(ROOM, b"aux", 0)
        else:
            layer, at = what
            layers, positions = range(layer, layer + 1), range(at, at + 1)
            effects = core.push(ROOM, layers, positions, [at + 2], EMPTY, 0)
        self.carry_out(effects, by_prefill=True)

    def deliver_prefill(self, number: bytes) -> None:
        link = self.links[number]
        message = link.to_prefill.popleft()
        if isinstance(message, Announce):
            assert link.has_kv == bool(message.blocks), "blocks are for ranks that send KV"
        effects = self.prefill[link.prefill].received(number, message, 0)
        self.carry_out(effects, by_prefill=True)

    def deliver_decode(self, number: bytes) -> None:
        link = self.links[number]
        core, item = self.decode[link.decode], link.to_decode.popleft()
        if not isinstance(item, PushJob):
            self.carry_out(core.received(number, item, 0), by_prefill=False)
            return
        told = [self.deaf(link, one) for one in self.plan.of_prefill(link.prefill)]
        assert not any(told), "a sender has begun before all its receivers had announced"
        packed = pack_numbers([part for place in item.ranges for part in place])
        head = RangesHead(ROOM, packed, bytes(16 * len(item.ranges)))
        landing, _, effects = core.arriving(number, head, 0)
        self.carry_out(effects, by_prefill=False)
        if landing is not None:
            self.note(link, landing, item)
            self.carry_out(core.landed(landing, None, "", 0), by_prefill=False)
        effects = self.prefill[link.prefill].completed(item.number, None, 0)
        self.carry_out(effects, by_prefill=True)

    def deaf(self, link: Link, share) -> bool:
        return share.decode not in self.announced

    def note(self, link: Link, landing: Landing, job: PushJob) -> None:
        for place in landing.ranges:
            if place.plane != AUX_PLANE:
                self.arrived[link.decode] += [
                    (place.plane, position, head)
                    for position in range(place.first, place.first + place.size)
                    for head in range(*landing.share.heads)
                ]
        if landing.is_staged:
            assert [len(rows) for rows in landing.rows] == [one.size for one in landing.ranges]
            assert [rows.tolist() for rows in job.rows] == [
                [position + 2 for position in range(one.first, one.first + one.size)]
                for one in job.ranges
            ]

    def break_link(self, number: bytes) -> None:
        """As the managers do: all links of the rank of decode go with it."""
        rank = self.links[number].decode
        for other, link in self.links.items():
            if link.decode != rank or not link.is_up:
                continue
            link.is_up = False
            lost = [one for one in link.to_decode if isinstance(one, PushJob)]
            link.to_decode.clear()
            link.to_prefill.clear()
            code = FailureCode.PEER_CLOSED
            effects = self.decode[rank].closed(other, code, "closed", 0)
            self.carry_out(effects, by_prefill=False)
            core = self.prefill[link.prefill]
            self.carry_out(core.closed(other, code, "closed", 0), by_prefill=True)
            for job in lost:
                self.carry_out(core.completed(job.number, LOST, 0), by_prefill=True)
            self.decode[rank].settled(other)

    def waiting(self) -> list[int]:
        """Ranks of prefill that have not ended what a rank of decode has failed that they know."""
        failed = {at for at, one in enumerate(self.receivers) if one.state is State.FAILED}
        told = [one for one in self.links.values() if not (one.is_idle and self.mute)]
        found = [one.prefill for one in told if one.decode in failed]
        return [rank for rank in found if not self.senders[rank].ended]

    def check(self) -> None:
        for core in (*self.prefill, *self.decode):
            core.check()
        for rank, progress in enumerate(self.senders):
            if progress.state is State.SUCCESS:
                shares = [one for one in self.plan.of_prefill(rank) if not one.is_idle]
                assert all(self.receivers[one.decode].state is State.SUCCESS for one in shares)
        for link in self.links.values():
            if any(isinstance(one, PushJob) for one in link.to_decode):
                assert self.decode[link.decode].holds_blocks(ROOM), "bytes are under way"
        for rank, progress in enumerate(self.receivers):
            shape = self.decode_shapes[rank]
            wanted = [
                (plane, position, head)
                for plane in shape.whole.planes
                for position in range(POSITIONS)
                for head in range(*shape.heads)
            ]
            assert len(set(self.arrived[rank])) == len(self.arrived[rank])
            if progress.state is State.SUCCESS:
                assert sorted(self.arrived[rank]) == wanted


@st.composite
def splits(draw):
    def side():
        return grid(draw(split(LAYERS)), draw(split(HEADS)), draw(st.integers(1, 2)))

    return side(), side()


@settings(deadline=None)
@given(splits(), st.data())
def test_a_room_of_several_ranks_succeeds_whole_or_fails_whole(sides, data):
    world = World(*sides, mute=data.draw(st.booleans()))
    busy = [one for rank, one in enumerate(world.senders) if rank not in world.plan.idle]
    trouble = data.draw(st.sampled_from(["", "", "prefill", "decode", "link"]))
    at = data.draw(st.integers(0, 40))
    for step in range(2_000):
        if trouble and step == at:
            if trouble == "link":
                world.break_link(data.draw(st.sampled_from(sorted(world.links))))
            else:
                cores = world.prefill if trouble == "prefill" else world.decode
                core = data.draw(st.sampled_from(cores))
                world.carry_out(core.abort(ROOM, 0), by_prefill=trouble == "prefill")
        world.check()
        choices = world.choices()
        if not choices:
            break
        call, argument = data.draw(st.sampled_from(choices))
        call(argument)
    else:
        raise AssertionError("it does not end")

    if not trouble or at >= step:
        assert {one.state for one in (*busy, *world.receivers)} == {State.SUCCESS}
        assert world.mute or {one.state for one in world.senders} == {State.SUCCESS}
        assert not any(core.counts["late_messages"] for core in (*world.prefill, *world.decode))
    if trouble != "link":
        assert world.waiting() == [], "all ranks are told, also those that send nothing"
    both = [*world.senders, *world.receivers]
    for core, one in zip((*world.prefill, *world.decode), both, strict=True):
        if not one.ended:  # the failed ranks have nothing to do with it; the engine tells it
            one_side = core in world.prefill
            world.carry_out(core.abort(ROOM, 0), by_prefill=one_side)
    while world.choices():
        call, argument = world.choices()[0]
        call(argument)
    world.check()
    assert all(one.ended for one in both)
    assert not any(core.holds_blocks(ROOM) for core in (*world.prefill, *world.decode))


def test_a_rank_that_sends_nothing_is_told_of_an_abort():
    """It would keep the room until its deadline, and its engine would not know why."""
    part = grid([0, LAYERS], [0, HEADS])
    world = World(part * 2, part, mute=False)
    world.carry_out(world.decode[0].abort(ROOM, 0), by_prefill=False)
    while world.choices():
        call, argument = world.choices()[0]
        call(argument)

    assert world.plan.idle == [1]
    assert world.waiting() == []
    assert {one.failure.code for one in world.senders} == {FailureCode.ABORTED}
