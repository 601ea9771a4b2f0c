"""Who holds which pages: prefix keys → set of holders, in one open-addressing table. Pure.

A **worker** is an engine or a node; it holds a page in a medium (``GPU``, ``CPU``, ``STORAGE``)
and, with several ranks, in shards. Each (worker, medium, shard) is one bit. A slot of the table is
the key's first 64 bits, mixed with those of its **domain** (a space, or a model), and the bits: 16
bytes for up to 64 holders, 8 more for each further 64. At half load that is 32 bytes a page.

Two different pages share 64 bits with probability 2**-64: the index then promises a page that is
not there. It is a hint; what is restored is verified by the store.

All operations take whole runs of keys and are vectorised. The table has its full size from the
start (the system gives memory when it is touched), so that nothing ever stops to grow. Slots are
probed within a segment, which alone is laid out anew when it has too many dead ones, and a worker
is dropped segment by segment: no step takes long, however large the table is. Where a key belongs
depends on a seed, so nobody can choose keys that collide.
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
"""Bits there can be: 128 bytes a page when all are used."""
HOLDERS_PER_WORKER_MAX: Final = 256
"""Media and shards of one worker; what more it announces is dropped."""
SHARDED_DOMAINS_MAX: Final = 4096
"""(worker, domain) pairs with several shards that are remembered; the oldest go first."""
SEGMENT_SLOTS: Final = 1 << 13
_ONE_SHARD: Final = frozenset({0})
_BITS: Final = 64
_WINDOW: Final = np.arange(8, dtype=np.int64)
"""Slots looked at together after the first: a cache line."""
_USED_MAX: Final = (0.7, 0.8)
"""Share of a segment's slots with a tag, live or dead, beyond which the dead ones are cleared away;
from segment to segment another one between these, so that it is not all segments' turn at once."""
_FULL: Final = 0.95
"""A segment takes no more. Half of all slots are live at most, so it hardly ever gets there."""


@lru_cache(maxsize=4096)
def _domain_tag(domain: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(domain.encode()).digest()[:8], "little"))


def _tags(domain: str, packed: bytes) -> Words:
    """What the table knows keys by; 0 is the empty slot."""
    words = np.frombuffer(packed, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    tags: Words = words[:, 0] ^ _domain_tag(domain)
    tags[tags == 0] = 1
    return tags


def prefix_length(present: Present) -> int:
    """How many pages are present without a hole, from the first on."""
    return len(present) if present.all() else int(present.argmin())


class PromptMatch:
    """Where the pages of one prompt are; a snapshot, valid whatever happens to the index."""

    def __init__(
        self, words: Sequence[Words], holders: dict[str, dict[int, list[int]]], pages: int
    ) -> None:
        """Made by :meth:`PrefixIndex.match`.

        Args:
            words: the holders' bits of each page, 64 of them in each array.
            holders: worker → shard → bits.
            pages: pages asked for.
        """
        self._words = words
        self._holders = holders
        self.pages = pages

    def present(self, worker: str) -> Present:
        """For each page, whether that worker has every shard of it in some medium."""
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
    """All and only the pages that some worker announced and did not take back, within a bound."""

    def __init__(self, entries_max: int, seed: int = 0) -> None:
        """Make an empty table.

        Args:
            entries_max: pages at most, at least 1; further ones are dropped and counted.
            seed: 64 bits that nobody knows who chooses keys.
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
        self._leaving: dict[str, list[int]] = {}  # worker → bits that are being dropped
        self._counts: Counter[int] = Counter()  # bit → pages
        # (worker, domain) → shards announced, where they are not just shard 0
        self._shards: dict[tuple[str, str], set[int]] = {}
        self._free_bits = list(range(HOLDERS_MAX - 1, -1, -1))
        self._live = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._live

    def store(self, worker: str, medium: str, domain: str, packed: bytes, shard: int = 0) -> int:
        """A worker holds these pages now.

        Args:
            worker: its name.
            medium: where it has them.
            domain: what the keys belong to.
            packed: keys of 32 bytes; heads first, so that a full index drops tails.
            shard: the part of each page.

        Returns:
            pages that found no room and were dropped.
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
            slots = self._find(tags)  # much has moved, and the dead are gone
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
            del self._shards[next(iter(self._shards))]  # counts as one shard from now on
        self._shards[worker, domain] = {*known, shard}

    def remove(self, worker: str, medium: str, domain: str, packed: bytes, shard: int = 0) -> int:
        """A worker holds these pages there no longer.

        Returns:
            how many of them were known to be there.
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
        """See which of these slots nobody holds any more."""
        dead = slots[~self._held(slots)]
        self._live -= len(dead)
        self._sweep(dead)

    def drop(self, worker: str) -> Iterator[int]:
        """Forget everything that a worker holds, and the worker.

        It holds nothing any more from the first step on; what is left to do after a step that is
        the last one taken is done when it is dropped again.

        Yields:
            pages it held, counted once for each medium and shard, a part of the table at a time.
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
        """Clear bits in one segment; gives how many were set."""
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
        """Find out who holds which of these pages.

        Args:
            domain: what the keys belong to.
            packed: keys of 32 bytes, in chain order.
        """
        slots = self._find(_tags(domain, packed))
        absent = slots < 0
        words = []
        for word in self._words:
            held = word[slots]  # -1 reads some slot; what it says is thrown away
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
        """Pages at each (worker, medium); with several shards, of the one that has most."""
        result: dict[tuple[str, str], int] = {}
        for (worker, medium, _), bit in self._bits.items():
            count = self._counts[bit]
            result[worker, medium] = max(count, result.get((worker, medium), 0))
        return result

    def _bit(self, worker: str, medium: str, shard: int) -> int | None:
        """The holder's bit, a new one if need be; None when there is none left."""
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
        """Whether anybody holds the page of each slot."""
        held: Present = self._words[0][slots] != 0
        for word in self._words[1:]:
            held |= word[slots] != 0
        return held

    def _home(self, tags: Words) -> Slots:
        """Where each tag belongs."""
        return ((tags * self._factor) >> self._shift).astype(np.int64)

    def _beyond(self, slots: Slots, steps: Slots | int) -> Slots:
        """The slots so many steps on, in the same segment."""
        return (slots & ~self._low) | ((slots + steps) & self._low)

    def _segments(self, slots: Slots) -> Slots:
        """How many of these slots are in each segment."""
        return np.bincount(slots // (self._low + 1), minlength=len(self._used))

    def _find(self, tags: Words) -> Slots:
        """The slot of each tag; -1 where there is none."""
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
        """Clear the dead away where these tags would fill a segment; whether that was needed."""
        used = self._used + self._segments(self._home(tags))
        crowded = np.flatnonzero(used > self._used_max)
        for segment in crowded:
            self._clear_dead(int(segment))
        return bool(len(crowded))

    def _is_full(self, tags: Words) -> Present:
        """For each tag, whether its segment takes no more."""
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
            self._tags[slots[takers]] = tags[takers]  # of several for one slot, the last one wins
            going = going[self._tags[at] != tags[going]]
            slots[going] = self._beyond(slots[going], 1)
        return slots

    def _sweep(self, dead: Slots) -> None:
        """Empty dead slots that end their cluster, and the dead ones before them.

        A dead slot inside a cluster keeps its tag, so that what was pushed past it is found.
        """
        while len(dead):
            ending = dead[self._tags[self._beyond(dead, 1)] == 0]
            self._tags[ending] = 0
            self._used -= self._segments(ending)
            before = self._beyond(ending, -1)
            dead = before[(self._tags[before] != 0) & ~self._held(before)]

    def _clear_dead(self, segment: int) -> None:
        """Lay the live entries of one segment out anew."""
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
        slots[~inside] = self._place(tags[~inside])  # past the end: at the beginning
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
    """Without repetitions, in the order of their first occurrence."""
    _, first = np.unique(tags, return_index=True)
    return tags if len(first) == len(tags) else tags[np.sort(first)]
