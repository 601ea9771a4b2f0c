"""Decode's side of all handoffs of one rank: events in, effects out. Pure.

A room has a **leg** for each prefill rank that sends something to this rank. It succeeds when
everything of all legs has arrived, and fails when one leg fails.

The blocks of an announcement belong to the transfer until :meth:`Receivers.holds_blocks` is False.
After a failure they are in LIMBO until each prefill rank has answered that nothing arrives any
more, or its link has been closed and its reader has ended. Blocks that another transport may write
also wait for the end of decode's engine, if a write may not have ended (``landing_engines``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kvstore.handoff.effects import Effect, EndEngine, EndLink, Landing, SendTo
from kvstore.handoff.landing_engines import LandingEngines
from kvstore.handoff.messages import (
    RANGES_BYTES_MAX,
    RANGES_MAX,
    TEXT_MAX,
    Abort,
    Done,
    Drained,
    Failed,
    FromPrefill,
    HandoffPing,
    LandingPlace,
    RangesHead,
    RangesWritten,
    RenewRoom,
)
from kvstore.handoff.owners import BlockOwners, limbo_of, refuse_for_limbo
from kvstore.handoff.places import BLOCKS_MAX, RANGE_BYTES, check_one_kind, unpack_ranges
from kvstore.handoff.rooms import SeenRooms, check_room
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.states import (
    FailureCode,
    HandoffFailure,
    HandoffProgress,
    HandoffSide,
    HandoffStatus,
    Layer,
    Patience,
    State,
)
from kvstore.handoff.tables import LinkSource, LinkSources, ReceivingRoom, block_names
from kvstore.protocol.errors import CapacityError, InvalidArgument, ProtocolError

ROOMS_MAX = 1_024
"""Handoffs in the table."""
ABORTS_MAX: Final = 5
"""An abort is sent so often; then the link is closed, once no handoff lives on it."""
LIMBO_S_MAX: Final = 30
"""After this time in LIMBO the link is closed, regardless of other handoffs on it."""
_AGAIN_NS: Final = 1_000_000_000
"""Between two aborts, and between two renewals."""


class Receivers:
    """All handoffs of one rank of a decode engine; see the module.

    Args:
        shape: of the pool.
        aux_slots: slots for aux data; each handoff has one.
        aux_bytes: bytes of a slot.
        patience: deadlines.
        rank: of this side.

    Attributes:
        counts: events that are not an error of ours, by name.
        free_slots: numbers of the aux slots that no handoff has.
    """

    def __init__(
        self, shape: PoolShape, aux_slots: int, aux_bytes: int, patience: Patience, rank: int = 0
    ) -> None:
        self._shape = shape
        self._patience = patience
        self._rank = rank
        self._aux_bytes = aux_bytes
        self.free_slots = list(range(aux_slots))
        self._rooms: dict[int, ReceivingRoom] = {}
        self._seen = SeenRooms()
        self._owners = BlockOwners()
        self._sources = LinkSources()
        self._engines = LandingEngines(shape.block_count)
        self.counts: Counter[str] = Counter()

    # ---- the engine -------------------------------------------------------------------------

    def open(
        self, room: int, peer: str, token_count: int, now_ns: int
    ) -> tuple[HandoffProgress, list[Effect]]:
        """Start a handoff from a peer, which may have no link yet.

        Raises:
            InvalidArgument: the room was seen before, or a number is wrong.
            CapacityError: there are too many, or too many blocks are in LIMBO because of the peer.
        """
        check_room(room)
        if not 0 < token_count <= BLOCKS_MAX * self._shape.block_tokens:
            raise InvalidArgument("token_count", f"{token_count} is not a number of tokens")
        if room in self._rooms or room in self._seen:  # which forgets the oldest boots
            raise InvalidArgument("room", f"{room} was used before")
        if len(self._rooms) >= ROOMS_MAX or not self.free_slots:
            raise CapacityError(f"{len(self._rooms)} handoffs are in progress", "aux_slots")
        refuse_for_limbo(self.limbo(peer), self._shape, peer)
        slot = self.free_slots.pop()
        progress = HandoffProgress(self._patience, now_ns)
        one = self._rooms[room] = ReceivingRoom(room, peer, token_count, slot, progress)
        self._seen.add(room)
        self._sources.give_legs(one)
        return progress, self._say(one, now_ns)

    def announce(
        self, room: int, first_token: int, blocks: Sequence[int], now_ns: int,
        states: Mapping[str, Sequence[int]] = MappingProxyType({}), after: tuple[Any, ...] = (),
    ) -> list[Effect]:  # fmt: skip
        """The engine has memory for a request; nothing happens if the handoff has ended.

        Args:
            room: one that was opened.
            first_token: KV of tokens before it is not needed.
            blocks: block of each position from the position of ``first_token`` on.
            now_ns: the time.
            states: blocks in each state buffer, by its name.
            after: fences of a device, before which the blocks are not written.

        Raises:
            InvalidArgument: a block is not in the pool, named twice, or of another handoff.
        """
        one = self._rooms[room]
        if one.progress.ended:
            return []
        if one.blocks is not None:
            raise InvalidArgument("room", f"{room} was announced before")
        first, numbers = self._shape.wanted(one.token_count, first_token, blocks)
        parts = self._shape.wanted_states(one.token_count, first, states)
        self._owners.take(room, block_names(numbers, parts))
        one.first_token, one.first, one.blocks, one.states = first_token, first, numbers, parts
        one.after = after
        for leg in one.legs.values():
            one.expect(leg)
        one.progress.heard(now_ns)
        return self._say(one, now_ns)

    def renew(self, room: int, now_ns: int) -> list[Effect]:
        """The request waits for memory; notifies prefill at most once a second."""
        one = self._rooms[room]
        one.progress.heard(now_ns)
        if one.progress.ended or not one.legs or now_ns - one.said_ns < _AGAIN_NS:
            return []
        one.said_ns = now_ns
        return [SendTo(link, RenewRoom(room)) for link in one.legs]

    def abort(self, room: int, now_ns: int) -> list[Effect]:
        """The engine gives the request up."""
        one = self._rooms[room]
        why = "the decode engine gave it up"
        return self._fail(one, FailureCode.ABORTED, Layer.PROTOCOL, why, now_ns)

    def device_failed(self, room: int, why: str, now_ns: int) -> list[Effect]:
        """The device of the pool has failed; a landing continues until its end is reported."""
        one = self._rooms[room]
        return self._fail(one, FailureCode.DEVICE, Layer.TRANSPORT, why, now_ns)

    def close(self, room: int, now_ns: int) -> list[Effect]:
        """The engine asks no more about a handoff; one that has not ended is aborted."""
        one = self._rooms[room]
        effects = self.abort(room, now_ns)
        one.closed = True
        self._forget(one)
        return effects

    def holds_blocks(self, room: int) -> bool:
        """Whether bytes may still arrive in the blocks that were announced."""
        one = self._rooms.get(room)
        return one is not None and one.is_holding

    def aux_place(self, room: int) -> tuple[int, int]:
        """Slot and number of bytes of the aux data of a handoff that succeeded."""
        one = self._rooms[room]
        assert one.progress.state == State.SUCCESS
        return one.slot, one.aux_bytes

    def limbo(self, peer: str | None = None) -> Counter[int]:
        """Blocks in LIMBO because of one peer or of all: of the pool (-1), of each state buffer."""
        return limbo_of(self._rooms.values(), peer)

    def limbo_blocks(self, peer: str | None = None) -> int:
        """Of these, those of the pool."""
        return self.limbo(peer)[-1]

    def busy_peers(self) -> set[str]:
        """The peers with which a handoff lives; all others need no link."""
        return {one.peer for one in self._rooms.values() if one.is_busy}

    # ---- links ------------------------------------------------------------------------------

    def linked(
        self, peer: str, links: bytes | Mapping[bytes, LinkSource], now_ns: int, *,
        writes: bool = False,
    ) -> list[Effect]:  # fmt: skip
        """All links to a peer are up; they are used for all handoffs that have none yet.

        Args:
            peer: a prefill instance.
            links: to each of its ranks that sends something to this one, or is to be told that it
                does not; or the only link to a peer of one rank.
            now_ns: the time.
            writes: that peer has the transport of our engine.
        """
        if isinstance(links, bytes):
            links = {links: LinkSource(0, self._shape.whole, writes=writes)}
        self._sources.up(peer, links)
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            if one.peer == peer and not one.legs:
                self._sources.give_legs(one)
                effects += self._say(one, now_ns)
        return effects

    def unreachable(self, peer: str, code: FailureCode, why: str, now_ns: int) -> list[Effect]:
        """No link to a peer can be made."""
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            if one.peer == peer and not one.legs:
                effects += self._fail(one, code, Layer.TRANSPORT, why, now_ns)
                one.peer = ""  # nobody is there to be told
                self._forget(one)
        return effects

    def closed(self, link: bytes, code: FailureCode, why: str, now_ns: int) -> list[Effect]:
        """A link was closed; bytes may still arrive from it until :meth:`settled`."""
        self._sources.closed(link)
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            if link in one.legs:
                effects += self._fail(one, code, Layer.TRANSPORT, why, now_ns, but=link)
        return effects

    def settled(self, link: bytes) -> None:
        """The reader of a closed link has ended: nothing arrives from it any more."""
        self._sources.settled(link)
        for one in list(self._rooms.values()):
            if link in one.legs:
                assert one.progress.ended
                assert not one.legs[link].landing, "its reader had told the end of all it began"
                one.legs[link].drained = True
                if one.legs[link].written:
                    self._engines.doubt(one.room)
                self._settle(one)

    # ---- the engine that other transports write to ------------------------------------------

    def engine_up(self, number: int, place: LandingPlace, staged: range = range(0)) -> None:
        """An engine is up, the one before it has ended; see :meth:`LandingEngines.up`."""
        self._engines.up(number, place, staged)

    def engine_ended(self, number: int, now_ns: int) -> list[Effect]:
        """An engine has ended: nothing arrives through it any more."""
        effects: list[Effect] = []
        for room in self._engines.ended(number):
            one = self._rooms[room]
            why = "decode's engine has ended, and with it what was written to it"
            effects += self._fail(one, FailureCode.ENGINE_ENDED, Layer.TRANSPORT, why, now_ns)
            self._settle(one)
        return effects

    # ---- the other side ---------------------------------------------------------------------

    def received(self, link: bytes, message: FromPrefill, now_ns: int) -> list[Effect]:
        """A message of prefill that is followed by no bytes."""
        if isinstance(message, HandoffPing):
            return []
        one = self._rooms.get(message.room)
        if one is None or link not in one.legs:
            late = one is None and message.room in self._seen
            self.counts["late_messages" if late else "foreign_messages"] += 1
            return []
        one.legs[link].heard = True
        match message:
            case Drained(doubtful=doubtful):
                return self._drained(one, link, now_ns, doubtful=doubtful)
            case Failed(failure=failure) if not one.progress.ended:
                self._end(one, failure, now_ns)
                return self._tell_abort(one, but=link)
            case RenewRoom() if not one.progress.ended:
                one.progress.heard(now_ns)
                return []
        self.counts["late_messages"] += 1
        return []

    def arriving(
        self, link: bytes, head: RangesHead | RangesWritten, now_ns: int
    ) -> tuple[Landing | None, int, list[Effect]]:
        """The head of some ranges arrived; their bytes follow, or were written before.

        Returns:
            Where the bytes belong, None = discard them; and their number.

        Raises:
            ProtocolError: the head is invalid, so what follows it cannot be read.
        """
        if len(head.ranges) > RANGES_MAX * RANGE_BYTES:  # before they are unpacked
            raise ProtocolError(f"{len(head.ranges)} bytes of ranges in one head")
        ranges = unpack_ranges(head.ranges, head.digests)
        share = (self._sources.share_of(link) or self._shape.whole).of_plane(ranges[0].plane)
        size = share.bytes_of(ranges)
        most = max(RANGES_BYTES_MAX, share.block_bytes, self._aux_bytes)
        if size > most or len(ranges) > RANGES_MAX:
            raise ProtocolError(f"{len(ranges)} ranges of {size} bytes in one head")
        one = self._rooms.get(head.room)
        leg = one.legs.get(link) if one is not None else None
        if one is None or leg is None or one.progress.ended:
            check_one_kind(ranges)
            self.counts["foreign_messages"] += one is not None and leg is None
            self.counts["late_ranges"] += len(ranges)
            return None, size, []
        written = isinstance(head, RangesWritten)
        foreign = written and not (leg.written and self._engines.holds(one.room))
        if foreign or not one.claim(leg, ranges, 0 if written else self._aux_bytes):
            check_one_kind(ranges)
            why = "a range is not one of the request's, or has come before"
            return None, size, self._fail(one, FailureCode.PROTOCOL, Layer.PROTOCOL, why, now_ns)
        one.progress.advance(State.TRANSFERRING, now_ns)
        one.progress.heard(now_ns)
        leg.landing += 1
        leg.heard = True
        targets, rows = one.targets(leg, ranges)
        staged_at = one.staged_at(leg, ranges) if written else []
        landing = Landing(
            link, head.room, ranges, targets, head.digests, share, rows, staged_at, one.after
        )
        return landing, size, []

    def landed(
        self, landing: Landing, code: FailureCode | None, why: str, now_ns: int
    ) -> list[Effect]:
        """The bytes of some ranges are not written to any more.

        Args:
            landing: the ranges.
            code: what is wrong with them; None = they have arrived and match their digests.
            why: in words.
            now_ns: the time.
        """
        one = self._rooms[landing.room]
        leg = one.legs[landing.link]
        leg.landing -= 1
        if one.progress.ended:
            self._settle(one)
            return []
        if code is not None:
            layer = Layer.TRANSPORT
            return self._fail(one, code, layer, why, now_ns)
        one.progress.heard(now_ns)
        self.counts["ranges"] += len(landing.ranges)
        one.arrived(leg, landing.ranges)
        if one.left or one.aux_bytes < 0:
            return []
        assert not one.landing, "everything has arrived, so nothing is arriving"
        one.progress.advance(State.SUCCESS, now_ns)
        self._engines.leave(one.room)
        self._owners.give_back(one.held)
        self.counts["succeeded"] += 1
        return [SendTo(link, Done(one.room)) for link in one.sending]

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed: end late handoffs, repeat unanswered messages."""
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            why = one.progress.expired(now_ns)
            if why:
                effects += self._fail(one, FailureCode.DEADLINE, Layer.PROTOCOL, why, now_ns)
            elif one.progress.ended and one.is_holding and now_ns >= one.next_abort_ns:
                effects += self._ask_again(one, now_ns)
        engine = self._engines.due(now_ns)
        return [*effects, EndEngine(engine)] if engine else effects

    def describe(self, now_ns: int) -> list[HandoffStatus]:
        """Where each handoff is, with the ranks of prefill that have said nothing."""
        return [one.progress.status(room, one.missing, now_ns) for room, one in self._rooms.items()]

    def check(self) -> None:
        """Assert the invariants."""
        self._owners.check(self._rooms.values())
        for room, one in self._rooms.items():
            assert one.landing == 0 or one.is_holding
            assert one.is_holding or not self._engines.holds(room)
            waits = one.landing or self._engines.holds(room) or one.undrained
            assert waits or not one.limbo, "blocks wait for ranks that send nothing"
            assert all(leg.left >= 0 and leg.landing >= 0 for leg in one.legs.values())

    # ---- inside -----------------------------------------------------------------------------

    def _say(self, one: ReceivingRoom, now_ns: int) -> list[Effect]:
        """Send prefill the news of a handoff, if there is a link."""
        if not one.legs:
            return []
        if one.progress.ended:  # before there was a link
            self._forget(one)
            return self._tell_abort(one)
        one.said_ns = now_ns
        places: dict[bytes, LandingPlace] = {}
        if one.blocks is not None:
            one.progress.advance(State.WAITING_FOR_INPUT, now_ns)
            places = self._engines.announce(one, self._shape.first_plane)
            self.counts["unstaged_handoffs"] += one.is_unstaged
        return [SendTo(link, one.said_to(leg, places.get(link))) for link, leg in one.legs.items()]

    def _drained(
        self, one: ReceivingRoom, link: bytes, now_ns: int, *, doubtful: bool
    ) -> list[Effect]:
        if one.progress.state == State.SUCCESS:
            self.counts["late_messages"] += 1
            return []
        effects: list[Effect] = []
        if not one.progress.ended:  # nothing arrives any more, so it cannot succeed
            why = "prefill has ended it and does not say why"
            code, layer = FailureCode.PROTOCOL, Layer.PROTOCOL
            effects = self._fail(one, code, layer, why, now_ns, but=link)
        one.legs[link].drained = True
        if doubtful:
            self._engines.doubt(one.room)
        elif one.writes_drained:
            self._engines.leave(one.room)
        self._settle(one)
        return effects

    def _ask_again(self, one: ReceivingRoom, now_ns: int) -> list[Effect]:
        """Repeat an abort; then close the link: at last also if that costs other handoffs."""
        one.next_abort_ns = now_ns + _AGAIN_NS
        if one.aborts < ABORTS_MAX:
            return self._tell_abort(one)
        is_late = now_ns - one.progress.since_ns >= LIMBO_S_MAX * 1_000_000_000
        effects: list[Effect] = []
        for link in self._sources.undrained(one):
            on_link = [other for other in self._rooms.values() if link in other.legs]
            if is_late or all(other.progress.ended for other in on_link):
                effects.append(EndLink(link))
        return effects

    def _fail(
        self, one: ReceivingRoom, code: FailureCode, layer: Layer, why: str, now_ns: int,
        but: bytes = b"",
    ) -> list[Effect]:  # fmt: skip
        """End a handoff as failed, and notify prefill, but not over the link ``but``."""
        failure = HandoffFailure(code, HandoffSide.DECODE, self._rank, layer, why[:TEXT_MAX])
        effects = self._end(one, failure, now_ns)
        if one.progress.failure is failure:
            effects += self._tell_abort(one, but)
        return effects

    def _tell_abort(self, one: ReceivingRoom, but: bytes = b"") -> list[Effect]:
        assert one.progress.failure is not None
        message = Abort(one.room, one.progress.failure)
        links = [link for link in self._sources.to_abort(one) if link != but]
        effects: list[Effect] = [SendTo(link, message) for link in links]
        one.aborts += bool(effects)
        return effects

    def _end(self, one: ReceivingRoom, failure: HandoffFailure, now_ns: int) -> list[Effect]:
        if not one.progress.fail(failure, now_ns):
            return []
        self.counts[f"failed_{failure.counted}"] += 1
        one.next_abort_ns = now_ns + _AGAIN_NS
        if one.blocks is None or not one.legs:  # nothing can arrive
            self._free(one)
        return []

    def _settle(self, one: ReceivingRoom) -> None:
        """Free the blocks of an ended handoff, once nothing can arrive in them on any way."""
        if one.drained and not one.landing and not self._engines.holds(one.room):
            self._free(one)

    def _free(self, one: ReceivingRoom) -> None:
        """Nothing arrives for a handoff any more: its blocks are the engine's again."""
        assert one.progress.ended
        assert not one.landing
        if one.progress.state == State.FAILED:
            self._owners.give_back(one.held)
            one.blocks, one.states = None, []
            self._give_slot(one)
        self._forget(one)

    def _give_slot(self, one: ReceivingRoom) -> None:
        if one.slot >= 0:
            self.free_slots.append(one.slot)
            one.slot = -1

    def _forget(self, one: ReceivingRoom) -> None:
        """Remove an ended handoff once it is closed and prefill is notified."""
        notified = one.legs or not one.peer
        if one.closed and notified and one.progress.ended and not one.is_holding:
            self._give_slot(one)
            self._rooms.pop(one.room, None)
