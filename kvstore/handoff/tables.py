"""Each side's state of one room. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.messages import Announce, LandingPlace, RenewRoom
from kvstore.handoff.places import AUX_PLANE, Coverage, PushRange, pack_numbers, state_of
from kvstore.handoff.ranks import data_rank_of
from kvstore.handoff.shape import LinkShare
from kvstore.handoff.state_data import StatePart, StateShape
from kvstore.handoff.states import HandoffProgress, State


class LinkTarget(NamedTuple):
    """The target of a link of prefill.

    Attributes:
        instance: of the decode engine.
        rank: its rank at the end of the link.
        share: the share that it gets over the link.
        receivers: all its ranks that get something from this prefill rank, or are told that they do
            not.
    """

    instance: bytes
    rank: int
    share: LinkShare
    receivers: frozenset[int]


class Speaker(NamedTuple):
    """The peer that first mentions a request to prefill.

    Attributes:
        address: of the peer; empty = unknown.
        instance: of the decode engine, as it claims itself.
    """

    address: str
    instance: bytes


NOBODY: Final = Speaker("", b"")
"""The engine itself."""


class LinkSource(NamedTuple):
    """The source of a link of decode.

    Attributes:
        rank: of prefill.
        share: the share that is sent over the link.
        data_rank: data-parallel rank of prefill that it belongs to.
        data_ranks: number of data-parallel ranks.
        writes: it can write the share over the transport of our engine.
    """

    rank: int
    share: LinkShare
    data_rank: int = 0
    data_ranks: int = 1
    writes: bool = False


class SentPart(NamedTuple):
    """KV, or state data, of some planes and positions that the engine has written.

    On a device it may not have yet, but it has at the fences ``after``.
    """

    planes: range
    positions: range
    blocks: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    after: tuple[Any, ...] = ()


class Wanted(NamedTuple):
    """The KV, or one kind of state data, that a decode rank requests.

    Attributes:
        share: the share that is moved.
        first: position of the first block.
        blocks: at decode.
        place: where another transport may write them; None = over the link.
    """

    share: LinkShare
    first: int
    blocks: list[int]
    place: LandingPlace | None


class SendingLeg:
    """One room at prefill, towards one rank of decode."""

    __slots__ = (
        "done", "doubtful", "drained", "first", "gone", "left", "link", "place", "slot", "states",
        "submitted", "target", "there", "waiting",
    )  # fmt: skip

    def __init__(self, link: bytes, target: LinkTarget) -> None:
        self.link = link
        self.target = target
        self.there: list[int] | None = None  # its blocks, from position first on
        self.first = self.slot = 0
        self.left = 0  # planes of blocks that it needs and that were not pushed
        self.submitted = self.waiting = 0  # jobs
        self.done = self.drained = self.gone = False
        self.doubtful = False  # bytes of a write may arrive that no longer runs
        self.place: LandingPlace | None = None  # where another transport may write
        self.states: list[StatePart] = []

    def announced(
        self, blocks: list[int], first: int, states: list[StatePart], message: Announce
    ) -> None:
        """Store decode's checked request."""
        share = self.target.share
        self.there, self.first, self.states, self.slot = blocks, first, states, message.aux_slot
        self.left = len(blocks) * len(share.planes)
        for part, moved in zip(states, share.states, strict=True):
            self.left += len(part.blocks) * len(moved.planes)
        self.done = share.is_idle

    def wanted(self, plane: int) -> Wanted | None:
        """Decode's request for the memory that a plane belongs to; None = nothing on this link."""
        assert self.there is not None
        index = state_of(plane)
        if index < 0:
            return Wanted(self.target.share, self.first, self.there, self.place)
        if not self.states:
            return None
        return Wanted(self.target.share.states[index], *self.states[index], None)


class SendingRoom:
    """One room at prefill; only :class:`~kvstore.handoff.sending.Senders` changes it."""

    __slots__ = (
        "aux", "closed", "coverage", "legs", "opened", "origin", "parts", "progress", "room",
        "said_ns", "states", "token_count",
    )  # fmt: skip

    def __init__(self, room: int, progress: HandoffProgress, origin: Speaker = NOBODY) -> None:
        self.room = room
        self.progress = progress
        self.origin = origin
        self.legs: dict[bytes, SendingLeg] = {}  # link → leg, of ranks that have spoken of the room
        self.opened = self.closed = False
        self.token_count = -1
        self.coverage: Coverage | None = None
        self.parts: list[SentPart] = []  # not yet split: not all receivers have announced
        self.states: list[Coverage] = []  # of each state buffer
        self.aux: bytes | None = None
        self.said_ns = 0

    def expect(self, planes: int, states: Sequence[StateShape], blocks: int) -> None:
        """The request has this many positions: note the data that the engine will push."""
        self.coverage = Coverage(planes, 0, blocks)
        for state in states:
            wanted = state.positions(blocks, 0)
            self.states.append(Coverage(1, wanted.start, wanted.stop))

    @property
    def busy(self) -> list[bytes]:
        """The links on which it is in progress, or has jobs although it has ended."""
        ended = self.progress.ended
        return [link for link, leg in self.legs.items() if leg.submitted or not ended]

    @property
    def missing_blocks(self) -> int:
        """Blocks that the engine has not pushed."""
        assert self.coverage is not None
        return self.coverage.missing + sum(one.missing for one in self.states)

    @property
    def submitted(self) -> int:
        """Jobs that were submitted and have not ended."""
        return sum(leg.submitted for leg in self.legs.values())

    @property
    def missing(self) -> list[int]:
        """Ranks that have said nothing; only rank 0 is known before any has spoken."""
        wanted = next((leg.target.receivers for leg in self.legs.values()), frozenset((0,)))
        return sorted(wanted - {leg.target.rank for leg in self.legs.values()})

    @property
    def is_announced(self) -> bool:
        """Whether all ranks have announced that this one waits for."""
        legs = list(self.legs.values())
        announced = sum(leg.there is not None for leg in legs)
        return bool(legs) and announced == len(legs[0].target.receivers)


class SendingLinks:
    """The links of one prefill rank, and their targets.

    Args:
        whole: the share of an unnamed link: everything, to a decode engine of one rank.
    """

    def __init__(self, whole: LinkShare) -> None:
        self._whole = whole
        self._known: dict[bytes, tuple[LinkTarget, str]] = {}

    def add(self, link: bytes, target: LinkTarget, origin: str) -> None:
        """A link is up; ``origin``: address of the peer."""
        self._known[link] = target, origin

    def remove(self, link: bytes) -> None:
        """A link was closed."""
        self._known.pop(link, None)

    def origin(self, link: bytes) -> Speaker:
        """The peer that speaks over a link."""
        known = self._known.get(link)
        return Speaker(known[1], known[0].instance) if known is not None else NOBODY

    def leg(self, room: SendingRoom, link: bytes) -> SendingLeg | None:
        """The leg over a link, perhaps a new one; None = the room is another engine's."""
        if link in room.legs:
            return room.legs[link]
        known = self._known.get(link)
        target = known[0] if known else LinkTarget(link, 0, self._whole, frozenset((0,)))
        for leg in room.legs.values():
            if leg.target.instance != target.instance or leg.target.rank == target.rank:
                return None
        room.legs[link] = SendingLeg(link, target)
        return room.legs[link]


BlockName = tuple[int, int]
"""Index of a state buffer, -1 = the pool; and the number of a block in it."""


def block_names(blocks: Sequence[int], states: Sequence[StatePart]) -> list[BlockName]:
    """The names of blocks of the pool, and of those in each state buffer."""
    found = [(-1, block) for block in blocks]
    for index, part in enumerate(states):
        found += [(index, block) for block in part.blocks]
    return found


class ReceivingLeg:
    """One room at decode, from one rank of prefill."""

    __slots__ = (
        "coverage", "drained", "heard", "landing", "left", "source", "staged", "states", "written",
    )  # fmt: skip

    def __init__(self, source: LinkSource) -> None:
        self.source = source
        self.coverage: Coverage | None = None
        self.states: list[Coverage] = []  # of each state buffer
        self.left = 0  # planes of blocks that have not arrived
        self.landing = 0  # heads whose bytes are being written
        self.drained = self.heard = source.share.is_idle  # such a rank need not say anything
        self.written = False  # it was told where another transport may write
        self.staged = range(0)  # our offsets in the memory for what is staged, if it writes there


class ReceivingRoom:
    """One room at decode; only :class:`~kvstore.handoff.receiving.Receivers` changes it."""

    __slots__ = (
        "aborts", "after", "aux_bytes", "aux_claimed", "blocks", "closed", "first", "first_token",
        "is_unstaged", "legs", "next_abort_ns", "peer", "progress", "room", "said_ns", "slot",
        "states", "token_count",
    )  # fmt: skip

    def __init__(
        self, room: int, peer: str, token_count: int, slot: int, now: HandoffProgress
    ) -> None:
        self.room = room
        self.peer = peer
        self.legs: dict[bytes, ReceivingLeg] = {}  # link → leg, once there are links
        self.token_count = token_count
        self.slot = slot  # of the aux data; -1 = given back
        self.progress = now
        self.first_token = self.first = 0
        self.blocks: list[int] | None = None  # from position first on; None = not announced
        self.states: list[StatePart] = []  # of each state buffer
        self.after: tuple[Any, ...] = ()  # fences before which a device writes none of them
        self.aux_claimed = self.closed = False
        self.is_unstaged = False  # there was no memory for heads that another transport writes
        self.aux_bytes = -1  # how many have arrived
        self.said_ns = self.next_abort_ns = self.aborts = 0

    def expect(self, leg: ReceivingLeg) -> None:
        """The blocks are known: note the data that will arrive over a leg."""
        assert self.blocks is not None
        share, stop = leg.source.share, self.first + len(self.blocks)
        numbers = None if share.is_staged else np.array(self.blocks, dtype=np.int64)
        leg.coverage = Coverage(len(share.planes), self.first, stop, numbers, share.planes.start)
        leg.left = leg.coverage.missing
        for part, moved in zip(self.states, share.states, strict=bool(share.states)):
            stop, numbers = part.first + len(part.blocks), np.array(part.blocks, dtype=np.int64)
            first = moved.planes.start
            leg.states.append(Coverage(len(moved.planes), part.first, stop, numbers, first))
            leg.left += leg.states[-1].missing

    @property
    def missing(self) -> list[int]:
        """Ranks of prefill that have said nothing; only rank 0 is known before there is a link."""
        if not self.legs:
            return [0]
        return sorted(leg.source.rank for leg in self.legs.values() if not leg.heard)

    @property
    def sending(self) -> list[bytes]:
        """The links over which data is sent."""
        return [link for link, leg in self.legs.items() if not leg.source.share.is_idle]

    @property
    def is_busy(self) -> bool:
        """Whether its peer may still send something for it, or must be told of it."""
        return not self.progress.ended or self.is_holding or not self.legs

    @property
    def is_holding(self) -> bool:
        """Whether bytes may arrive in the blocks that were announced."""
        return self.blocks is not None and self.progress.state != State.SUCCESS

    @property
    def held(self) -> list[BlockName]:
        """All blocks of the announcement, of the pool and of state buffers."""
        return block_names(self.blocks or (), self.states)

    @property
    def limbo(self) -> Counter[int]:
        """How many blocks it holds although it has ended: of the pool (-1), of each buffer."""
        ended = self.progress.ended and self.is_holding
        return Counter(index for index, _ in self.held) if ended else Counter()

    def staged_at(self, leg: ReceivingLeg, ranges: Sequence[PushRange]) -> list[int]:
        """Addresses of ranges in the staging memory; empty = in the pool."""
        if not leg.staged:
            return []
        share, count = leg.source.share, len(self.blocks or ())
        places = [(one.plane - share.planes.start) * count + one.first - self.first
                  for one in ranges]  # fmt: skip
        return [leg.staged.start + place * share.block_bytes for place in places]

    @property
    def writes_drained(self) -> bool:
        """Whether no prefill rank may still have writes of another transport in progress."""
        return all(leg.drained for leg in self.legs.values() if leg.written)

    def said_to(self, leg: ReceivingLeg, place: LandingPlace | None) -> RenewRoom | Announce:
        """The message that a prefill rank needs now; none for one that sends no KV."""
        if self.blocks is None:
            return RenewRoom(self.room)
        if not leg.source.share.planes:
            return Announce(self.room, self.token_count, self.token_count, b"", self.slot)
        packed, states = (
            pack_numbers(self.blocks),
            [pack_numbers(one.blocks) for one in self.states],
        )
        return Announce(
            self.room, self.token_count, self.first_token, packed, self.slot, place,
            states if leg.source.share.states else [],
        )  # fmt: skip

    def claim(self, leg: ReceivingLeg, ranges: Sequence[PushRange], aux_bytes: int) -> bool:
        """Mark ranges as arriving; returns False, and marks none, if one is invalid.

        Args:
            leg: over which they arrive.
            ranges: at least one.
            aux_bytes: maximum bytes of the aux data; 0 = another transport has written the ranges,
                which carries neither aux nor state data.
        """
        if leg.coverage is None:
            return False
        share = leg.source.share
        index = state_of(ranges[0].plane)
        if index >= 0:
            return bool(aux_bytes) and leg.states[index].claim(ranges)
        aux = [place for place in ranges if place.plane == AUX_PLANE]
        blocks = ranges
        if aux:
            blocks = [place for place in ranges if place.plane != AUX_PLANE]
            if not share.has_aux or not aux_bytes or (blocks and share.is_staged) or len(aux) > 1:
                return False
            if aux[0].first != self.slot or aux[0].size > aux_bytes or self.aux_claimed:
                return False
        if not leg.coverage.claim(blocks):
            return False
        self.aux_claimed = self.aux_claimed or bool(aux)
        return True

    def targets(
        self, leg: ReceivingLeg, ranges: Sequence[PushRange]
    ) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
        """First block, or slot, of each range that was claimed; and if staged, all its blocks."""
        assert self.blocks is not None
        index = state_of(ranges[0].plane)
        if index >= 0:
            part = self.states[index]
            return [part.blocks[place.first - part.first] for place in ranges], []
        targets = [
            place.first if place.plane == AUX_PLANE else self.blocks[place.first - self.first]
            for place in ranges
        ]
        if not leg.source.share.is_staged or ranges[0].plane == AUX_PLANE:
            return targets, []
        numbers = np.array(self.blocks, dtype=np.int64)
        return targets, [numbers[at.first - self.first :][: at.size] for at in ranges]

    def arrived(self, leg: ReceivingLeg, ranges: Sequence[PushRange]) -> None:
        """Mark ranges as arrived and verified."""
        aux = [place.size for place in ranges if place.plane == AUX_PLANE]
        if aux:
            self.aux_bytes = aux[0]
        leg.left -= sum([place.size for place in ranges]) - sum(aux)
        share = leg.source.share.of_plane(ranges[0].plane)
        self.progress.moved_bytes += share.bytes_of(ranges)

    @property
    def landing(self) -> int:
        """Heads whose bytes are being written."""
        return sum(leg.landing for leg in self.legs.values())

    @property
    def left(self) -> int:
        """Planes of blocks that have not arrived."""
        return sum(leg.left for leg in self.legs.values())

    @property
    def undrained(self) -> list[bytes]:
        """The links over which data may still arrive."""
        return [link for link in self.sending if not self.legs[link].drained]

    @property
    def drained(self) -> bool:
        """Whether nothing more arrives from any rank."""
        return all(leg.drained for leg in self.legs.values())


class LinkSources:
    """The links of a decode rank: what is sent over each, and which are up."""

    def __init__(self) -> None:
        self._up: dict[str, dict[bytes, LinkSource]] = {}  # peer → its links that are up
        self._all: dict[bytes, LinkSource] = {}  # also those that are closed, and not settled

    def up(self, peer: str, links: Mapping[bytes, LinkSource]) -> None:
        """All links to a peer are up."""
        self._up[peer] = dict(links)
        self._all.update(links)

    def closed(self, link: bytes) -> None:
        """A link is closed: all links of its peer are, or will be."""
        self._up = {peer: links for peer, links in self._up.items() if link not in links}

    def settled(self, link: bytes) -> None:
        """Nothing arrives over a link that was closed."""
        assert not any(link in links for links in self._up.values())
        self._all.pop(link, None)

    def share_of(self, link: bytes) -> LinkShare | None:
        """The share of a link; None = unknown."""
        source = self._all.get(link)
        return source.share if source is not None else None

    def give_legs(self, one: ReceivingRoom) -> None:
        """Add a leg for each link to the data-parallel rank that serves the room."""
        for link, source in self._up.get(one.peer, {}).items():
            if data_rank_of(one.room, source.data_ranks) == source.data_rank:
                leg = one.legs[link] = ReceivingLeg(source)
                if one.blocks is not None:
                    one.expect(leg)

    def undrained(self, one: ReceivingRoom) -> list[bytes]:
        """The links that are up and from which something may arrive for a room."""
        up = self._up.get(one.peer, {})  # another is settled when its reader has ended
        return [link for link, leg in one.legs.items() if not leg.drained and link in up]

    def to_abort(self, one: ReceivingRoom) -> list[bytes]:
        """The links over which to report that a room has failed; idle ranks are told once."""
        links = self.undrained(one)
        if not one.aborts:
            links += [link for link, leg in one.legs.items() if leg.source.share.is_idle]
        return links
