"""Hashes of token blocks and of keys, out of the msgpack of events: ``_chains.c``, or Python.

A **chain value** is a uint64 that stands for all tokens up to the end of a block; it is never 0.
The chain value of a block is the xxh3_64 of its tokens (little-endian uint32), seeded with the
chain value of the block before. A **name** is a uint64 that stands for a block hash of an engine.

The functions that take ``raw`` decode one msgpack array. Both implementations return the same
values, and a negative number for bytes that are not what they have to be.
"""

import ctypes
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.mover.binary import LIBRARY, load

U64_MAX: Final = (1 << 64) - 1
U32_MAX: Final = (1 << 32) - 1
HASH_BYTES_MAX: Final = 64
"""Maximum length of a block hash that is a byte string."""
_KEY_BYTES: Final = 32
_MIX: Final = 0x165667919E3779F9  # as in _xxh3.h

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)


class WordBuffer:
    """An array that the library writes to.

    Attributes:
        array: shape (room,), uint64 or uint32.
        address: address of its first element.
        room: number of its elements.
    """

    __slots__ = ("address", "array", "room")

    def __init__(self, room: int, dtype: type[np.unsignedinteger[Any]] = np.uint64) -> None:
        self.array = np.zeros(room, dtype)
        self.address: int = self.array.ctypes.data
        self.room = room


class NativeChains:
    """``_chains.c``, called through ctypes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        word, size, memory = ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
        self.binary = library
        self._chain = library.kv_chain
        self._chain.restype = size
        self._chain.argtypes = [memory, size, size, word, memory, size]
        self._read_ids = library.kv_read_ids
        self._read_ids.restype = size
        self._read_ids.argtypes = [memory, size, memory, size]
        self._chain_raw = library.kv_chain_raw
        self._chain_raw.restype = size
        self._chain_raw.argtypes = [memory, size, memory, size, size, word, memory, size]
        self._keys = library.kv_keys_raw
        self._keys.restype = size
        self._keys.argtypes = [memory, size, word, ctypes.c_int32, memory, size]
        self._names = library.kv_names_raw
        self._names.restype = size
        self._names.argtypes = [memory, size, word, memory, size]
        self._find_tokens = library.kv_find_tokens
        self._find_tokens.restype = size
        self._find_tokens.argtypes = [memory, size, memory, size]

    def chain(
        self, ids: npt.NDArray[np.uint32], block_tokens: int, start: int
    ) -> npt.NDArray[np.uint64]:
        """Chain values of the full blocks of ``ids``, shape (len(ids) // block_tokens,), uint64."""
        ids = np.ascontiguousarray(ids)
        chains = np.empty(len(ids) // block_tokens, np.uint64)
        self._chain(ids.ctypes.data, len(ids), block_tokens, start, chains.ctypes.data, len(chains))
        return chains

    def read_ids(self, raw: bytes, ids: WordBuffer) -> int:
        """Decode token ids of 0..2**32-1 into ``ids``; returns how many."""
        count: int = self._read_ids(raw, len(raw), ids.address, ids.room)
        return count

    def chain_raw(
        self, raw: bytes, ids: WordBuffer, block_tokens: int, start: int, out: WordBuffer, at: int
    ) -> int:
        """Decode token ids into ``ids`` and write their chain values to ``out[at:]``.

        Returns:
            The number of ids.
        """
        count: int = self._chain_raw(
            raw, len(raw), ids.address, ids.room, block_tokens, start,
            out.address + 8 * at, out.room - at,
        )  # fmt: skip
        return count

    def keys(self, raw: bytes, scope: int, out: WordBuffer, at: int, *, integers: bool) -> int:
        """Decode prefix keys of 32 bytes and write their chain values to ``out[at:]``.

        Args:
            raw: msgpack of the keys; with ``integers`` also 64-bit integers, signed or not, that
                are their first 8 bytes, big-endian.
            scope: xor-ed with each.
            out: the target.
            at: first element of the target.
            integers: whether integers are allowed.

        Returns:
            The number of keys.
        """
        count: int = self._keys(raw, len(raw), scope, integers, out.address + 8 * at, out.room - at)
        return count

    def names(self, raw: bytes, secret: int, out: WordBuffer) -> int:
        """Decode block hashes (64-bit integers, at most 64 bytes) and write their names to ``out``.

        Returns:
            The number of names.
        """
        count: int = self._names(raw, len(raw), secret, out.address, out.room)
        return count

    def find_tokens(self, payload: bytes, spots: WordBuffer) -> int:
        """Find the token ids in a batch of events, so that nothing else needs to walk over them.

        Args:
            payload: msgpack of the batch.
            spots: gets start and end of the array of each event; 0 and 0 if it has none.

        Returns:
            The number of events; negative if they are too many, or not as expected.
        """
        count: int = self._find_tokens(payload, len(payload), spots.address, spots.room // 2)
        return count


class PlainChains:
    """The same without the library, slower."""

    def chain(
        self, ids: npt.NDArray[np.uint32], block_tokens: int, start: int
    ) -> npt.NDArray[np.uint64]:
        """As :meth:`NativeChains.chain`."""
        packed, step = ids.astype("<u4").tobytes(), 4 * block_tokens
        chains: list[int] = []
        for at in range(0, len(packed) - step + 1, step):
            start = block_chain(packed[at : at + step], start)
            chains.append(start)
        return np.array(chains, np.uint64)

    def read_ids(self, raw: bytes, ids: WordBuffer) -> int:
        """As :meth:`NativeChains.read_ids`."""
        found = _decoded(raw, ids.room)
        if found is None or not all(type(one) is int and 0 <= one <= U32_MAX for one in found):
            return -1
        ids.array[: len(found)] = found
        return len(found)

    def chain_raw(
        self, raw: bytes, ids: WordBuffer, block_tokens: int, start: int, out: WordBuffer, at: int
    ) -> int:
        """As :meth:`NativeChains.chain_raw`."""
        count = self.read_ids(raw, ids)
        if count > 0:
            chains = self.chain(ids.array[:count], block_tokens, start)[: out.room - at]
            out.array[at : at + len(chains)] = chains
        return count

    def keys(self, raw: bytes, scope: int, out: WordBuffer, at: int, *, integers: bool) -> int:
        """As :meth:`NativeChains.keys`."""
        found = _decoded(raw, out.room - at)
        if found is None:
            return -1
        for number, key in enumerate(found):
            if type(key) is bytes and len(key) == _KEY_BYTES:
                first = key[:8]
            elif type(key) is int and integers:
                first = (key & U64_MAX).to_bytes(8, "big")
            else:
                return -1
            out.array[at + number] = (int.from_bytes(first, "little") ^ scope) or 1
        return len(found)

    def names(self, raw: bytes, secret: int, out: WordBuffer) -> int:
        """As :meth:`NativeChains.names`."""
        found = _decoded(raw, out.room)
        if found is None or not all(_is_hash(one) for one in found):
            return -1
        out.array[: len(found)] = [name_of(one, secret) for one in found]
        return len(found)

    def find_tokens(self, payload: bytes, spots: WordBuffer) -> int:  # noqa: ARG002
        """As :meth:`NativeChains.find_tokens`; it never finds any."""
        return -1


def name_of(block_hash: int | bytes, secret: int) -> int:
    """The name of one block hash, as the library makes it."""
    if isinstance(block_hash, bytes):
        return xxhash.xxh3_64_intdigest(block_hash, secret) or 1
    mixed = (block_hash & U64_MAX) ^ secret
    mixed = ((mixed ^ mixed >> 37) * _MIX) & U64_MAX
    return (mixed ^ mixed >> 32) or 1


def block_chain(block: bytes, before: int) -> int:
    """Chain value of one block.

    Args:
        block: its tokens, little-endian uint32, and what else distinguishes it.
        before: chain value of the block before it, or the seed of its scope.
    """
    return xxhash.xxh3_64_intdigest(block, before) or 1


def _is_hash(one: Any) -> bool:
    return type(one) is int or (type(one) is bytes and len(one) <= HASH_BYTES_MAX)


def _decoded(raw: bytes, most: int) -> list[Any] | None:
    """The elements of an array; None if this is none, or too long."""
    try:
        found = msgspec.msgpack.decode(raw)
    except _UNREADABLE:
        return None
    return found if isinstance(found, list) and len(found) <= most else None


_library = load(LIBRARY)
Chains = NativeChains | PlainChains
CHAINS: Final[Chains] = PlainChains() if _library is None else NativeChains(_library)
"""The implementation in use."""
