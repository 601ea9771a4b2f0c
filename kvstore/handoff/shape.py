"""The shape of a pool, as both cores know it: numbers of planes, blocks and tokens. Pure."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.handoff.messages import TEXT_MAX, Announce, LandingPlace
from kvstore.handoff.places import (
    AUX_PLANE,
    BLOCKS_MAX,
    NUMBER_BYTES,
    PLANES_MAX,
    STATE_PLANE,
    PushRange,
    state_of,
    unpack_numbers,
)
from kvstore.handoff.ranks import RankPart, Share, Span
from kvstore.handoff.state_data import (
    StatePart,
    StateShape,
    check_names,
    wanted_states,
)
from kvstore.protocol.endpoint import is_endpoint
from kvstore.protocol.errors import InvalidArgument, ProtocolError

_ADDRESS_MAX: Final = 1 << 56
_SEED: Final = struct.Struct("<3Q")


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The numbers of a pool.

    In memory, the bytes of a block in one plane are those of its first token, head after head, then
    those of the next token. Two pools fit if the bytes of one head of one token are equal, and the
    layers and heads of all ranks of both sides are.

    Attributes:
        plane_count: planes, all layers of this rank together.
        planes_per_layer: planes of one layer.
        block_bytes: bytes of one block in one plane; 0 = no KV is moved.
        block_tokens: tokens of one block.
        block_count: blocks of the pool.
        first_layer: of this rank.
        heads: KV heads of this rank: the first, and the one after the last; (0, 1) for latents.
        states: the state buffers of this rank.
    """

    plane_count: int
    planes_per_layer: int
    block_bytes: int
    block_tokens: int
    block_count: int
    first_layer: int = 0
    heads: Span = (0, 1)
    states: tuple[StateShape, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InvalidArgument: one is outside what messages can name.
        """
        if not 0 < self.plane_count <= PLANES_MAX:
            raise InvalidArgument("plane_count", f"{self.plane_count} is not 1 to {PLANES_MAX}")
        if self.block_tokens < 1:
            raise InvalidArgument("block_tokens", f"{self.block_tokens} is not positive")
        if not 0 < self.block_count < 1 << 32:
            raise InvalidArgument("block_count", f"{self.block_count} is not 1 to 2**32-1")
        if not 0 <= self.first_layer <= PLANES_MAX or not 0 <= self.heads[0] < self.heads[1]:
            raise InvalidArgument("heads", f"layers from {self.first_layer}, heads {self.heads}")
        if self.head_count > 1 and self.block_bytes % (self.head_count * self.block_tokens):
            what = f"{self.head_count} heads of {self.block_tokens} tokens"
            raise InvalidArgument("heads", f"{self.block_bytes} bytes of a block are not {what}")
        check_names(self.states)

    @property
    def head_count(self) -> int:
        """Heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def first_plane(self) -> int:
        """Number of the first plane among the planes of all ranks."""
        return self.first_layer * self.planes_per_layer

    @property
    def part(self) -> RankPart:
        """The part that this rank holds."""
        layers = self.plane_count // self.planes_per_layer
        return RankPart((self.first_layer, self.first_layer + layers), self.heads)

    @property
    def whole(self) -> "LinkShare":
        """All of the pool, the state data and the aux data."""
        planes = range(self.first_plane, self.first_plane + self.plane_count)
        size, states = self.block_bytes, self.state_shares
        return LinkShare(planes, self.heads, size, is_staged=False, has_aux=True, states=states)

    @property
    def state_shares(self) -> tuple["LinkShare", ...]:
        """The shares of all state buffers."""
        found: list[LinkShare] = []
        for index, state in enumerate(self.states):
            found.append(self._state_share(index, state.planes))
        return tuple(found)

    def _state_share(self, index: int, planes: Span) -> "LinkShare":
        """The share of one state buffer: some of its planes."""
        state, first = self.states[index], STATE_PLANE + index * PLANES_MAX
        heads = (0, 1) if state.is_alike else self.heads
        moved = range(first + planes[0], first + planes[1])
        return LinkShare(moved, heads, state.block_bytes, is_staged=False, has_aux=False)

    def share(self, share: Share, there: RankPart, states: Sequence[Span] = ()) -> "LinkShare":
        """The share of a link.

        Args:
            share: of a plan in which this rank has this pool.
            there: the part that the other rank holds.
            states: planes of each state buffer that the link moves; empty = none.

        Raises:
            InvalidArgument: ``states``: these are not planes of each buffer of this rank.
        """
        if states and (len(states) != len(self.states) or share.part is None):
            raise InvalidArgument("states", f"planes of {len(states)} buffers")
        if share.part is None:
            return LinkShare(range(0), (0, 0), 1, is_staged=False, has_aux=share.has_aux)
        heads, each = share.part.heads, self.planes_per_layer
        planes = range(share.part.layers[0] * each, share.part.layers[1] * each)
        size = self.block_bytes * (heads[1] - heads[0]) // self.head_count
        staged = heads != self.heads or heads != there.heads
        moved: list[LinkShare] = []
        for index, (state, (first, stop)) in enumerate(zip(self.states, states, strict=False)):
            if not (state.planes[0] <= first <= stop <= state.planes[1] or first == stop == 0):
                what = f"{first} to {stop} is not of {state.planes}"
                raise InvalidArgument(f"states.{state.name}.planes", what)
            moved.append(self._state_share(index, (first, stop)))
        return LinkShare(
            planes, heads, size, is_staged=staged, has_aux=share.has_aux,
            states=tuple(moved) if any(one.planes for one in moved) else (),
        )  # fmt: skip

    def blocks_of(self, token_count: int) -> int:
        """Number of blocks for this many tokens."""
        return min(-(-token_count // self.block_tokens), BLOCKS_MAX)

    def wanted(
        self, token_count: int, first_token: int, blocks: Sequence[int]
    ) -> tuple[int, list[int]]:
        """First position and blocks that decode requests.

        Raises:
            InvalidArgument: they are not the right number of distinct blocks of the pool.
        """
        if not 0 <= first_token <= token_count:
            raise InvalidArgument("first_token", f"{first_token} of {token_count}")
        stop = self.blocks_of(token_count)
        first = stop if first_token == token_count else first_token // self.block_tokens
        found = np.asarray(blocks, dtype=np.int64).reshape(-1)
        numbers = found.tolist()
        if len(numbers) != stop - first or len(set(numbers)) != len(numbers):
            what = f"{len(numbers)} blocks, {stop - first} different ones are needed"
            raise InvalidArgument("blocks", what)
        if not self.has(found):
            raise InvalidArgument("blocks", "one is not in the pool")
        return first, numbers

    def wanted_states(
        self, token_count: int, first: int, states: Mapping[str, Sequence[int]]
    ) -> list[StatePart]:
        """The blocks of state data of a request whose KV is requested from a position on.

        Raises:
            InvalidArgument: they are not the right number of distinct blocks of each buffer.
        """
        return wanted_states(self.states, states, self.blocks_of(token_count), first)

    def has(self, blocks: npt.NDArray[np.int64]) -> bool:
        """Whether all blocks are in the pool."""
        return not len(blocks) or (int(blocks.min()) >= 0 and int(blocks.max()) < self.block_count)


class LinkShare(NamedTuple):
    """What one link moves: some planes of some heads of every block.

    Attributes:
        planes: numbers among the planes of all ranks; messages have these numbers.
        heads: first head, and the one after the last.
        block_bytes: bytes of the moved heads in one block of one plane.
        is_staged: whether these are fewer than all heads of both pools. Then the heads of a range
            are gathered into one piece of memory, sent, and scattered.
        has_aux: the aux data is sent over this link.
        states: the shares of state buffers that it moves; empty if none.
    """

    planes: range
    heads: Span
    block_bytes: int
    is_staged: bool
    has_aux: bool
    states: tuple["LinkShare", ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is sent over this link."""
        return not self.planes and not self.has_aux

    def of_plane(self, plane: int) -> "LinkShare":
        """The share of the state buffer that a plane belongs to; for other planes, this share.

        Raises:
            ProtocolError: the link moves no such state data.
        """
        index = state_of(plane)
        if index < 0:
            return self
        if index >= len(self.states):
            raise ProtocolError(f"plane {plane:#x} is of state data that the link does not move")
        return self.states[index]

    def range_bytes(self, place: PushRange) -> int:
        """Bytes of a range of blocks, or of aux data."""
        return place.size * (1 if place.plane == AUX_PLANE else self.block_bytes)

    def bytes_of(self, ranges: Sequence[PushRange]) -> int:
        """Bytes of ranges together."""
        size = self.block_bytes
        return sum([count if plane == AUX_PLANE else count * size for plane, _, count in ranges])

    def seed_of(self, room: int) -> int:
        """The seed of the digests of a room, together with their places; it covers the heads."""
        return xxhash.xxh3_64_intdigest(_SEED.pack(room, *self.heads))


def announced_blocks(shape: PoolShape, message: Announce, token_count: int) -> list[int]:
    """The blocks of an announcement.

    Args:
        shape: of the pools of both sides.
        message: the announcement.
        token_count: that it must have; -1 = not known yet.

    Raises:
        ProtocolError: a field is wrong.
    """
    tokens, first = message.token_count, message.first_token
    if token_count not in (-1, tokens):
        raise ProtocolError(f"{tokens} tokens, the request has {token_count}")
    if not 0 <= first <= tokens or not 0 < tokens <= BLOCKS_MAX * shape.block_tokens:
        raise ProtocolError(f"KV from token {first} on, of {tokens}")
    if not 0 <= message.aux_slot < BLOCKS_MAX:
        raise ProtocolError(f"aux slot {message.aux_slot}")
    wanted = shape.blocks_of(tokens) - first // shape.block_tokens if first < tokens else 0
    return _different(message.blocks, wanted, "blocks")


def announced_parts(
    shape: PoolShape, message: Announce, token_count: int, share: LinkShare
) -> tuple[list[int], list[StatePart]]:
    """The blocks of the pool, and of each state buffer, in an announcement.

    Args:
        shape: of the pools of both sides.
        message: the announcement.
        token_count: of the request; -1 = unknown.
        share: the share of the link.

    Raises:
        ProtocolError: a field is wrong.
    """
    blocks = announced_blocks(shape, message, token_count)
    states = announced_states(shape, message, share)
    if message.place is not None:
        check_place(share, message.place, blocks)
    return blocks, states


def announced_states(shape: PoolShape, message: Announce, share: LinkShare) -> list[StatePart]:
    """The blocks of an announcement in each state buffer.

    Args:
        shape: of the pools of both sides.
        message: an announcement whose numbers of tokens were checked.
        share: what the link moves.

    Raises:
        ProtocolError: a field is wrong.
    """
    states = shape.states if share.states else ()
    if len(message.states) != len(states):
        raise ProtocolError(f"blocks of {len(message.states)} state buffers, not {len(states)}")
    stop = shape.blocks_of(message.token_count)
    tokens, first = message.token_count, message.first_token
    first = stop if first == tokens else first // shape.block_tokens
    found: list[StatePart] = []
    for state, packed in zip(states, message.states, strict=True):
        wanted = state.positions(stop, first)
        blocks = _different(packed, len(wanted), f"blocks of {state.name}")
        found.append(StatePart(wanted.start, blocks))
    return found


def _different(packed: bytes, wanted: int, what: str) -> list[int]:
    """``wanted`` distinct numbers of a message; they are counted before they are decoded.

    Raises:
        ProtocolError: they are not.
    """
    count = len(packed) / NUMBER_BYTES
    numbers = unpack_numbers(packed) if count == wanted else []
    if len(set(numbers)) != wanted:
        raise ProtocolError(f"{count:g} {what}, {wanted} different ones are needed")
    return numbers


def check_place(share: LinkShare, place: LandingPlace, blocks: list[int]) -> None:
    """Check the place at which decode wants to be written to.

    Mooncake's library terminates its process on an invalid endpoint.

    Args:
        share: the share of the link.
        place: of an announcement.
        blocks: of the same announcement.

    Raises:
        ProtocolError: a field is wrong.
    """
    if not is_endpoint(place.endpoint):
        raise ProtocolError(f"{place.endpoint[:TEXT_MAX]!r} is no endpoint")
    if len(place.transport) > TEXT_MAX:
        raise ProtocolError("the name of a transport is too long")
    planes = np.frombuffer(place.planes[: len(place.planes) // 8 * 8], dtype="<u8")
    count = len(share.planes)
    if len(place.planes) != 8 * count or not count or not planes.all():
        raise ProtocolError(f"{len(place.planes)} bytes of addresses for {count} planes")
    stop = len(blocks) if share.is_staged else max(blocks, default=0) + 1
    if int(planes.max()) + stop * share.block_bytes > _ADDRESS_MAX:
        raise ProtocolError("an address is outside the memory of a process")
