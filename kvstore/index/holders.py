"""The prefix index: prefix keys → set of holders, in one open-addressing table. Pure.

A **worker** is an engine or a node. It holds a page in a medium (``GPU``, ``CPU``, ``STORAGE``)
and, with several ranks, in shards. Each (worker, medium, shard) is one bit. A slot of the table has
a tag (the first 64 bits of the key, mixed with those of its **domain**, which is a space or a
model) and the bits: 16 bytes for up to 64 holders, 8 more for each further 64. At half load that is
32 bytes per page.

Two different pages have the same tag with probability 2**-64; the index then reports a page that is
not stored. The index is only a hint: the store verifies every page it restores.

All operations take runs of keys and are vectorised. The table has its full size from the start (the
kernel allocates memory when it is touched), so it never has to be resized. Probing stays within a
segment; a segment with too many dead slots is rebuilt alone, and a worker is dropped segment by
segment. So no step takes long, whatever the size of the table. The position of a key depends on a
seed, so nobody can choose colliding keys.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.page import KEY_BYTES

Words = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]
Present = npt.NDArray[np.bool_]

HOLDERS_MAX: Final = 1024
"""Maximum number of bits: 128 bytes per page if all are used."""
HOLDERS_PER_WORKER_MAX: Final = 256
"""Maximum (medium, shard) pairs of one worker; further ones are ignored."""
SHARDED_DOMAINS_MAX: Final = 4096
"""Maximum (worker, domain) pairs with several shards; the oldest are removed first."""
SEGMENT_SLOTS: Final = 1 << 13
_ONE_SHARD: Final = frozenset({0})
_BITS: Final = 64
_WINDOW: Final = np.arange(8, dtype=np.int64)
"""Offsets of the slots probed together after the first: a cache line."""
_USED_MAX: Final = (0.7, 0.8)
"""Fraction of a segment's slots with a tag, live or dead, above which dead ones are removed. It
varies between segments, so that not all of them are rebuilt at the same time."""
_FULL: Final = 0.95
"""Fraction at which a segment is full. At most half of all slots are live, so this is rare."""


@lru_cache(maxsize=4096)
def _domain_tag(domain: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(domain.encode()).digest()[:8], "little"))


def _tags(domain: str, packed: bytes) -> Words:
    """Tags of keys in the table; 0 means an empty slot."""
    words = np.frombuffer(packed, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    tags: Words = words[:, 0] ^ _domain_tag(domain)
    tags[tags == 0] = 1
    return tags


def prefix_length(present: Present) -> int:
    """Number of leading pages that are present."""
    return len(present) if present.all() else int(present.argmin())


class PromptMatch:
    """The holders of the pages of one prompt; a snapshot, independent of later changes."""

    def __init__(
        self, words: Sequence[Words], holders: dict[str, dict[int, list[int]]], pages: int
    ) -> None:
        """Made by :meth:`PrefixIndex.match`.

        Args:
            words: holder bits of each page, 64 in each array.
            holders: worker → shard → bits.
            pages: number of requested pages.
        """
        self._words = words
        self._holders = holders
        self.pages = pages

    def present(self, worker: str) -> Present:
        """For each page, whether the worker has every shard of it in some medium."""
        shards = self._holders.get(worker)
        result = np.full(self.pages, bool(shards))
        for bits in (shards or {}).values():
            some = np.zeros(self.pages, dtype=bool)
            for word, mask in _by_word(bits).items():
                some |= (self._words[word] & mask) != 0
            result &= some
        return result


def _by_word(bits: Sequence[int]) -> dict[int, np.uint64]:
    masks: Counter[int] = Counter()
    for bit in bits:
        masks[bit // _BITS] += 1 << bit % _BITS
    return {word: np.uint64(mask) for word, mask in masks.items()}


class PrefixIndex:
    """The pages that workers announced and did not remove, up to a limit."""

    def __init__(self, entries_max: int, seed: int = 0) -> None:
        """Make an empty table.

        Args:
            entries_max: maximum pages, at least 1; further ones are left out and counted.
            seed: 64 bits that are unknown to those who choose keys.
        """
        self._entries_max = entries_max
        self._capacity = 1 << max(4, (2 * entries_max - 1).bit_length())
        self._factor = np.uint64((2 * seed + 1) % (1 << 64))
        self._shift = np.uint64(64 - self._capacity.bit_length() + 1)
        self._low = min(self._capacity, SEGMENT_SLOTS) - 1
        segments = self._capacity // (self._low + 1)
        low, high = (share * (self._low + 1) for share in _USED_MAX)
        self._used_max = np.linspace(low, high, segments)
        self._used: Slots = np.zeros(segments, dtype=np.int64)
        self._tags: Words = np.zeros(self._capacity, dtype=np.uint64)
        self._words: list[Words] = [np.zeros(self._capacity, dtype=np.uint64)]
        self._bits: dict[tuple[str, str, int], int] = {}  # (worker, medium, shard) → bit
        self._leaving: dict[str, list[int]] = {}  # worker → bits being dropped
        self._counts: Counter[int] = Counter()  # bit → pages
        # (worker, domain) → announced shards, if not only shard 0
        self._shards: dict[tuple[str, str], set[int]] = {}
        self._free_bits = list(range(HOLDERS_MAX - 1, -1, -1))
        self._live = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._live

    def store(self, worker: str, medium: str, domain: str, packed: bytes, shard: int = 0) -> int:
        """A worker has stored these pages.

        Args:
            worker: its name.
            medium: their medium.
            domain: domain of the keys.
            packed: keys of 32 bytes, heads first, so that a full index leaves out tails.
            shard: shard of each page.

        Returns:
            Number of pages that were left out because the index was full.
        """
        bit = self._bit(worker, medium, shard)
        if bit is None:
            self.dropped += len(packed) // KEY_BYTES
            return len(packed) // KEY_BYTES
        self._note_shard(worker, domain, shard)
        tags = _distinct(_tags(domain, packed))
        slots = self._find(tags)
        new = slots < 0
        new[~new] = ~self._held(slots[~new])
        keep = ~new | (np.cumsum(new) <= self._entries_max - self._live)
        dropped = len(keep) - int(np.count_nonzero(keep))
        self.dropped += dropped
        tags, slots, new = tags[keep], slots[keep], new[keep]
        if not len(tags):
            return dropped
        absent = np.flatnonzero(slots < 0)
        if len(absent) and self._make_room(tags[absent]):
            slots = self._find(tags)  # slots have moved
            absent = np.flatnonzero(slots < 0)
        if len(absent):
            full = self._is_full(tags[absent])
            if full.any():
                keep = np.ones(len(tags), dtype=bool)
                keep[absent[full]] = False
                tags, slots, new = tags[keep], slots[keep], new[keep]
                dropped += int(np.count_nonzero(full))
                self.dropped += int(np.count_nonzero(full))
                absent = np.flatnonzero(slots < 0)
            slots[absent] = self._place(tags[absent])
        self._live += int(np.count_nonzero(new))
        word, mask = self._words[bit // _BITS], np.uint64(1 << bit % _BITS)
        before = word[slots]
        self._counts[bit] += int(np.count_nonzero((before & mask) == 0))
        word[slots] = before | mask
        return dropped

    def _note_shard(self, worker: str, domain: str, shard: int) -> None:
        known = self._shards.get((worker, domain), _ONE_SHARD)
        if shard in known:
            return
        if len(self._shards) >= SHARDED_DOMAINS_MAX:
            del self._shards[next(iter(self._shards))]  # counts as one shard now
        self._shards[worker, domain] = {*known, shard}

    def remove(self, worker: str, medium: str, domain: str, packed: bytes, shard: int = 0) -> int:
        """A worker has removed these pages from a medium.

        Returns:
            How many of them were in the index.
        """
        bit = self._bits.get((worker, medium, shard))
        if bit is None:
            return 0
        slots = self._find(_distinct(_tags(domain, packed)))
        word, mask = self._words[bit // _BITS], np.uint64(1 << bit % _BITS)
        slots = slots[slots >= 0]
        slots = slots[(word[slots] & mask) != 0]
        self._take(slots, bit)
        return len(slots)

    def _take(self, slots: Slots, bit: int) -> None:
        """Clear one bit in slots that have it."""
        self._words[bit // _BITS][slots] &= ~np.uint64(1 << bit % _BITS)
        self._counts[bit] -= len(slots)
        self._bury(slots)

    def _bury(self, slots: Slots) -> None:
        """Find slots without holders among these, and mark them dead."""
        dead = slots[~self._held(slots)]
        self._live -= len(dead)
        self._sweep(dead)

    def drop(self, worker: str) -> Iterator[int]:
        """Remove a worker and all its pages.

        Its pages are misses from the first step on. If the steps are not completed, dropping the
        worker again continues.

        Yields:
            Number of its pages in one part of the table, counted for each medium and shard.
        """
        leaving = self._leaving.setdefault(worker, [])
        leaving += [self._bits.pop(holder) for holder in list(self._bits) if holder[0] == worker]
        for known in [k for k in self._shards if k[0] == worker]:
            del self._shards[known]
        for start in range(0, self._capacity, self._low + 1):
            bits = [bit for bit in leaving if self._counts[bit]]
            if not bits:
                break
            yield self._drop_in(slice(start, start + self._low + 1), bits)
        for bit in self._leaving.pop(worker, []):
            del self._counts[bit]
            self._free_bits.append(bit)

    def _drop_in(self, segment: slice, bits: Sequence[int]) -> int:
        """Clear bits in one segment; returns how many were set."""
        pages = 0
        cleared = np.zeros(self._low + 1, dtype=bool)
        for number, mask in _by_word(bits).items():
            word = self._words[number][segment]
            hit = word & mask
            cleared |= hit != 0
            for bit in bits:
                if bit // _BITS == number:
                    count = int(np.count_nonzero(hit & np.uint64(1 << bit % _BITS)))
                    self._counts[bit] -= count
                    pages += count
            word &= ~mask
        slots = np.flatnonzero(cleared) + segment.start
        self._bury(slots)
        return pages

    def match(self, domain: str, packed: bytes) -> PromptMatch:
        """Look up the holders of these pages.

        Args:
            domain: domain of the keys.
            packed: keys of 32 bytes, in chain order.
        """
        slots = self._find(_tags(domain, packed))
        absent = slots < 0
        words = []
        for word in self._words:
            held = word[slots]  # -1 reads some slot; the result is ignored
            held[absent] = 0
            words.append(held)
        holders: dict[str, dict[int, list[int]]] = {}
        for (worker, _, shard), bit in self._bits.items():
            if worker not in holders:
                shards = self._shards.get((worker, domain), _ONE_SHARD)
                holders[worker] = {needed: [] for needed in shards}
            if shard in holders[worker]:
                holders[worker][shard].append(bit)
        return PromptMatch(words, holders, len(slots))

    def pages(self) -> dict[tuple[str, str], int]:
        """Number of pages at each (worker, medium); with several shards, the maximum of them."""
        result: dict[tuple[str, str], int] = {}
        for (worker, medium, _), bit in self._bits.items():
            count = self._counts[bit]
            result[worker, medium] = max(count, result.get((worker, medium), 0))
        return result

    def _bit(self, worker: str, medium: str, shard: int) -> int | None:
        """The bit of a holder, a new one if necessary; None if all are used."""
        holder = (worker, medium, shard)
        bit = self._bits.get(holder)
        if bit is None and self._free_bits and self._holders(worker) < HOLDERS_PER_WORKER_MAX:
            bit = self._bits[holder] = self._free_bits.pop()
            while bit >= _BITS * len(self._words):
                self._words.append(np.zeros(self._capacity, dtype=np.uint64))
        return bit

    def _holders(self, worker: str) -> int:
        leaving = len(self._leaving.get(worker, ()))
        return leaving + sum(holder[0] == worker for holder in self._bits)

    def _held(self, slots: Slots) -> Present:
        """Whether the page of each slot has a holder."""
        held: Present = self._words[0][slots] != 0
        for word in self._words[1:]:
            held |= word[slots] != 0
        return held

    def _home(self, tags: Words) -> Slots:
        """The first slot to probe for each tag."""
        return ((tags * self._factor) >> self._shift).astype(np.int64)

    def _beyond(self, slots: Slots, steps: Slots | int) -> Slots:
        """The slots a number of steps further, in the same segment."""
        return (slots & ~self._low) | ((slots + steps) & self._low)

    def _segments(self, slots: Slots) -> Slots:
        """Number of these slots in each segment."""
        return np.bincount(slots // (self._low + 1), minlength=len(self._used))

    def _find(self, tags: Words) -> Slots:
        """The slot of each tag; -1 if absent."""
        slots = self._home(tags)
        seen = self._tags[slots]
        going = np.flatnonzero((seen != tags) & (seen != 0))
        found: Slots = np.where(seen == tags, slots, -1)
        at = self._beyond(slots[going], 1)
        while len(going):
            places = self._beyond(at[:, None], _WINDOW)
            window = self._tags[places]
            hit = window == tags[going][:, None]
            hits = hit.any(axis=1)
            found[going[hits]] = places[hits, hit[hits].argmax(axis=1)]
            on = ~hits & (window != 0).all(axis=1)
            going, at = going[on], self._beyond(at[on], len(_WINDOW))
        return found

    def _make_room(self, tags: Words) -> bool:
        """Rebuild segments that these tags would fill; returns whether that was necessary."""
        used = self._used + self._segments(self._home(tags))
        crowded = np.flatnonzero(used > self._used_max)
        for segment in crowded:
            self._clear_dead(int(segment))
        return bool(len(crowded))

    def _is_full(self, tags: Words) -> Present:
        """For each tag, whether its segment is full."""
        slots = self._home(tags)
        full: Present = self._used + self._segments(slots) > _FULL * (self._low + 1)
        return full[slots // (self._low + 1)]

    def _place(self, tags: Words) -> Slots:
        """Give each tag a slot; they are distinct and absent."""
        slots = self._home(tags)
        going = np.arange(len(tags))
        self._used += self._segments(slots)
        while len(going):
            at = slots[going]
            takers = going[self._tags[at] == 0]
            self._tags[slots[takers]] = tags[takers]  # of several for one slot, the last wins
            going = going[self._tags[at] != tags[going]]
            slots[going] = self._beyond(slots[going], 1)
        return slots

    def _sweep(self, dead: Slots) -> None:
        """Empty dead slots at the end of their cluster, and the dead ones before them.

        A dead slot inside a cluster keeps its tag, so that entries probed past it are found.
        """
        while len(dead):
            ending = dead[self._tags[self._beyond(dead, 1)] == 0]
            self._tags[ending] = 0
            self._used -= self._segments(ending)
            before = self._beyond(ending, -1)
            dead = before[(self._tags[before] != 0) & ~self._held(before)]

    def _clear_dead(self, segment: int) -> None:
        """Rebuild one segment from its live entries."""
        size = self._low + 1
        start = segment * size
        every = np.flatnonzero(self._tags[start : start + size]) + start
        live = every[self._held(every)]
        tags = self._tags[live]
        home = self._home(tags)
        order = np.argsort(home, kind="stable")
        step = np.arange(len(order))
        slots = np.maximum.accumulate(home[order] - step) + step
        inside = slots < start + size
        values = [word[live[order]] for word in self._words]
        tags = tags[order]
        self._tags[start : start + size] = 0
        self._tags[slots[inside]] = tags[inside]
        self._used[segment] = np.count_nonzero(inside)
        slots[~inside] = self._place(tags[~inside])  # past the end: wrap to the beginning
        for word, value in zip(self._words, values, strict=True):
            word[start : start + size] = 0
            word[slots] = value

    def check(self) -> None:
        """Assert every invariant; slow."""
        every = np.flatnonzero(self._tags)
        held = self._held(every)
        assert np.array_equal(self._used, self._segments(every))
        assert self._used.max() <= _FULL * (self._low + 1)
        assert self._live == int(np.count_nonzero(held)) <= self._entries_max
        assert len(np.unique(self._tags[every])) == len(every)
        assert np.array_equal(self._find(self._tags[every]), every)
        leaving = [bit for bits in self._leaving.values() for bit in bits]
        every_bit = [*self._bits.values(), *self._free_bits, *leaving]
        assert sorted(every_bit) == list(range(HOLDERS_MAX))
        for number, word in enumerate(self._words):
            assert not word[self._tags == 0].any()
            for bit in range(_BITS):
                pages = int(np.count_nonzero(word & np.uint64(1 << bit)))
                assert pages == self._counts[number * _BITS + bit]
        assert all(self._counts[bit] == 0 for bit in self._free_bits)


def _distinct(tags: Words) -> Words:
    """The distinct tags, in order of their first occurrence."""
    _, first = np.unique(tags, return_index=True)
    return tags if len(first) == len(tags) else tags[np.sort(first)]
