"""Prefill's side of all handoffs of one rank: events in, effects out. Pure.

A room has a **leg** for each rank of decode that gets something from this rank. Nothing is sent
before all of them have announced, and it has failed for all when it has failed for one.

The blocks of a room belong to its transfer until :meth:`Senders.holds_blocks` is False: it has
ended, and so has every job that was submitted for it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.handoff import unopened
from kvstore.handoff.effects import Effect, SendTo, Submit
from kvstore.handoff.job_queues import JobQueues
from kvstore.handoff.messages import (
    TEXT_MAX,
    Abort,
    Announce,
    Done,
    Drained,
    Failed,
    FromDecode,
    HandoffPing,
    RenewRoom,
)
from kvstore.handoff.places import BLOCKS_MAX, PushRange
from kvstore.handoff.rooms import DoubtedRooms, SeenRooms, check_room
from kvstore.handoff.shape import PoolShape, announced_parts
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
from kvstore.handoff.tables import LinkTarget, SendingLeg, SendingLinks, SendingRoom, SentPart
from kvstore.protocol.errors import CapacityError, InvalidArgument, ProtocolError

ROOMS_MAX = 1_024
"""Handoffs in the table."""
_SAID_NS: Final = 1_000_000_000
"""Renewals are sent no more often."""


class Senders:
    """All handoffs of one rank of a prefill engine; see the module.

    Args:
        shape: of the pool.
        patience: deadlines.
        rank: of this side.

    Attributes:
        counts: events that are not an error of ours, by name.
    """

    def __init__(self, shape: PoolShape, patience: Patience, rank: int = 0) -> None:
        self._shape, self._patience, self._rank = shape, patience, rank
        self._rooms: dict[int, SendingRoom] = {}
        self._links = SendingLinks(shape.whole)
        self._seen = SeenRooms()  # by the engine: what peers say of themselves has no such effect
        self._missed = unopened.MissedRooms()
        self._jobs = JobQueues()
        self._doubts = DoubtedRooms()
        self.counts: Counter[str] = Counter()

    # ---- the engine -------------------------------------------------------------------------

    def open(
        self, room: int, token_count: int, now_ns: int
    ) -> tuple[HandoffProgress, list[Effect]]:
        """Start a handoff; if decode announced it and it ended before, it has failed.

        Raises:
            InvalidArgument: the room was used before, or a number is wrong.
            CapacityError: there are too many.
        """
        check_room(room)
        if not 0 < token_count <= BLOCKS_MAX * self._shape.block_tokens:
            raise InvalidArgument("token_count", f"{token_count} is not a number of tokens")
        one = self._rooms.get(room)
        if one is None:
            if room in self._seen:
                raise InvalidArgument("room", f"{room} was used before")
            if len(self._rooms) >= ROOMS_MAX:
                raise CapacityError(f"{ROOMS_MAX} handoffs are in progress")
            one = self._add(room, now_ns)
        elif one.opened:
            raise InvalidArgument("room", f"{room} is in use")
        one.opened = True
        self._seen.add(room)
        one.progress.heard(now_ns)
        if missed := self._missed.take(room):
            return one.progress, self._end(one, missed, now_ns)
        if one.token_count not in (-1, token_count):
            why = f"decode announced {one.token_count} tokens, the request has {token_count}"
            return one.progress, self._fail(one, FailureCode.REFUSED, Layer.PROTOCOL, why, now_ns)
        one.token_count = token_count
        blocks = self._shape.blocks_of(token_count)
        one.expect(self._shape.plane_count, self._shape.states, blocks)
        return one.progress, []

    def push(
        self, room: int, layers: range, positions: range, blocks: Sequence[int],
        generations: npt.NDArray[np.uint64], now_ns: int, after: tuple[Any, ...] = (),
    ) -> list[Effect]:  # fmt: skip
        """The KV of these layers is in these blocks; nothing happens if the handoff has ended.

        Args:
            room: one that was opened.
            layers: adjacent layers of this pool.
            positions: adjacent positions of the request.
            blocks: the block of each.
            generations: of each block; empty = the pool has none.
            now_ns: the time.
            after: fences of a device, before which the blocks are not read.

        Raises:
            InvalidArgument: something is outside, or was pushed before.
        """
        one = self._rooms[room]
        assert one.opened
        if one.progress.ended or one.coverage is None:
            return []
        numbers = np.asarray(blocks, dtype=np.int64)
        if layers.step != 1 or positions.step != 1 or not layers or not positions:
            raise InvalidArgument("positions", f"{layers} or {positions} is empty or has gaps")
        if numbers.shape != (len(positions),) or not self._shape.has(numbers):
            raise InvalidArgument("blocks", f"not {len(positions)} blocks of the pool")
        each = self._shape.planes_per_layer
        planes = range(layers.start * each, layers.stop * each)
        if min(layers.start, positions.start) < 0 or not one.coverage.claim_planes(
            planes, positions
        ):
            raise InvalidArgument("positions", f"{layers} of {positions}: outside or sent before")
        first = self._shape.first_plane
        planes = range(planes.start + first, planes.stop + first)
        return self._pushed(one, SentPart(planes, positions, numbers, generations, after), now_ns)

    def push_state(
        self, room: int, name: str, positions: range, blocks: Sequence[int],
        generations: npt.NDArray[np.uint64], now_ns: int, after: tuple[Any, ...] = (),
    ) -> list[Effect]:  # fmt: skip
        """State data of these positions is in these blocks of its buffer; as :meth:`push`."""
        one = self._rooms[room]
        assert one.opened
        if one.progress.ended or one.coverage is None:
            return []
        field = f"states.{name}"
        index = [state.name for state in self._shape.states].index(name)
        place = PushRange(0, positions.start, len(positions))
        if positions.step != 1 or not positions or len(blocks) != len(positions):
            raise InvalidArgument(field, f"{len(blocks)} blocks for {positions}")
        if not one.states[index].claim([place]):
            raise InvalidArgument(field, f"{positions}: outside or sent before")
        planes = self._shape.state_shares[index].planes
        numbers = np.asarray(blocks, dtype=np.int64)
        return self._pushed(one, SentPart(planes, positions, numbers, generations, after), now_ns)

    def finish(self, room: int, aux: bytes, now_ns: int) -> list[Effect]:
        """Everything was pushed; send the aux data.

        Raises:
            InvalidArgument: something was not pushed, or this was called before.
        """
        one = self._rooms[room]
        assert one.opened
        if one.progress.ended or one.coverage is None:
            return []
        if one.missing_blocks or one.aux is not None:
            missing = f"{one.missing_blocks} blocks of planes and state data were not sent"
            raise InvalidArgument("room", missing if one.aux is None else "it was finished before")
        one.aux = aux
        if not one.is_announced:
            return []
        self._queue_aux(one)
        return self._submit_all(one, now_ns)

    def renew(self, room: int, now_ns: int) -> list[Effect]:
        """The request waits in the engine's queue; notifies decode at most once a second."""
        one = self._rooms[room]
        one.progress.heard(now_ns)
        if one.progress.ended or not one.legs or now_ns - one.said_ns < _SAID_NS:
            return []
        one.said_ns = now_ns
        return [SendTo(link, RenewRoom(room)) for link in one.legs]

    def abort(self, room: int, now_ns: int) -> list[Effect]:
        """The engine gives the request up."""
        why = "the prefill engine gave it up"
        return self._fail(self._rooms[room], FailureCode.ABORTED, Layer.PROTOCOL, why, now_ns)

    def abort_all(self, now_ns: int) -> list[Effect]:
        """The engine gives all requests up."""
        return [effect for room in self._rooms for effect in self.abort(room, now_ns)]

    def device_failed(self, room: int, why: str, now_ns: int) -> list[Effect]:
        """The device of the pool cannot say when the blocks are written."""
        return self._fail(self._rooms[room], FailureCode.DEVICE, Layer.TRANSPORT, why, now_ns)

    def close(self, room: int, now_ns: int) -> list[Effect]:
        """The engine asks no more about a handoff; one that has not ended is aborted."""
        one = self._rooms[room]
        effects = self.abort(room, now_ns)
        one.closed = True
        self._forget(one)
        return effects

    def holds_blocks(self, room: int) -> bool:
        """Whether blocks that were pushed may still be read."""
        one = self._rooms.get(room)
        return one is not None and (not one.progress.ended or one.submitted > 0)

    def busy_links(self) -> set[bytes]:
        """The links on which a handoff lives."""
        return {link for one in self._rooms.values() for link in one.busy}

    # ---- the other side ---------------------------------------------------------------------

    def linked(self, link: bytes, target: LinkTarget, origin: str = "") -> None:
        """A link is up; one that was not named leads to all of a decode engine of one rank.

        ``origin``: address of the peer.
        """
        self._links.add(link, target, origin)

    def received(self, link: bytes, message: FromDecode, now_ns: int) -> list[Effect]:
        """A message of decode."""
        if isinstance(message, HandoffPing):
            return []
        effects: list[Effect] = []
        one = self._rooms.get(message.room) or self._first_heard(link, message, now_ns, effects)
        if one is None:
            self.counts["late_messages"] += 1
            why = self._missed.why(message.room)
            why = why or unopened.refusal(self._rank, unopened.WHY_USED)
            return unopened.answer(link, message, why, doubtful=message.room in self._doubts)
        leg = self._links.leg(one, link)
        if leg is None:  # nothing was submitted on this link, so it cannot be in doubt
            self.counts["foreign_messages"] += 1
            why = unopened.refusal(self._rank, unopened.WHY_FOREIGN)
            return unopened.answer(link, message, why, doubtful=False)
        if one.progress.ended:
            self.counts["late_messages"] += not isinstance(message, Abort)
            return effects + self._answer_ended(one, leg, message)
        one.progress.heard(now_ns)
        match message:
            case Announce():
                effects += self._announced(one, leg, message, now_ns)
            case Abort(failure=failure):
                effects += self._end(one, failure, now_ns, but=link)
            case Done():
                effects += self._done(one, leg, now_ns)
        return effects

    def completed(
        self, number: int, failure: HandoffFailure | None, now_ns: int, *, doubtful: bool = False
    ) -> list[Effect]:
        """A job has ended: none of its bytes is read after this, or arrives unless in doubt.

        Args:
            number: of the job.
            failure: why not all of its bytes were sent; None = they were.
            now_ns: the time.
            doubtful: it has failed, and its bytes may still arrive.
        """
        job = self._jobs.end(number)
        one = self._rooms[job.room]
        leg = one.legs[job.link]
        leg.submitted -= 1
        leg.doubtful = leg.doubtful or doubtful
        if doubtful:
            self._doubts.add(job.room)
        effects: list[Effect] = []
        if failure is None:
            one.progress.heard(now_ns)
            one.progress.moved_bytes += job.share.bytes_of(job.ranges)
        else:
            effects = self._end(one, failure, now_ns)
        effects += self._drained(one)
        self._forget(one)
        return effects + self._submit(job.link, now_ns)

    def closed(self, link: bytes, code: FailureCode, why: str, now_ns: int) -> list[Effect]:
        """A link was closed; its jobs end by :meth:`completed`, each."""
        effects: list[Effect] = []
        for one in [one for one in self._rooms.values() if link in one.legs]:
            one.legs[link].gone = True  # nobody is there to be told
            effects += self._fail(one, code, Layer.TRANSPORT, why, now_ns)
            self._forget(one)
        self._jobs.closed(link)
        self._links.remove(link)
        return effects

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed: end late handoffs."""
        effects: list[Effect] = []
        for one in list(self._rooms.values()):
            if why := one.progress.expired(now_ns):
                effects += self._fail(one, FailureCode.DEADLINE, Layer.PROTOCOL, why, now_ns)
            self._forget(one, now_ns)
        return effects

    def describe(self, now_ns: int) -> list[HandoffStatus]:
        """Where each handoff is, with the ranks of decode that have said nothing."""
        return [one.progress.status(room, one.missing, now_ns) for room, one in self._rooms.items()]

    def check(self) -> None:
        """Assert the invariants."""
        for room, one in self._rooms.items():
            for leg in one.legs.values():
                self._jobs.check(room, leg)
                assert leg.waiting == 0 or not one.progress.ended

    # ---- inside -----------------------------------------------------------------------------

    def _add(self, room: int, now_ns: int, link: bytes = b"") -> SendingRoom:
        progress = HandoffProgress(self._patience, now_ns)
        one = self._rooms[room] = SendingRoom(room, progress, self._links.origin(link))
        return one

    def _first_heard(
        self, link: bytes, message: FromDecode, now_ns: int, effects: list[Effect]
    ) -> SendingRoom | None:
        """A room that the engine has not opened yet; None = it was used, or there are too many."""
        assert not isinstance(message, HandoffPing)
        room = message.room
        if isinstance(message, Done) or room in self._seen or room in self._missed:
            return None
        origin = self._links.origin(link)
        given_up = unopened.make_place(self._rooms.values(), origin)
        if given_up is None or len(self._rooms) - len(given_up) >= ROOMS_MAX:
            # decode frees its blocks when it hears this: what it sent before must start nothing
            self._missed.refuse(room, self._rank, origin)
            return None
        effects += self._give_up(given_up, now_ns)
        return self._add(room, now_ns, link)

    def _give_up(self, rooms: list[SendingRoom], now_ns: int) -> list[Effect]:
        """Rooms that the engine has not opened give way."""
        effects: list[Effect] = []
        for one in rooms:
            why = unopened.WHY_GAVE_WAY
            effects += self._fail(one, FailureCode.REFUSED, Layer.PROTOCOL, why, now_ns)
            self._remove(one)
            self.counts["gave_way"] += 1
        return effects

    def _answer_ended(self, one: SendingRoom, leg: SendingLeg, message: FromDecode) -> list[Effect]:
        """Answer for an ended handoff: decode may have just connected, or missed a message."""
        effects: list[Effect] = []
        if isinstance(message, Announce | RenewRoom) and one.progress.failure is not None:
            effects.append(SendTo(leg.link, Failed(one.room, one.progress.failure)))
        if not isinstance(message, Done):
            leg.drained = False
        return effects + self._drained(one)

    def _announced(
        self, one: SendingRoom, leg: SendingLeg, message: Announce, now_ns: int
    ) -> list[Effect]:
        if leg.there is not None:
            self.counts["repeated_messages"] += 1
            return []
        share = leg.target.share
        try:
            given_up = unopened.make_room(self._rooms.values(), one, message)
            blocks, states = announced_parts(self._shape, message, one.token_count, share)
        except ProtocolError as error:
            return self._fail(one, FailureCode.REFUSED, Layer.PROTOCOL, str(error), now_ns)
        effects = self._give_up(given_up, now_ns)
        one.token_count = message.token_count
        leg.announced(blocks, message.first_token // self._shape.block_tokens, states, message)
        leg.place = message.place
        if not one.is_announced:
            return effects
        one.progress.advance(State.WAITING_FOR_INPUT, now_ns)
        for part in one.parts:
            for each in one.legs.values():
                self._jobs.add(one.room, each, part)
        one.parts.clear()
        if one.aux is not None:
            self._queue_aux(one)
        return effects + self._submit_all(one, now_ns) + self._succeed(one, now_ns)

    def _pushed(self, one: SendingRoom, part: SentPart, now_ns: int) -> list[Effect]:
        if not one.is_announced:
            one.parts.append(part)
            return []
        for leg in one.legs.values():
            self._jobs.add(one.room, leg, part)
        return self._submit_all(one, now_ns)

    def _queue_aux(self, one: SendingRoom) -> None:
        assert one.aux is not None
        for leg in one.legs.values():
            if leg.target.share.has_aux:
                self._jobs.add_aux(one.room, leg, one.aux)

    def _submit_all(self, one: SendingRoom, now_ns: int) -> list[Effect]:
        return [effect for link in one.legs for effect in self._submit(link, now_ns)]

    def _submit(self, link: bytes, now_ns: int) -> list[Effect]:
        """Submit jobs of a link, up to its limit."""
        effects: list[Effect] = []
        for job in self._jobs.submit(link):
            one = self._rooms[job.room]
            one.legs[link].waiting -= 1
            one.legs[link].submitted += 1
            one.progress.advance(State.TRANSFERRING, now_ns)
            effects.append(Submit(job))
        return effects

    def _done(self, one: SendingRoom, leg: SendingLeg, now_ns: int) -> list[Effect]:
        has_all = leg.there is not None and not leg.left and not leg.waiting
        if not has_all or not one.is_announced or (leg.target.share.has_aux and one.aux is None):
            why = "decode says that it has everything, before everything was sent"
            return self._fail(one, FailureCode.PROTOCOL, Layer.PROTOCOL, why, now_ns)
        leg.done = True
        return self._succeed(one, now_ns)

    def _succeed(self, one: SendingRoom, now_ns: int) -> list[Effect]:
        """It has succeeded when all ranks have everything."""
        if all(leg.done for leg in one.legs.values()):
            one.progress.advance(State.SUCCESS, now_ns)
            one.parts.clear()
            self._forget(one)
        return []

    def _failure(self, code: FailureCode, layer: Layer, why: str) -> HandoffFailure:
        return HandoffFailure(code, HandoffSide.PREFILL, self._rank, layer, why[:TEXT_MAX])

    def _fail(
        self, one: SendingRoom, code: FailureCode, layer: Layer, why: str, now_ns: int
    ) -> list[Effect]:
        return self._end(one, self._failure(code, layer, why), now_ns)

    def _end(
        self, one: SendingRoom, failure: HandoffFailure, now_ns: int, *, but: bytes = b""
    ) -> list[Effect]:
        """End a handoff as failed: submit no more of it, and answer when its jobs have ended.

        All decode ranks are notified, except over the link ``but``, which knows.
        """
        if not one.progress.fail(failure, now_ns):
            return []
        self.counts[f"failed_{failure.counted}"] += 1
        one.parts.clear()
        effects: list[Effect] = []
        for link, leg in one.legs.items():
            self._jobs.forget(one.room, leg)
            if link != but and not leg.gone:
                effects.append(SendTo(link, Failed(one.room, failure)))
        return effects + self._drained(one)

    def _drained(self, one: SendingRoom) -> list[Effect]:
        """Notify each decode rank without jobs in progress, once."""
        if one.progress.state != State.FAILED:
            return []
        idle = [leg for leg in one.legs.values() if not (leg.submitted or leg.drained or leg.gone)]
        for leg in idle:
            leg.drained = True
        return [SendTo(leg.link, Drained(one.room, leg.doubtful)) for leg in idle]

    def _forget(self, one: SendingRoom, now_ns: int | None = None) -> None:
        """Remove an ended handoff once it is closed."""
        if not one.progress.ended or one.submitted:
            return
        after_ns = self._patience.silence_ns(State.BOOTSTRAPPING)
        old = now_ns is not None and now_ns - one.progress.since_ns >= after_ns
        if one.closed or (not one.opened and old):
            self._remove(one)

    def _remove(self, one: SendingRoom) -> None:
        """Remove a handoff from the table; its request may still arrive."""
        if self._rooms.pop(one.room, None) is not None and not one.opened:
            self._missed.add(one.room, one.progress.failure, self._rank, one.origin)
