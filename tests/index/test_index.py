"""The prefix index against a dictionary, and at its bounds."""

import hashlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.index import holders as index
from kvstore.index.holders import (
    HOLDERS_MAX,
    HOLDERS_PER_WORKER_MAX,
    SEGMENT_SLOTS,
    PrefixIndex,
    prefix_length,
)

WORKERS = ["engine/a", "engine/b", "node/n"]
MEDIA = ["GPU", "CPU"]
DOMAINS = ["d1", "d2"]
ENTRIES_MAX = 40


STEP_S_ANYWHERE = 0.3
"""A step that grows with what a worker holds takes longer than this on any machine."""


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def packed(numbers: list[int]) -> bytes:
    return b"".join(map(key, numbers))


runs = st.lists(st.integers(0, 59), max_size=12)
shards = st.sampled_from([0, 0, 0, 1])


class IndexMachine(RuleBasedStateMachine):
    """A dictionary says who holds what; the table must say the same."""

    segment_slots = index.SEGMENT_SLOTS

    def __init__(self) -> None:
        super().__init__()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(index, "SEGMENT_SLOTS", self.segment_slots)
            self.index = PrefixIndex(ENTRIES_MAX, seed=7)
        self.model: dict[tuple[str, int], set[tuple[str, str, int]]] = {}
        self.shards: dict[tuple[str, str], set[int]] = {}
        self.dropped = 0

    @rule(w=st.sampled_from(WORKERS), m=st.sampled_from(MEDIA), d=st.sampled_from(DOMAINS))
    def nothing(self, w: str, m: str, d: str) -> None:
        assert self.index.store(w, m, d, b"") == 0
        assert self.index.remove(w, m, d, b"") == 0

    @rule(
        worker=st.sampled_from(WORKERS),
        medium=st.sampled_from(MEDIA),
        domain=st.sampled_from(DOMAINS),
        numbers=runs,
        shard=shards,
    )
    def store(self, worker: str, medium: str, domain: str, numbers: list[int], shard: int) -> None:
        dropped = 0
        self.shards.setdefault((worker, domain), {0}).add(shard)
        for number in dict.fromkeys(numbers):
            page = (domain, number)
            if page not in self.model and len(self.model) >= ENTRIES_MAX:
                dropped += 1
            else:
                self.model.setdefault(page, set()).add((worker, medium, shard))
        self.dropped += dropped
        assert self.index.store(worker, medium, domain, packed(numbers), shard) == dropped

    @rule(
        worker=st.sampled_from(WORKERS),
        medium=st.sampled_from(MEDIA),
        domain=st.sampled_from(DOMAINS),
        numbers=runs,
        shard=shards,
    )
    def remove(self, worker: str, medium: str, domain: str, numbers: list[int], shard: int) -> None:
        known = 0
        for number in set(numbers):
            holders = self.model.get((domain, number), set())
            if (worker, medium, shard) in holders:
                known += 1
                holders.remove((worker, medium, shard))
                if not holders:
                    del self.model[domain, number]
        assert self.index.remove(worker, medium, domain, packed(numbers), shard) == known

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: str) -> None:
        held = 0
        for page in list(self.model):
            kept = {holder for holder in self.model[page] if holder[0] != worker}
            held += len(self.model[page]) - len(kept)
            self.model[page] = kept
            if not kept:
                del self.model[page]
        self.shards = {k: v for k, v in self.shards.items() if k[0] != worker}
        assert sum(self.index.drop(worker)) == held

    @rule(worker=st.sampled_from(WORKERS), steps=st.integers(0, 3))
    def begin_to_drop(self, worker: str, steps: int) -> None:
        """What a step is not taken for is done by the next drop; meanwhile it holds nothing."""
        dropping = self.index.drop(worker)
        for _ in range(steps):
            next(dropping, 0)
        dropping.close()
        match = self.index.match("d1", packed(list(range(60))))
        assert steps == 0 or not match.present(worker).any()
        self.drop_the_rest(worker)

    def drop_the_rest(self, worker: str) -> None:
        for page in list(self.model):
            self.model[page] = {holder for holder in self.model[page] if holder[0] != worker}
            if not self.model[page]:
                del self.model[page]
        self.shards = {k: v for k, v in self.shards.items() if k[0] != worker}
        for _ in self.index.drop(worker):
            pass

    @rule(domain=st.sampled_from(DOMAINS), numbers=runs)
    def match(self, domain: str, numbers: list[int]) -> None:
        match = self.index.match(domain, packed(numbers))
        expected = {}
        for worker in WORKERS:
            needed = self.shards.get((worker, domain), {0})
            expected[worker] = [self._has(worker, needed, (domain, n)) for n in numbers]
            assert match.present(worker).tolist() == expected[worker]
        for worker in WORKERS:
            for other in WORKERS:
                both = zip(expected[worker], expected[other], strict=True)
                union = np.array([a or b for a, b in both], dtype=bool)
                there = match.present(worker) | match.present(other)
                assert prefix_length(there) == prefix_length(union)

    def _has(self, worker: str, needed: set[int], page: tuple[str, int]) -> bool:
        holders = self.model.get(page, set())
        return all(any((worker, m, shard) in holders for m in MEDIA) for shard in needed)

    @rule()
    def clear_dead(self) -> None:
        for segment in range(len(self.index._used)):
            self.index._clear_dead(segment)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)
        assert self.index.dropped == self.dropped


class SegmentedMachine(IndexMachine):
    """The same in four segments of 32 slots."""

    segment_slots = 32


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=30, stateful_step_count=30)
TestSegmentedIndex = SegmentedMachine.TestCase
TestSegmentedIndex.settings = settings(max_examples=30, stateful_step_count=30)


def many(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(32 * count)


def test_a_full_index_drops_tails_and_counts_them() -> None:
    pages = PrefixIndex(100)
    keys = many(150)
    assert pages.store("w", "GPU", "d", keys) == 50
    assert (len(pages), pages.dropped) == (100, 50)
    assert prefix_length(pages.match("d", keys).present("w")) == 100
    pages.remove("w", "GPU", "d", keys[:320])
    assert pages.store("w", "GPU", "d", keys[3200:]) == 40
    pages.check()


def test_years_of_coming_and_going_do_not_fill_the_table_with_the_dead() -> None:
    pages = PrefixIndex(1000)
    for round_number in range(60):
        keys = many(700, round_number)
        assert pages.store("w", "GPU", "d", keys) == 0
        assert prefix_length(pages.match("d", keys).present("w")) == 700
        assert pages.remove("w", "GPU", "d", keys[16 * 700 :]) == 350
        assert pages.remove("w", "GPU", "d", keys) == 350
    pages.check()
    assert len(pages) == 0


def test_more_than_64_holders_widen_the_table_and_too_many_are_dropped() -> None:
    pages = PrefixIndex(64)
    keys = many(3)
    for number in range(HOLDERS_MAX):
        assert pages.store(f"w{number}", "GPU", "d", keys[: 32 * (1 + number % 3)]) == 0
    assert pages.store("one more", "GPU", "d", keys) == 3
    match = pages.match("d", keys)
    found = [prefix_length(match.present(f"w{number}")) for number in (0, 1, 65, 1001)]
    assert found == [1, 2, 3, 3]
    assert prefix_length(match.present("one more")) == 0
    assert sum(pages.drop("w7")) == 2
    assert pages.store("one more", "GPU", "d", keys) == 0
    assert prefix_length(pages.match("d", keys).present("one more")) == 3


def test_domains_do_not_mix() -> None:
    pages = PrefixIndex(64)
    keys = many(4)
    pages.store("w", "GPU", "one", keys)
    assert prefix_length(pages.match("one", keys).present("w")) == 4
    assert prefix_length(pages.match("two", keys).present("w")) == 0


def test_a_page_takes_34_bytes_when_the_index_is_full() -> None:
    pages = PrefixIndex(1_000_000)
    table = (pages._tags, *pages._words)
    assert sum(array.nbytes for array in table) / 1_000_000 <= 34


def steps_of(work: Iterator[object]) -> list[float]:
    """CPU seconds of each step."""
    found, before = [], time.thread_time()
    for _ in work:
        found.append(time.thread_time() - before)
        before = time.thread_time()
    return [*found, time.thread_time() - before]


def test_no_step_takes_long_however_much_a_worker_holds() -> None:
    pages = PrefixIndex(1_000_000, seed=5)
    chance = np.random.default_rng(1)
    fill = (pages.store("w", "GPU", "d", chance.bytes(32 * 1024)) for _ in range(976))
    assert max(steps_of(fill)) < STEP_S_ANYWHERE
    assert len(pages) == 976 * 1024

    def come_and_go() -> Iterator[None]:
        held: list[bytes] = []
        for _ in range(1_500):
            held.append(chance.bytes(32 * 1024))
            pages.store("v", "GPU", "d", held[-1])
            if len(held) > 20:
                pages.remove("v", "GPU", "d", held.pop(0))
            yield

    assert max(steps_of(come_and_go())) < STEP_S_ANYWHERE
    assert max(steps_of(pages.drop("w"))) < STEP_S_ANYWHERE
    assert max(steps_of(pages.drop("v"))) < STEP_S_ANYWHERE
    assert len(pages) == 0
    pages.check()


def test_keys_that_were_chosen_to_collide_do_not() -> None:
    """Their last bits are the same: without a seed they would all belong to one slot."""
    keys = np.zeros((16_384, 4), dtype="<u8")
    keys[:, 0] = np.arange(16_384, dtype=np.uint64) << np.uint64(40)
    pages = PrefixIndex(1_000_000, seed=0x9E3779B97F4A7C15)

    assert (
        max(steps_of(iter(lambda: pages.store("w", "GPU", "d", keys.tobytes()), 0)))
        < STEP_S_ANYWHERE
    )

    home = np.bincount(pages._home(pages._tags[pages._tags != 0]))
    assert home.max() < 10


def test_a_segment_that_is_full_takes_no_more_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(index, "SEGMENT_SLOTS", 16)
    pages = PrefixIndex(1_000, seed=1)
    every = many(20_000, 3)
    tags = index._tags("d", every)
    first = np.flatnonzero(pages._home(tags) < 16)[:20]
    assert len(first) == 20
    keys = b"".join(every[32 * at : 32 * at + 32] for at in first)

    assert pages.store("w", "GPU", "d", keys) == 20
    for at in range(14):
        assert pages.store("w", "GPU", "d", keys[32 * at : 32 * at + 32]) == 0
    assert pages.store("w", "GPU", "d", keys) == 6
    assert prefix_length(pages.match("d", keys).present("w")) == 14
    assert pages.dropped == 26
    pages.check()


def test_one_worker_cannot_take_all_holders() -> None:
    pages = PrefixIndex(64)
    keys = many(1)
    dropped = [pages.store("w", "GPU", "d", keys, shard) for shard in range(HOLDERS_MAX)]

    assert dropped == [0] * HOLDERS_PER_WORKER_MAX + [1] * (HOLDERS_MAX - HOLDERS_PER_WORKER_MAX)
    assert pages.store("another", "GPU", "d", keys) == 0
    next(pages.drop("w"))
    assert pages.store("w", "GPU", "d", keys) == 1, "what it still has to give back counts"


def test_the_default_table_has_many_segments() -> None:
    assert len(PrefixIndex(1_000_000)._used) * SEGMENT_SLOTS == 1 << 21
