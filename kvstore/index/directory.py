"""The holder directory: the owner of each bit of a holder set. Pure."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Final, NamedTuple

import msgspec

from kvstore.index.layout import DIRECTORY_BYTES, HOLDER_BITS_MAX
from kvstore.index.reading import read

HOLDER_BYTES_MAX: Final = DIRECTORY_BYTES // HOLDER_BITS_MAX - 1


class PageHolder(NamedTuple):
    """A holder of pages: one bit of a holder set.

    Attributes:
        worker: name of an engine or a node.
        medium: ``GPU``, ``CPU`` or ``STORAGE``.
        shard: digest of the shard; empty for engines.
        group: KV group of an engine; 0 for nodes.
    """

    worker: str
    medium: str
    shard: str
    group: int


class HolderDirectory:
    """The holders at one moment.

    Args:
        version: moves with every change; -1 for a directory that could not be read.
        holders: holders that count now, each with its bit.
    """

    def __init__(self, version: int, holders: Mapping[PageHolder, int]) -> None:
        self.version = version
        self.holders: Final = holders

    @cached_property
    def by_worker(self) -> Mapping[str, Sequence[PageHolder]]:
        """The holders of each worker that has any that count now."""
        result: dict[str, list[PageHolder]] = {}
        for holder in self.holders:
            result.setdefault(holder.worker, []).append(holder)
        return result


_Bit = Annotated[int, msgspec.Meta(ge=0, lt=HOLDER_BITS_MAX)]
_ENCODED = list[tuple[_Bit, PageHolder]]
_decoder: Final = msgspec.msgpack.Decoder(_ENCODED)


def packable(holder: PageHolder) -> bool:
    """Whether it has a place in a directory: not too long, and without lone surrogates."""
    try:
        return len(msgspec.msgpack.encode((0xFFFF, holder))) <= HOLDER_BYTES_MAX
    except UnicodeEncodeError:
        return False


def pack_holders(holders: Mapping[PageHolder, int]) -> bytes:
    """Encode a directory of packable holders."""
    return msgspec.msgpack.encode([(bit, holder) for holder, bit in holders.items()])


def unpack_holders(packed: bytes) -> dict[PageHolder, int]:
    """Decode a directory, in which each bit is one of a holder set.

    Raises:
        UnreadableError: it is none.
    """
    return {holder: bit for bit, holder in read(_decoder.decode, packed)}
