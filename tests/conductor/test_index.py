"""The prefix index against a dictionary, and at its bounds."""

import hashlib

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.index import HOLDERS_MAX, PrefixIndex, prefix_length

WORKERS = ["engine/a", "engine/b", "node/n"]
MEDIA = ["GPU", "CPU"]
DOMAINS = ["d1", "d2"]
ENTRIES_MAX = 40


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def packed(numbers: list[int]) -> bytes:
    return b"".join(map(key, numbers))


runs = st.lists(st.integers(0, 59), max_size=12)
shards = st.sampled_from([0, 0, 0, 1])


class IndexMachine(RuleBasedStateMachine):
    """A dictionary says who holds what; the table must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(ENTRIES_MAX)
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
        assert self.index.drop(worker) == held

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
                assert match.prefix(worker, other) == prefix_length(union)

    def _has(self, worker: str, needed: set[int], page: tuple[str, int]) -> bool:
        holders = self.model.get(page, set())
        return all(any((worker, m, shard) in holders for m in MEDIA) for shard in needed)

    @rule()
    def clear_dead(self) -> None:
        self.index._clear_dead()

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)
        assert self.index.dropped == self.dropped


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=30, stateful_step_count=30)


def many(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(32 * count)


def test_a_full_index_drops_tails_and_counts_them() -> None:
    index = PrefixIndex(100)
    keys = many(150)
    assert index.store("w", "GPU", "d", keys) == 50
    assert (len(index), index.dropped) == (100, 50)
    assert index.match("d", keys).prefix("w") == 100
    index.remove("w", "GPU", "d", keys[:320])
    assert index.store("w", "GPU", "d", keys[3200:]) == 40
    index.check()


def test_years_of_coming_and_going_do_not_fill_the_table_with_the_dead() -> None:
    index = PrefixIndex(1000)
    for round_number in range(60):
        keys = many(700, round_number)
        assert index.store("w", "GPU", "d", keys) == 0
        assert index.match("d", keys).prefix("w") == 700
        assert index.remove("w", "GPU", "d", keys[16 * 700 :]) == 350
        assert index.remove("w", "GPU", "d", keys) == 350
    index.check()
    assert len(index) == 0


def test_more_than_64_holders_widen_the_table_and_too_many_are_dropped() -> None:
    index = PrefixIndex(64)
    keys = many(3)
    for number in range(HOLDERS_MAX):
        assert index.store(f"w{number}", "GPU", "d", keys[: 32 * (1 + number % 3)]) == 0
    assert index.store("one more", "GPU", "d", keys) == 3
    match = index.match("d", keys)
    assert [match.prefix(f"w{number}") for number in (0, 1, 65, 1001)] == [1, 2, 3, 3]
    assert match.prefix("one more") == 0
    index.drop("w7")
    assert index.store("one more", "GPU", "d", keys) == 0
    assert index.match("d", keys).prefix("one more") == 3


def test_domains_do_not_mix() -> None:
    index = PrefixIndex(64)
    keys = many(4)
    index.store("w", "GPU", "one", keys)
    assert index.match("one", keys).prefix("w") == 4
    assert index.match("two", keys).prefix("w") == 0


def test_a_page_takes_34_bytes_when_the_index_is_full() -> None:
    index = PrefixIndex(1_000_000)
    assert index.table_bytes / 1_000_000 <= 34
