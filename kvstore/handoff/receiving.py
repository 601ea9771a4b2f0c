"""Decode's side of all handoffs of one rank: events in, effects out. Pure.

The blocks of an announcement belong to the transfer until :meth:`Receivers.holds_blocks` is False.
After a failure they are in LIMBO until prefill has answered that nothing arrives any more, or the
link has been closed and whoever reads it has ended. Those that another transport may write wait for
the end of decode's engine besides, if a write may not have ended (``landing_engines``).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.errors import CapacityError, InvalidArgument, ProtocolError
from kvstore.handoff.effects import Effect, EndEngine, EndLink, Landing, SendTo
from kvstore.handoff.landing_engines import LandingEngines
from kvstore.handoff.messages import (
    RANGES_BYTES_MAX,
    RANGES_MAX,
    TEXT_MAX,
    Abort,
    Announce,
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
from kvstore.handoff.places import (
    AUX_PLANE,
    BLOCKS_MAX,
    Coverage,
    pack_numbers,
    unpack_ranges,
)
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
from kvstore.handoff.tables import ReceivingRoom

ROOMS_MAX = 1_024
"""Handoffs in the table."""
LIMBO_SHARE: Final = 10
"""One block in so many may be in LIMBO because of one peer."""
ABORTS_MAX: Final = 5
"""An abort is sent so often; then the link is closed, once no handoff lives on it."""
LIMBO_S_MAX: Final = 30
"""After so long in LIMBO the link is closed, whichever other handoffs live on it."""
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
        self._owned: dict[int, int] = {}  # block → room
        self._links: dict[str, bytes] = {}  # peer → its link that is up
        self._writers: set[bytes] = set()  # links whose prefill can write to our engine
        self._engines = LandingEngines(shape.block_count)
        self.counts: Counter[str] = Counter()

    # ---- the engine -------------------------------------------------------------------------

    def open(
        self, room: int, peer: str, token_count: int, now_ns: int
    ) -> tuple[HandoffProgress, list[Effect]]:
        """Begin a handoff from a peer, which may have no link yet.

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
            raise CapacityError(f"{len(self._rooms)} handoffs are under way", "aux_slots")
        limbo = self.limbo_blocks(peer)
        if limbo * LIMBO_SHARE > self._shape.block_count:
            raise CapacityError(f"{limbo} blocks wait until {peer} has drained them", "limbo")
        slot = self.free_slots.pop()
        progress = HandoffProgress(self._patience, now_ns)
        one = self._rooms[room] = ReceivingRoom(room, peer, token_count, slot, progress)
        self._seen.add(room)
        one.link = self._links.get(peer, b"")
        return progress, self._say(one, now_ns)

    def announce(
        self, room: int, first_token: int, blocks: Sequence[int], now_ns: int
    ) -> list[Effect]:
        """The engine has memory for a request; nothing happens if the handoff has ended.

        Args:
            room: one that was opened.
            first_token: KV of tokens before it is not needed.
            blocks: block of each position from that of ``first_token`` on.
            now_ns: the time.

        Raises:
            InvalidArgument: a block is not in the pool, named twice, or of another handoff.
        """
        one = self._rooms[room]
        if one.progress.ended:
            return []
        if one.blocks is not None:
            raise InvalidArgument("room", f"{room} was announced before")
        if not 0 <= first_token <= one.token_count:
            raise InvalidArgument("first_token", f"{first_token} of {one.token_count}")
        stop = self._shape.blocks_of(one.token_count)
        first = stop if first_token == one.token_count else first_token // self._shape.block_tokens
        numbers = np.asarray(blocks, dtype=np.int64).reshape(-1)
        different = set(numbers.tolist())
        if len(numbers) != stop - first or len(different) != len(numbers):
            what = f"{len(numbers)} blocks, {stop - first} different ones are needed"
            raise InvalidArgument("blocks", what)
        if not self._shape.has(numbers) or not different.isdisjoint(self._owned):
            raise InvalidArgument("blocks", "one is not in the pool, or of another handoff")
        one.first_token, one.first, one.blocks = first_token, first, numbers.tolist()
        one.coverage = Coverage(self._shape.plane_count, first, stop, numbers)
        one.left = one.coverage.missing
        for block in one.blocks:
            self._owned[block] = room
        one.progress.heard(now_ns)
        return self._say(one, now_ns)

    def renew(self, room: int, now_ns: int) -> list[Effect]:
        """The request waits for memory; prefill is told, at most once a second."""
        one = self._rooms[room]
        one.progress.heard(now_ns)
        if one.progress.ended or not one.link or now_ns - one.said_ns < _AGAIN_NS:
            return []
        one.said_ns = now_ns
        return [SendTo(one.link, RenewRoom(room))]

    def abort(self, room: int, now_ns: int) -> list[Effect]:
        """The engine gives the request up."""
        one = self._rooms[room]
        why = "the decode engine gave it up"
        return self._fail(one, FailureCode.ABORTED, Layer.PROTOCOL, why, now_ns)

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

    def limbo_blocks(self, peer: str | None = None) -> int:
        """Blocks in LIMBO, because of one peer or of all."""
        return sum(
            len(one.blocks or ())
            for one in self._rooms.values()
            if peer in (None, one.peer) and one.progress.ended and one.is_holding
        )

    # ---- links ------------------------------------------------------------------------------

    def linked(self, peer: str, link: bytes, now_ns: int, *, writes: bool = False) -> list[Effect]:
        """A link to a peer is up; it is used for all handoffs that have none yet.

        Args:
            peer: that it goes to.
            link: its number.
            now_ns: the time.
            writes: the peer has the transport of our engine.
        """
        self._links[peer] = link
        if writes:
            self._writers.add(link)
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            if one.peer == peer and not one.link:
                one.link = link
                effects += self._say(one, now_ns)
        return effects

    def unreachable(self, peer: str, code: FailureCode, why: str, now_ns: int) -> list[Effect]:
        """No link to a peer can be made."""
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            if one.peer == peer and not one.link:
                effects += self._fail(one, code, Layer.TRANSPORT, why, now_ns)
                one.peer = ""  # nobody is there to be told
                self._forget(one)
        return effects

    def closed(self, link: bytes, code: FailureCode, why: str, now_ns: int) -> list[Effect]:
        """A link is gone; until :meth:`settled` bytes may still arrive from it."""
        self._links = {peer: one for peer, one in self._links.items() if one != link}
        self._writers.discard(link)
        for one in list(self._rooms.values()):
            if one.link == link:
                self._fail(one, code, Layer.TRANSPORT, why, now_ns)
        return []

    def settled(self, link: bytes) -> None:
        """Whoever read a link that is gone has ended: nothing arrives from it any more."""
        assert link not in self._links.values()
        for one in list(self._rooms.values()):
            if one.link == link:
                assert one.progress.ended
                assert not one.landing, "its reader had told the end of all that it began"
                one.drained = True
                self._engines.doubt(one.room)
                self._settle(one)

    # ---- the engine that other transports write to ------------------------------------------

    def engine_up(self, number: int, place: LandingPlace) -> None:
        """An engine is up, the one before it has ended; see :meth:`LandingEngines.up`."""
        self._engines.up(number, place)

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
        if one is None or one.link != link:
            late = one is None and message.room in self._seen
            self.counts["late_messages" if late else "foreign_messages"] += 1
            return []
        match message:
            case Drained(doubtful=doubtful):
                return self._drained(one, now_ns, doubtful=doubtful)
            case Failed(failure=failure) if not one.progress.ended:
                return self._end(one, failure, now_ns)
            case RenewRoom() if not one.progress.ended:
                one.progress.heard(now_ns)
                return []
        self.counts["late_messages"] += 1
        return []

    def arriving(
        self, link: bytes, head: RangesHead | RangesWritten, now_ns: int
    ) -> tuple[Landing | None, int, list[Effect]]:
        """The head of some ranges has come; their bytes follow, or were written before.

        Returns:
            Where the bytes belong, None = nowhere; and how many bytes they are.

        Raises:
            ProtocolError: the head makes no sense, so what follows it cannot be read.
        """
        ranges = unpack_ranges(head.ranges, head.digests)
        size = sum(map(self._shape.range_bytes, ranges))
        most = max(RANGES_BYTES_MAX, self._shape.block_bytes, self._aux_bytes)
        if size > most or len(ranges) > RANGES_MAX:
            raise ProtocolError(f"{len(ranges)} ranges of {size} bytes in one head")
        one = self._rooms.get(head.room)
        if one is None or one.link != link or one.progress.ended:
            self.counts["foreign_messages"] += one is not None and one.link != link
            self.counts["late_ranges"] += len(ranges)
            return None, size, []
        has_aux = any(place.plane == AUX_PLANE for place in ranges)
        foreign = isinstance(head, RangesWritten) and (has_aux or not self._engines.holds(one.room))
        if foreign or not one.claim(ranges, self._aux_bytes):
            why = "a range is not one of the request's, or has come before"
            return None, size, self._fail(one, FailureCode.PROTOCOL, Layer.PROTOCOL, why, now_ns)
        one.progress.advance(State.TRANSFERRING, now_ns)
        one.progress.heard(now_ns)
        one.landing += 1
        return Landing(head.room, ranges, one.targets(ranges), head.digests), size, []

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
        one.landing -= 1
        if one.progress.ended:
            self._settle(one)
            return []
        if code is not None:
            layer = Layer.TRANSPORT
            return self._fail(one, code, layer, why, now_ns)
        one.progress.heard(now_ns)
        aux = [place.size for place in landing.ranges if place.plane == AUX_PLANE]
        if aux:
            one.aux_bytes = aux[0]
        one.left -= sum(place.size for place in landing.ranges) - sum(aux)
        one.progress.moved_bytes += sum(map(self._shape.range_bytes, landing.ranges))
        if one.left or one.aux_bytes < 0:
            return []
        assert not one.landing, "everything has arrived, so nothing is arriving"
        one.progress.advance(State.SUCCESS, now_ns)
        self._engines.leave(one.room)
        self._give_back(one)
        self.counts["succeeded"] += 1
        return [SendTo(one.link, Done(one.room))]

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed: end what is late, ask again for what was not answered."""
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
        """Where each handoff is; prefill's one rank is missing as long as there is no link."""
        return [
            one.progress.status(room, [] if one.link else [0], now_ns)
            for room, one in self._rooms.items()
        ]

    def check(self) -> None:
        """Assert what always holds."""
        owned: Counter[int] = Counter()
        for room, one in self._rooms.items():
            if one.is_holding:
                assert one.blocks is not None
                assert all(self._owned[block] == room for block in one.blocks)
                owned.update(one.blocks)
            assert one.landing == 0 or one.is_holding
            assert one.is_holding or not self._engines.holds(room)
        assert len(owned) == len(self._owned)
        assert all(number == 1 for number in owned.values()), "a block has two owners"

    # ---- inside -----------------------------------------------------------------------------

    def _say(self, one: ReceivingRoom, now_ns: int) -> list[Effect]:
        """Tell prefill of a handoff what it does not know yet, if there is a link."""
        if not one.link:
            return []
        if one.progress.ended:  # before there was a link
            self._forget(one)
            return self._tell_abort(one)
        one.said_ns = now_ns
        if one.blocks is None:
            return [SendTo(one.link, RenewRoom(one.room))]
        one.progress.advance(State.WAITING_FOR_INPUT, now_ns)
        place = (
            self._engines.enter(one.room, len(one.blocks)) if one.link in self._writers else None
        )
        packed = pack_numbers(one.blocks)
        said = Announce(one.room, one.token_count, one.first_token, packed, one.slot, place)
        return [SendTo(one.link, said)]

    def _drained(self, one: ReceivingRoom, now_ns: int, *, doubtful: bool) -> list[Effect]:
        if one.progress.state == State.SUCCESS:
            self.counts["late_messages"] += 1
            return []
        if not one.progress.ended:  # nothing arrives any more, so it cannot succeed
            why = "prefill has ended it and does not say why"
            code, layer = FailureCode.PROTOCOL, Layer.PROTOCOL
            self._end(one, HandoffFailure(code, HandoffSide.DECODE, self._rank, layer, why), now_ns)
        one.drained = True
        if doubtful:
            self._engines.doubt(one.room)
        else:
            self._engines.leave(one.room)
        self._settle(one)
        return []

    def _ask_again(self, one: ReceivingRoom, now_ns: int) -> list[Effect]:
        """Repeat an abort; then close the link: at last also if that costs other handoffs."""
        one.next_abort_ns = now_ns + _AGAIN_NS
        if one.drained or one.link not in self._links.values():
            return []  # it is settled when its reader has ended
        if one.aborts < ABORTS_MAX:
            return self._tell_abort(one)
        on_link = [other for other in self._rooms.values() if other.link == one.link]
        is_late = now_ns - one.progress.since_ns >= LIMBO_S_MAX * 1_000_000_000
        if is_late or all(other.progress.ended for other in on_link):
            return [EndLink(one.link)]
        return []

    def _fail(
        self, one: ReceivingRoom, code: FailureCode, layer: Layer, why: str, now_ns: int
    ) -> list[Effect]:
        """End a handoff as failed, and tell prefill."""
        failure = HandoffFailure(code, HandoffSide.DECODE, self._rank, layer, why[:TEXT_MAX])
        effects = self._end(one, failure, now_ns)
        if one.link and one.progress.failure is failure:
            effects += self._tell_abort(one)
        return effects

    def _tell_abort(self, one: ReceivingRoom) -> list[Effect]:
        assert one.progress.failure is not None
        one.aborts += 1
        return [SendTo(one.link, Abort(one.room, one.progress.failure))]

    def _end(self, one: ReceivingRoom, failure: HandoffFailure, now_ns: int) -> list[Effect]:
        if not one.progress.fail(failure, now_ns):
            return []
        self.counts[f"failed_{failure.counted}"] += 1
        one.next_abort_ns = now_ns + _AGAIN_NS
        if one.blocks is None or not one.link:  # nothing can arrive
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
            self._give_back(one)
            one.blocks = None
            self._give_slot(one)
        self._forget(one)

    def _give_back(self, one: ReceivingRoom) -> None:
        for block in one.blocks or ():
            del self._owned[block]

    def _give_slot(self, one: ReceivingRoom) -> None:
        if one.slot >= 0:
            self.free_slots.append(one.slot)
            one.slot = -1

    def _forget(self, one: ReceivingRoom) -> None:
        """Take an ended handoff out of the table when nobody asks about it, and prefill is told."""
        told = one.link or not one.peer
        if one.closed and told and one.progress.ended and not one.is_holding:
            self._give_slot(one)
            self._rooms.pop(one.room, None)
