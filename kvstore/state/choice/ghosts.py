"""What is remembered of pages that left the index: when, why and for whom. Pure, and bounded.

``explain`` answers from it. The newest entries are kept; once one had to be forgotten, "never
stored" can no longer be told from "left long ago", and :attr:`Ghosts.forgotten` says so.

An entry takes 112 bytes in one array and about 150 in the index over it.
"""

import struct
from typing import Final, NamedTuple

from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

GHOSTS_MAX: Final = 100_000
_NONE: Final = 0xFFFF_FFFF
_NAMES_MAX: Final = 255
_ENTRY: Final = struct.Struct("<32s32sIHIBBIQQQQ")
"""key, head, space, shard, wanting space, cause, policy, hits, stored, used, left, wanted bytes."""


class Ghost(NamedTuple):
    """One page that left; times are the node's clock in nanoseconds, 0 = not known.

    Attributes:
        shard: number of the shard whose page left last under this key.
        cause: ``evicted``, ``expired``, ``read_once``, ``corrupt``, ``head_lost``, ``operator``,
            ``cleared``, ``moved``, ``reclaimed``, ``quota``, ``retired``.
        head: the page before it whose leaving made this one unreachable; empty when it left for
            its own sake.
        policy: the eviction policy that chose it; empty unless it was evicted.
        hits: lookups and acquires that ended at it (or at a page below it that left earlier).
        wanted_by: number of the space that needed the room, or None.
        wanted_bytes: size of the slot that was needed; 0 = none, but the quota of ``wanted_by``.
    """

    key: PrefixKey
    space: int
    shard: int
    cause: str
    head: PrefixKey
    policy: str
    hits: int
    stored_ns: int
    used_ns: int
    left_ns: int
    wanted_by: int | None
    wanted_bytes: int


class Ghosts:
    """The last pages that left.

    Args:
        entries_max: how many are remembered.

    Attributes:
        policy: name of the eviction policy at work.
        wanted: (space number, slot bytes) that room is being made for now, 0 bytes = for the
            space's quota; None = nobody.
        head: the page whose leaving takes others along now; empty = none.
        forgotten: entries that newer ones pushed out.
    """

    def __init__(self, entries_max: int = GHOSTS_MAX) -> None:
        """Start with none; memory is taken as entries come."""
        self.policy = "lru"
        self.wanted: tuple[int, int] | None = None
        self.head = PrefixKey(b"")
        self.forgotten = 0
        self._max = entries_max
        self._entries = bytearray()
        #: :func:`_name` → position of its entry.
        self._index: dict[int, int] = {}
        self._next = 0
        self._names: list[str] = [""]

    def __len__(self) -> int:
        return len(self._index)

    def add(
        self, node: PrefixNode, shard: int, cause: str, now_ns: int, key: PrefixKey | None = None
    ) -> None:
        """A page of ``node`` leaves the index now, with all after it; None = the last page."""
        key = node.key if key is None else key
        if not self._max:
            self.forgotten += 1
            return
        name = _name(node.space.number, key)
        position = self._index.get(name)
        if position is None:
            position = self._place()
            self._index[name] = position
        by, size = self.wanted if self.wanted is not None and cause == "evicted" else (_NONE, 0)
        _ENTRY.pack_into(
            self._entries, position * _ENTRY.size, key, self.head, node.space.number, shard,
            by, self._number(cause), self._number(self.policy) if cause == "evicted" else 0,
            min(node.hits, 0xFFFFFFFF), node.stored_ns, node.used_ns, now_ns, size,
        )  # fmt: skip

    def find(self, space: PrefixTree, key: PrefixKey) -> Ghost | None:
        """What is remembered of a page, or None."""
        position = self._index.get(_name(space.number, key))
        if position is None:
            return None
        ghost = self._read(position)
        # Names are 64 bits of a hash: two pages may share one.
        return ghost if (ghost.key, ghost.space) == (key, space.number) else None

    def oldest_ns(self) -> int:
        """When the oldest page that is remembered left; 0 = none is."""
        full = len(self._entries) == self._max * _ENTRY.size
        return self._read(self._next % self._max if full else 0).left_ns if self._entries else 0

    def _place(self) -> int:
        """Where a new entry goes; what was there is forgotten."""
        position = self._next % self._max
        if self._next < self._max:
            self._entries += bytes(_ENTRY.size)
        else:
            old = self._read(position)
            name = _name(old.space, old.key)
            if self._index.get(name) == position:
                del self._index[name]
            self.forgotten += 1
        self._next += 1
        return position

    def _read(self, position: int) -> Ghost:
        (key, head, space, shard, by, cause, policy, hits, stored, used, left, size) = (
            _ENTRY.unpack_from(self._entries, position * _ENTRY.size)
        )
        return Ghost(
            PrefixKey(key), space, shard, self._names[cause],
            PrefixKey(head if any(head) else b""), self._names[policy], hits, stored, used, left,
            by if by != _NONE else None, size,
        )  # fmt: skip

    def _number(self, name: str) -> int:
        if name not in self._names and len(self._names) < _NAMES_MAX:
            self._names.append(name)
        return self._names.index(name) if name in self._names else 0


def _name(space: int, key: PrefixKey) -> int:
    assert len(key) == KEY_BYTES
    return int.from_bytes(key[8:16], "little") ^ space << 47
