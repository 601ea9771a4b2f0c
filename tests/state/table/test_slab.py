"""Goal: a slab never shows a page that was not committed there, nor hands out a slot in use."""

from random import Random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity
from kvstore.state.table import slab
from kvstore.state.table.slab import Held, PageSet, Reservation, SlabIndex

PAGE = 4096


def page_set(model: str = "m", heads: int = 1, page_bytes: int = PAGE) -> PageSet:
    identity = SpaceIdentity(model=model, kv_dtype="uint8", page_tokens=1)
    layout = CanonicalLayout(page_bytes // 2)
    return PageSet(identity, ShardSpec(layout=layout, layers=(0, 1), heads=(heads - 1, heads)))


A, OTHER_SHARD, OTHER_SPACE, BIG = (
    page_set(),
    page_set(heads=2),
    page_set("n"),
    page_set("b", 1, 2 * PAGE),
)
SETS = (A, OTHER_SHARD, OTHER_SPACE, BIG)


def chain(path: str, start: int = 0) -> PrefixKeys:
    """The keys of a path of letters, each standing for the page of all letters up to it."""
    packed = b"".join(path[:end].encode().ljust(32, b".") for end in range(1, len(path) + 1))
    return PrefixKeys(packed)[start:]


def digests(pages: PageSet, keys: PrefixKeys, version: int = 0) -> bytes:
    """What a page's digest would be; tells sets, keys and versions apart."""
    return b"".join(
        bytes([SETS.index(pages), version]) + bytes(key).rstrip(b".").ljust(14, b".")
        for key in keys
    )


def promote(index: SlabIndex, path: str, pages: PageSet = A) -> int:
    """Promote a whole path; how many pages came in."""
    keys = chain(path)
    taken = index.reserve(pages, keys, digests(pages, keys))
    if taken is None:
        return 0
    index.commit(taken, len(taken.slots))
    return len(taken.slots)


def test_pages_are_found_once_they_are_committed_and_only_under_their_own_name() -> None:
    index = SlabIndex(16 * PAGE, 1)
    keys = chain("abc")
    taken = index.reserve(A, keys, digests(A, keys))
    assert taken is not None
    assert (taken.first, len(taken.slots), index.run(A, keys.packed)) == (0, 3, 0)
    index.commit(taken, 2)
    assert index.run(A, keys.packed) == 2
    assert [index.run(other, keys.packed) for other in SETS[1:]] == [0, 0, 0]
    held = index.pin(A, keys.packed)
    assert held.digests == digests(A, keys[:2])
    index.unpin(held)
    assert index.stats()["pages_failed"] == 1
    assert index.stats()["writing_bytes"] == 0


def test_a_page_without_its_predecessor_is_found_by_who_asks_from_there() -> None:
    index = SlabIndex(16 * PAGE, 1)
    tail = chain("abcd", 2)
    taken = index.reserve(A, tail, digests(A, tail))
    assert taken is not None
    index.commit(taken, 2)
    assert index.run(A, tail.packed) == 2
    assert index.run(A, chain("abcd").packed) == 0
    assert promote(index, "abcd") == 2, "the two that were missing"
    assert index.run(A, chain("abcd").packed) == 4
    index.check()


def test_a_full_slab_takes_a_page_at_its_second_reading_and_lets_the_oldest_leaf_go() -> None:
    index = SlabIndex(3 * PAGE, 1)
    assert promote(index, "ab") == 2
    assert promote(index, "x") == 1
    index.unpin(index.pin(A, chain("ab").packed))
    assert promote(index, "y") == 0, "it was not read before"
    assert promote(index, "y") == 1
    assert [index.run(A, chain(path).packed) for path in ("ab", "x", "y")] == [2, 0, 1]
    assert promote(index, "z") + promote(index, "z") == 1
    assert index.run(A, chain("ab").packed) == 1, "a leaf goes before what it follows"
    index.check()


def test_keys_read_once_are_forgotten_in_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "SEEN_MAX", 2)
    index = SlabIndex(PAGE, 1)
    promote(index, "a")
    for path in ("x", "y", "z"):
        assert promote(index, path) == 0
    assert promote(index, "x") == 0, "two others were read since"
    index.check()


def test_a_page_in_use_keeps_its_slot_whatever_happens_to_the_page() -> None:
    index = SlabIndex(2 * PAGE, 1)
    promote(index, "a")
    held = index.pin(A, chain("a").packed)
    assert index.forget(A, chain("a").packed) == 1
    assert index.run(A, chain("a").packed) == 0
    assert promote(index, "bc") == 1, "only one slot is free"
    assert index.pin(A, chain("b").packed).slots != held.slots
    index.unpin(held)
    assert promote(index, "bc") == 1
    index.check()


def test_a_page_forgotten_while_it_is_written_never_becomes_ready() -> None:
    index = SlabIndex(PAGE, 1)
    keys = chain("a")
    taken = index.reserve(A, keys, digests(A, keys))
    assert taken is not None
    assert index.forget(A, keys.packed) == 1
    assert promote(index, "b") + promote(index, "b") == 0, "its slot is still being written"
    index.check()
    index.commit(taken, 1)
    assert index.run(A, keys.packed) == 0
    assert promote(index, "b") == 1
    index.check()


def test_a_page_that_is_read_is_not_evicted() -> None:
    index = SlabIndex(PAGE, 1)
    promote(index, "a")
    held = index.pin(A, chain("a").packed)
    assert promote(index, "b") + promote(index, "b") == 0
    assert index.run(A, chain("a").packed) == 1
    index.unpin(held)
    assert promote(index, "b") == 1


def test_every_field_of_space_and_shard_tells_sets_apart() -> None:
    spaces = [A.identity] + [
        msgspec.structs.replace(A.identity, **change)
        for change in (
            {"tenant": "t"}, {"model": "n"}, {"revision": "2"}, {"scope": "s"},
            {"page_tokens": 2}, {"kv_dtype": "float8_e4m3"},
        )
    ]  # fmt: skip
    shards = [A.spec] + [
        msgspec.structs.replace(A.spec, **change)
        for change in (
            {"layers": (1, 2)}, {"heads": (1, 2)}, {"group": "g"}, {"window_pages": 1},
            {"layout": CanonicalLayout(8)},
        )
    ]  # fmt: skip
    names = {PageSet(space, shard).name for space in spaces for shard in shards}
    assert len(names) == len(spaces) * len(shards)


def test_a_page_for_which_others_must_go_comes_in_at_once_if_it_is_asked_for() -> None:
    index = SlabIndex(PAGE, 1)
    promote(index, "a")
    keys = chain("b")
    taken = index.reserve(A, keys, digests(A, keys), always=True)
    assert taken is not None
    index.commit(taken, 1)
    assert index.run(A, keys.packed) == 1


def test_an_extent_of_pages_nobody_reads_serves_another_size() -> None:
    index = SlabIndex(4 * PAGE, 1)
    promote(index, "abcd")
    assert promote(index, "x", BIG) == 0
    held = index.pin(A, chain("abcd").packed)
    assert promote(index, "x", BIG) == 0, "its slots are being read"
    index.unpin(held)
    assert promote(index, "x", BIG) == 1
    assert index.run(A, chain("abcd").packed) == 0
    index.check()


def test_a_page_larger_than_an_extent_stays_out() -> None:
    index = SlabIndex(PAGE, 4)
    assert promote(index, "x", BIG) + promote(index, "x", BIG) == 0
    assert index.stats()["pages_refused"] == 2
    index.check()


class SlabMachine(RuleBasedStateMachine):
    """A slab beside a plain model: name → digest of what was committed and not forgotten since."""

    @initialize(extents=st.integers(1, 3))
    def start(self, extents: int) -> None:
        self.index = SlabIndex(4 * PAGE, extents)
        self.committed: dict[tuple[int, bytes], bytes] = {}
        self.version = 0
        self.writers: list[tuple[Reservation, dict[tuple[int, bytes], bytes]]] = []
        self.readers: list[tuple[int, Held, bytes]] = []

    def _ask(self, chance: Random) -> tuple[int, PrefixKeys]:
        path = "".join(chance.choices("ab", k=chance.randint(1, 5)))
        return chance.randrange(4), chain(path, chance.randrange(2))

    @rule(chance=st.integers(0, 2**32 - 1).map(Random))
    def reserve(self, chance: Random) -> None:
        number, keys = self._ask(chance)
        self.version += 1
        taken = self.index.reserve(
            SETS[number], keys, digests(SETS[number], keys, self.version % 256)
        )
        if taken is not None:
            busy = {slot for one, _ in self.writers for slot in one.slots}
            busy |= {slot for _, held, _ in self.readers for slot in held.slots}
            assert not busy & set(taken.slots), "a slot in use was handed out"
            written = keys[taken.first : taken.first + len(taken.slots)]
            parts = [taken.digests[at : at + 16] for at in range(0, len(taken.digests), 16)]
            names = [(number, bytes(key)) for key in written]
            assert not any(name in one for name in names for _, one in self.writers)
            self.writers.append((taken, dict(zip(names, parts, strict=True))))

    @rule(chance=st.integers(0, 2**32 - 1).map(Random))
    def commit(self, chance: Random) -> None:
        if self.writers:
            taken, names = self.writers.pop(chance.randrange(len(self.writers)))
            good = chance.choice([0, len(taken.slots) // 2, len(taken.slots), len(taken.slots)])
            self.index.commit(taken, good)
            whole = {taken.digests[at * 16 : at * 16 + 16] for at in range(good)}
            self.committed |= {name: one for name, one in names.items() if one in whole}

    @rule(chance=st.integers(0, 2**32 - 1).map(Random))
    def read(self, chance: Random) -> None:
        number, keys = self._ask(chance)
        run = self.index.run(SETS[number], keys.packed)
        held = self.index.pin(SETS[number], keys.packed)
        assert len(held.slots) == run
        for at, key in enumerate(keys[:run]):
            digest = held.digests[at * 16 : at * 16 + 16]
            assert digest == self.committed[number, bytes(key)]
        self.readers.append((number, held, held.digests))

    @rule(chance=st.integers(0, 2**32 - 1).map(Random))
    def read_on(self, chance: Random) -> None:
        if self.readers:
            _, held, before = self.readers.pop(chance.randrange(len(self.readers)))
            assert held.digests == before
            self.index.unpin(held)

    @rule(chance=st.integers(0, 2**32 - 1).map(Random))
    def forget(self, chance: Random) -> None:
        number, keys = self._ask(chance)
        self.index.forget(SETS[number], keys.packed)
        assert self.index.run(SETS[number], keys.packed) == 0
        for key in keys:
            self.committed.pop((number, bytes(key)), None)
            for _, names in self.writers:
                names.pop((number, bytes(key)), None)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        stats = self.index.stats()
        assert stats["ready_bytes"] + stats["writing_bytes"] <= stats["capacity_bytes"]
        writing = [slot for one, _ in self.writers for slot in one.slots]
        assert len(set(writing)) == len(writing), "two writers of one slot"
        reading = {slot for _, held, _ in self.readers for slot in held.slots}
        assert not reading & set(writing), "a slot is read while it is written"

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for taken, _ in self.writers:
            self.index.commit(taken, 0)
        for _, held, _ in self.readers:
            self.index.unpin(held)
        self.index.check()
        stats = self.index.stats()
        assert (stats["writing_bytes"], stats["in_use_bytes"]) == (0, 0), "a slot was lost"


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
