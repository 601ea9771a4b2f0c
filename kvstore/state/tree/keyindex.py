"""Which node has a key: a dict in parts, because one dict of millions stands still when it grows.

Python copies a dict each time that it is full: 1.4 million entries took 56 ms, in which no request
is answered. Of parts only one is copied at a time: with two million keys 0.5 ms (AMD EPYC).
"""

from collections.abc import Iterator, MutableMapping
from typing import Final, TypeVar

from kvstore.page import KEY_BYTES, PrefixKey

V = TypeVar("V")

PARTS: Final = 256
"""Of an index that is not small; one for each value of a key's first byte, which is random."""
SMALL: Final = 4096
"""Entries that one dict has; the next one makes the parts, which takes about a millisecond."""


class KeyIndex(MutableMapping[PrefixKey, V]):
    """A dict of prefix keys that is never copied whole."""

    __slots__ = ("_length", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[PrefixKey, V]] = [{}]
        self._length = 0

    def __getitem__(self, key: PrefixKey) -> V:
        return self._part(key)[key]

    def get(self, key: PrefixKey, default: V | None = None) -> V | None:  # type: ignore[override]
        """What is under the key; ``default`` when nothing is."""
        parts = self._parts
        return (parts[key[0]] if len(parts) > 1 and key else parts[0]).get(key, default)

    def __setitem__(self, key: PrefixKey, value: V) -> None:
        part = self._part(key)
        before = len(part)
        part[key] = value
        if len(part) > before:
            self._length += 1
            if self._length > SMALL and len(self._parts) == 1:
                self._divide()

    def __delitem__(self, key: PrefixKey) -> None:
        del self._part(key)[key]
        self._length -= 1

    def put(self, keys: list[PrefixKey], value: V) -> None:
        """Put one value under keys that are not there."""
        parts = self._parts
        if len(parts) == 1:
            for key in keys:
                self[key] = value
            return
        for key in keys:
            parts[key[0]][key] = value
        self._length += len(keys)

    def assign(self, packed: bytes, count: int, value: V) -> None:
        """Put one value under ``count`` packed keys that are there."""
        if count == 1:
            self._part(PrefixKey(packed))[PrefixKey(packed)] = value
            return
        parts = self._parts
        for at in range(0, len(packed), KEY_BYTES):
            key = packed[at : at + KEY_BYTES]
            (parts[key[0]] if len(parts) > 1 else parts[0])[PrefixKey(key)] = value

    def discard(self, packed: bytes, first: int, count: int) -> None:
        """Take out the packed keys from number ``first`` on; ``count`` are packed, all there."""
        if count == 1:
            del self[PrefixKey(packed)]
            return
        parts = self._parts
        for at in range(first * KEY_BYTES, len(packed), KEY_BYTES):
            key = packed[at : at + KEY_BYTES]
            del (parts[key[0]] if len(parts) > 1 else parts[0])[PrefixKey(key)]
        self._length -= count - first

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._part(PrefixKey(key))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PrefixKey]:
        for part in self._parts:
            yield from part

    def _part(self, key: PrefixKey) -> dict[PrefixKey, V]:
        parts = self._parts
        return parts[key[0]] if len(parts) > 1 and key else parts[0]

    def _divide(self) -> None:
        (small,) = self._parts
        self._parts = [{} for _ in range(PARTS)]
        for key, value in small.items():
            self._part(key)[key] = value
