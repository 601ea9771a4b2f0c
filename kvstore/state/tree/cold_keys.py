"""Which node has a key, for pages that are in no memory: in a quarter of the room of a dict. Pure.

A dict takes 115 bytes a page, most of it for the key's own object, which the node has too. Here is
a **mark** of 4 bytes and the node; whether the key is one of the node's is looked up in the node.
"""

from collections.abc import Iterator
from typing import Final

from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode

MARK_BYTES: Final = 4
MARKS_MASK = (1 << 8 * MARK_BYTES) - 1
BUCKET_PAGES = 48
"""On average of all buckets, at most. One of them is divided as often as so many pages came, which
takes some 20 microseconds: the table never stands still to grow."""


class ColdKeys:
    """A table of buckets that grows by one bucket at a time (linear hashing, W. Litwin 1980).

    Marks are of Python's hash of a key, which no client can foresee. Two pages may have equal
    marks.

    Attributes:
        count: how many pages are here.
    """

    __slots__ = ("_base", "_marks", "_nodes", "count")

    def __init__(self) -> None:
        #: Bucket → marks of its pages, and the nodes that these are part of.
        self._marks: list[bytearray] = [bytearray()]
        self._nodes: list[list[PrefixNode]] = [[]]
        self.count = 0
        #: A power of two: buckets from ``len(_marks) - _base`` up to it are not divided yet.
        self._base = 1

    def __iter__(self) -> Iterator[PrefixKey]:
        found = {node for bucket in self._nodes for node in bucket}
        # Neither marks nor addresses of objects are the same in each process.
        for node in sorted(found, key=lambda node: node.serial):
            yield from node.key_list()

    def get(self, key: PrefixKey) -> PrefixNode | None:
        """The node that the page of a key is part of; None when it is not here."""
        mark = hash(key) & MARKS_MASK
        bucket = self._bucket(mark)
        marks, packed = self._marks[bucket], mark.to_bytes(MARK_BYTES, "little")
        at = marks.find(packed)
        while at >= 0:
            if not at % MARK_BYTES:
                node = self._nodes[bucket][at // MARK_BYTES]
                if _has(node.keys, key):
                    return node
            at = marks.find(packed, at + 1)
        return None

    def put(self, node: PrefixNode) -> None:
        """Take the pages of a node, which are not here."""
        for key in node.key_list():
            mark = hash(key) & MARKS_MASK
            bucket = self._bucket(mark)
            self._marks[bucket] += mark.to_bytes(MARK_BYTES, "little")
            self._nodes[bucket].append(node)
            self.count += 1
            if self.count > BUCKET_PAGES * len(self._marks):
                self._divide()

    def assign(self, packed: bytes, node: PrefixNode, to: PrefixNode) -> None:
        """The pages of packed keys, so far of one node, are of another one."""
        for at in range(0, len(packed), KEY_BYTES):
            bucket, number = self._find(PrefixKey(packed[at : at + KEY_BYTES]), node)
            self._nodes[bucket][number] = to

    def discard(self, packed: bytes, node: PrefixNode) -> None:
        """Take out the pages of packed keys, which are of a node."""
        for at in range(0, len(packed), KEY_BYTES):
            bucket, number = self._find(PrefixKey(packed[at : at + KEY_BYTES]), node)
            del self._nodes[bucket][number]
            del self._marks[bucket][number * MARK_BYTES : (number + 1) * MARK_BYTES]
        self.count -= len(packed) // KEY_BYTES

    def _find(self, key: PrefixKey, node: PrefixNode) -> tuple[int, int]:
        """Bucket of a page of a node, and its number there; of equal marks any will do."""
        mark = hash(key) & MARKS_MASK
        bucket = self._bucket(mark)
        marks, nodes = self._marks[bucket], self._nodes[bucket]
        packed = mark.to_bytes(MARK_BYTES, "little")
        at = marks.find(packed)
        while at % MARK_BYTES or nodes[at // MARK_BYTES] is not node:
            at = marks.find(packed, at + 1)
            assert at >= 0, "a page that is not here"
        return bucket, at // MARK_BYTES

    def _bucket(self, mark: int) -> int:
        at = mark & (2 * self._base - 1)
        return at if at < len(self._marks) else at - self._base

    def _divide(self) -> None:
        """Move what belongs there from the oldest bucket to a new one."""
        new = len(self._marks)
        old, bit = new - self._base, self._base
        marks, nodes = self._marks[old], self._nodes[old]
        kept, moved = bytearray(), bytearray()
        staying: list[PrefixNode] = []
        going: list[PrefixNode] = []
        for number in range(len(nodes)):
            mark = marks[number * MARK_BYTES : (number + 1) * MARK_BYTES]
            if int.from_bytes(mark, "little") & bit:
                moved += mark
                going.append(nodes[number])
            else:
                kept += mark
                staying.append(nodes[number])
        self._marks[old], self._nodes[old] = kept, staying
        self._marks.append(moved)
        self._nodes.append(going)
        if new + 1 == 2 * self._base:
            self._base *= 2


def _has(packed: bytes, key: PrefixKey) -> bool:
    """Whether one of the packed keys is this one."""
    at = packed.find(key)
    while at > 0 and at % KEY_BYTES:
        at = packed.find(key, at + 1)
    return at >= 0
