"""The shape of a pool, as both cores know it: numbers of planes, blocks and tokens. Pure."""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument, ProtocolError
from kvstore.handoff.messages import TEXT_MAX, Announce, LandingPlace
from kvstore.handoff.places import (
    AUX_PLANE,
    BLOCKS_MAX,
    PLANES_MAX,
    PushRange,
    unpack_numbers,
)

_ENDPOINT: Final = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):(\d{1,5})", re.ASCII)
_ADDRESS_MAX: Final = 1 << 56


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The numbers of a pool; two pools fit when all but ``block_count`` are equal.

    Attributes:
        plane_count: planes, all layers together.
        planes_per_layer: planes of one layer.
        block_bytes: bytes of one block in one plane; 0 = no KV is moved.
        block_tokens: tokens of one block.
        block_count: blocks of the pool.
    """

    plane_count: int
    planes_per_layer: int
    block_bytes: int
    block_tokens: int
    block_count: int

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

    def blocks_of(self, token_count: int) -> int:
        """Blocks that so many tokens need."""
        return min(-(-token_count // self.block_tokens), BLOCKS_MAX)

    def range_bytes(self, place: PushRange) -> int:
        """Bytes of a range of blocks, or of aux data."""
        return place.size * (1 if place.plane == AUX_PLANE else self.block_bytes)

    def has(self, blocks: npt.NDArray[np.int64]) -> bool:
        """Whether all blocks are in the pool."""
        return not len(blocks) or (int(blocks.min()) >= 0 and int(blocks.max()) < self.block_count)


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
    blocks = unpack_numbers(message.blocks)
    wanted = shape.blocks_of(tokens) - first // shape.block_tokens if first < tokens else 0
    if len(blocks) != wanted or len(set(blocks)) != len(blocks):
        raise ProtocolError(f"{len(blocks)} blocks, {wanted} different ones are needed")
    return blocks


def check_place(shape: PoolShape, place: LandingPlace, blocks: list[int]) -> None:
    """Check where decode wants to be written to.

    Mooncake's library ends its process when it does not like an endpoint.

    Args:
        shape: of the pools of both sides.
        place: of an announcement.
        blocks: of the same announcement.

    Raises:
        ProtocolError: a field is wrong.
    """
    found = _ENDPOINT.fullmatch(place.endpoint)
    if len(place.endpoint) > TEXT_MAX or found is None or not 0 < int(found[1]) < 1 << 16:
        raise ProtocolError(f"{place.endpoint[:TEXT_MAX]!r} is no endpoint")
    if len(place.transport) > TEXT_MAX:
        raise ProtocolError("the name of a transport is too long")
    planes = np.frombuffer(place.planes[: len(place.planes) // 8 * 8], dtype="<u8")
    if len(place.planes) != 8 * shape.plane_count or not planes.all():
        raise ProtocolError(f"{len(place.planes)} bytes of addresses for {shape.plane_count}")
    if int(planes.max()) + (max(blocks, default=0) + 1) * shape.block_bytes > _ADDRESS_MAX:
        raise ProtocolError("an address is outside the memory of a process")
