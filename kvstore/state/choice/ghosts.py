"""Records of dropped pages: when, why, and to make room for whom. Pure and bounded.

``explain`` uses it. The newest entries are kept; once one had to be discarded, "never stored" can
no longer be distinguished from "dropped long ago", and :attr:`Ghosts.forgotten` says so.

Every evicted page is recorded, and hardly any record is ever requested. So there is no index:
entries are in parts by their key, and a part is searched linearly, which takes some microseconds.
An entry takes 112 bytes.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

GHOSTS_MAX: Final = 100_000
PART_ENTRIES = 400
"""Maximum entries of a part, unless there would be more than :data:`PARTS_MAX` parts."""
PARTS_MAX: Final = 4096
_NONE: Final = 0xFFFF_FFFF
_NAMES_MAX: Final = 255
_FACTS: Final = struct.Struct("<32sIHIBBIQQQQ")
"""head, space, shard, wanting space, cause, policy, hits, stored, used, left, wanted bytes."""
_ENTRY: Final = struct.Struct(f"{KEY_BYTES}s{_FACTS.size}s")
"""A page's key, and its facts."""
_ENTRY_BYTES: Final = _ENTRY.size


class Ghost(NamedTuple):
    """One dropped page; times are the node's clock in nanoseconds, 0 = unknown.

    Attributes:
        shard: number of the shard whose page was dropped last under this key.
        cause: ``evicted``, ``expired``, ``read_once``, ``corrupt``, ``head_lost``, ``operator``,
            ``cleared``, ``moved``, ``reclaimed``, ``quota``, ``retired``.
        head: the dropped ancestor that made this page unreachable; empty if it was dropped for its
            own sake.
        policy: the eviction policy that chose it; empty unless it was evicted.
        hits: lookups and acquires whose last hit page was this one (or a descendant dropped
            earlier).
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
    """The last dropped pages; one that was dropped twice counts twice.

    Args:
        entries_max: maximum entries; a few less if keys fill parts unevenly.

    Attributes:
        policy: name of the current eviction policy.
        wanted: (space number, slot bytes) for which room is being made now; 0 bytes = for the
            space's quota; None = no room is being made.
        head: the page whose descendants are being dropped now; empty = none.
        forgotten: entries that newer ones replaced.
    """

    def __init__(self, entries_max: int = GHOSTS_MAX) -> None:
        self.policy = "lru"
        self.wanted: tuple[int, int] | None = None
        self.head = PrefixKey(b"")
        self.forgotten = 0
        count = max(1, min(entries_max // PART_ENTRIES, PARTS_MAX))
        self._part_max = entries_max // count
        self._parts = [_Part() for _ in range(count)]
        self._names: list[str] = [""]
        self._numbers = {"": 0}

    def __len__(self) -> int:
        return sum(len(part.entries) for part in self._parts) // _ENTRY_BYTES

    def add(
        self, node: PrefixNode, shard: int, cause: str, now_ns: int,
        keys: Sequence[PrefixKey] = (),
    ) -> None:  # fmt: skip
        """Record pages of ``node`` that are dropped now, the last one first; default: its last."""
        keys = keys or [node.key]
        if not self._part_max:
            self.forgotten += len(keys)
            return
        evicted = cause == "evicted"
        by, size = self.wanted if self.wanted is not None and evicted else (_NONE, 0)
        facts = _FACTS.pack(
            self.head, node.space.number, shard, by, self._number(cause),
            self._number(self.policy) if evicted else 0, min(node.hits, 0xFFFFFFFF),
            node.stored_ns, node.used_ns, now_ns, size,
        )  # fmt: skip
        parts, count, part_bytes = self._parts, len(self._parts), self._part_max * _ENTRY_BYTES
        for key in keys:
            part = parts[(key[0] << 8 | key[1]) % count]
            entries = part.entries
            if len(entries) < part_bytes:
                entries += key + facts
                continue
            oldest = part.oldest
            _ENTRY.pack_into(entries, oldest * _ENTRY_BYTES, key, facts)
            part.oldest = oldest + 1 if oldest + 1 < self._part_max else 0
            self.forgotten += 1

    def find(self, space: PrefixTree, key: PrefixKey) -> Ghost | None:
        """The last record of a page; None if there is none."""
        assert len(key) == KEY_BYTES
        part = self._parts[(key[0] << 8 | key[1]) % len(self._parts)]
        # Newest first: those before ``oldest`` came behind all others.
        middle = part.oldest * _ENTRY_BYTES
        for first, end in ((0, middle), (middle, len(part.entries))):
            at = part.entries.rfind(key, first, end)
            while at >= 0:
                if at % _ENTRY_BYTES == 0:
                    ghost = self._read(part, at // _ENTRY_BYTES)
                    if ghost.space == space.number:
                        return ghost
                at = part.entries.rfind(key, first, at + KEY_BYTES - 1)
        return None

    def oldest_ns(self) -> int:
        """All pages dropped since then are recorded; 0 = all that were ever dropped, or none is."""
        full_bytes = self._part_max * _ENTRY_BYTES
        return max(
            [
                self._read(part, part.oldest).left_ns
                for part in self._parts
                if part.entries and len(part.entries) == full_bytes
            ],
            default=0,
        )

    def _read(self, part: "_Part", number: int) -> Ghost:
        (head, space, shard, by, cause, policy, hits, stored, used, left, size) = (
            _FACTS.unpack_from(part.entries, number * _ENTRY_BYTES + KEY_BYTES)
        )
        return Ghost(
            PrefixKey(bytes(part.entries[number * _ENTRY_BYTES :][:KEY_BYTES])), space,
            shard, self._names[cause], PrefixKey(head if any(head) else b""), self._names[policy],
            hits, stored, used, left, by if by != _NONE else None, size,
        )  # fmt: skip

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None and len(self._names) < _NAMES_MAX:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number or 0


class _Part:
    """Entries whose keys have the same beginning; a ring once it is full.

    Attributes:
        entries: key and packed facts of each.
        oldest: index of the entry that the next one replaces, if the part is full.
    """

    __slots__ = ("entries", "oldest")

    def __init__(self) -> None:
        self.entries = bytearray()
        self.oldest = 0
