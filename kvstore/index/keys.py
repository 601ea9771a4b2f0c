"""Prefix keys of pages in events and snapshots of nodes. Pure."""

from typing import Final

import msgspec
import numpy as np

from kvstore.index.batch import HASHES_MAX
from kvstore.index.reading import UnreadableError
from kvstore.protocol.page import KEY_BYTES

_ENTRY_BYTES: Final = 2 + KEY_BYTES
"""A key in msgpack: type and length, and the key."""
_ENTRY_HEAD: Final = (0xC4, KEY_BYTES)
_ARRAY_HEADS: Final = {0xDC: 2, 0xDD: 4}
"""Bytes of the length of an array with more than 15 elements."""


def packed_keys(raw: msgspec.Raw) -> bytes:
    """The prefix keys of an encoded array, packed, without an object for each.

    Raises:
        UnreadableError: it is not an array of keys of 32 bytes, or one of too many.
    """
    view = memoryview(raw)
    first = view[0]
    if 0x90 <= first <= 0x9F:
        start, count = 1, first & 0x0F
    elif first in _ARRAY_HEADS:
        start = 1 + _ARRAY_HEADS[first]
        count = int.from_bytes(view[1:start], "big")
    else:
        raise UnreadableError("keys are no array")
    if count > HASHES_MAX:
        raise UnreadableError(f"an event has too many keys: {count}")
    if len(view) != start + count * _ENTRY_BYTES:
        raise UnreadableError(f"these are not {count} keys")
    entries = np.frombuffer(view[start:], dtype=np.uint8).reshape(count, _ENTRY_BYTES)
    if not (entries[:, :2] == _ENTRY_HEAD).all():
        raise UnreadableError("a key has not 32 bytes")
    return entries[:, 2:].tobytes()
