"""Maps keys of pages that are not in memory to nodes, in an eighth of the memory of a dict. Pure.

A dict takes 115 bytes per page, most of it for the key object, which duplicates the node's. Here,
an **entry** takes 8 bytes: a mark, and the number that the node has here. The node itself tells
whether it has the key.
"""

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode

ENTRY_BYTES: Final = 8
MARK_BYTES: Final = 4
_NUMBER_SHIFT: Final = 8 * MARK_BYTES
_FILLED_NODES: Final = 1024
"""Nodes whose keys exist as objects at the same time while a table is filled."""
MARKS_MASK = (1 << 8 * MARK_BYTES) - 1
BUCKET_PAGES = 24
"""Maximum mean pages per bucket. After this many new pages one bucket is divided, which takes some
microseconds: the table never pauses to grow."""


class ColdKeys:
    """A table of buckets that grows by one bucket at a time (linear hashing, W. Litwin 1980).

    Marks are bits of Python's hash of a key, which no client can predict. Two pages may have equal
    marks. Each node here has a unique number, :attr:`PrefixNode.cold`.

    Attributes:
        count: number of pages here.
    """

    __slots__ = ("_base", "_entries", "_free", "_nodes", "count")

    def __init__(self) -> None:
        #: Bucket → the entries of its pages.
        self._entries: list[bytearray] = [bytearray()]
        #: Number → node; None where it is free, as 0 always is.
        self._nodes: list[PrefixNode | None] = [None]
        self._free: list[int] = []
        self.count = 0
        #: A power of two: buckets from ``len(_entries) - _base`` up to it are not divided yet.
        self._base = 1

    def __iter__(self) -> Iterator[PrefixKey]:
        # Numbers are used again: they are not the order in which pages came.
        found = [node for node in self._nodes if node is not None]
        for node in sorted(found, key=lambda node: node.serial):
            yield from node.key_list()

    def get(self, key: PrefixKey) -> PrefixNode | None:
        """The node that contains the page of a key; None if it is not here."""
        mark = hash(key) & MARKS_MASK
        entries, packed = self._bucket(mark), mark.to_bytes(MARK_BYTES, "little")
        at = entries.find(packed)
        while at >= 0:
            if not at % ENTRY_BYTES:
                number = int.from_bytes(entries[at + MARK_BYTES : at + ENTRY_BYTES], "little")
                node = self._nodes[number]
                assert node is not None
                if _has(node.keys, key):
                    return node
            at = entries.find(packed, at + 1)
        return None

    def fill(self, nodes: list[PrefixNode]) -> None:
        """Add all pages of these nodes at once, in a fraction of the time; none is here yet."""
        assert not self.count, "its buckets are made anew"
        marks = array("q")
        for at in range(0, len(nodes), _FILLED_NODES):
            packed = b"".join([node.keys for node in nodes[at : at + _FILLED_NODES]])
            marks.extend(map(hash, np.frombuffer(packed, f"V{KEY_BYTES}").tolist()))
        numbers = np.array([self._number(node) for node in nodes], np.int64)
        counts = np.array([node.count for node in nodes], np.int64)
        entries = np.frombuffer(marks, np.int64) & MARKS_MASK
        self.count = len(entries)
        buckets = max(1, -(-self.count // BUCKET_PAGES))
        self._base = 1 << buckets.bit_length() - 1
        at_bucket = entries & (2 * self._base - 1)
        at_bucket[at_bucket >= buckets] -= self._base
        entries |= np.repeat(numbers, counts) << _NUMBER_SHIFT
        packed = entries[np.argsort(at_bucket, kind="stable")].astype("<i8").tobytes()
        ends = np.cumsum(np.bincount(at_bucket, minlength=buckets)) * ENTRY_BYTES
        self._entries = [
            bytearray(packed[begin:end]) for begin, end in pairwise([0, *ends.tolist()])
        ]

    def put(self, node: PrefixNode, keys: list[PrefixKey]) -> None:
        """Add the pages of a node, which are not here; ``keys`` are theirs."""
        number, mask = self._number(node), MARKS_MASK
        for key in keys:
            mark = hash(key) & mask
            entries = self._bucket(mark)
            entries += _entry(mark, number)
        self.count += len(keys)
        while self.count > BUCKET_PAGES * len(self._entries):
            self._divide()

    def assign(self, packed: bytes, node: PrefixNode, to: PrefixNode) -> None:
        """Move pages, given by packed keys, from their node to another one that is not here yet."""
        number = self._number(to)
        for at in range(0, len(packed), KEY_BYTES):
            key = PrefixKey(packed[at : at + KEY_BYTES])
            entries, first = self._find(key, node)
            entries[first + MARK_BYTES : first + ENTRY_BYTES] = number.to_bytes(4, "little")

    def discard(self, node: PrefixNode, keys: list[PrefixKey]) -> None:
        """Remove all pages of a node; ``keys`` are theirs."""
        assert len(keys) == node.count, node
        for key in keys:
            entries, first = self._find(key, node)
            del entries[first : first + ENTRY_BYTES]
        self._nodes[node.cold] = None
        self._free.append(node.cold)
        node.cold = 0
        self.count -= len(keys)
        assert self.count >= 0, node

    def _number(self, node: PrefixNode) -> int:
        """Give a node a unique number."""
        assert not node.cold, ("it has one", node)
        if self._free:
            node.cold = self._free.pop()
            self._nodes[node.cold] = node
        else:
            node.cold = len(self._nodes)
            self._nodes.append(node)
        assert node.cold, ("0 stands for none", node)
        return node.cold

    def _find(self, key: PrefixKey, node: PrefixNode) -> tuple[bytearray, int]:
        """The bucket of a node's page, and the offset of its entry; of equal entries, any."""
        assert self._nodes[node.cold] is node, node
        mark = hash(key) & MARKS_MASK
        entries, packed = self._bucket(mark), _entry(mark, node.cold)
        at = entries.find(packed)
        while at % ENTRY_BYTES:
            assert at >= 0, ("a page that is not here", node)
            at = entries.find(packed, at + 1)
        return entries, at

    def _bucket(self, mark: int) -> bytearray:
        at = mark & (2 * self._base - 1)
        return self._entries[at if at < len(self._entries) else at - self._base]

    def _divide(self) -> None:
        """Move entries from the oldest bucket to a new one."""
        new, bit = len(self._entries), self._base
        old = new - bit
        entries = memoryview(self._entries[old]).cast("Q").tolist()
        self._entries[old] = bytearray(array("Q", [one for one in entries if not one & bit]))
        self._entries.append(bytearray(array("Q", [one for one in entries if one & bit])))
        left, moved = len(self._entries[old]), len(self._entries[new])
        assert left + moved == len(entries) * ENTRY_BYTES, "an entry was lost"
        if new + 1 == 2 * bit:
            self._base *= 2


def _entry(mark: int, number: int) -> bytes:
    return (mark | number << _NUMBER_SHIFT).to_bytes(ENTRY_BYTES, "little")


def _has(packed: bytes, key: PrefixKey) -> bool:
    """Whether one of the packed keys is this one."""
    at = packed.find(key)
    while at > 0 and at % KEY_BYTES:
        at = packed.find(key, at + 1)
    return at >= 0
