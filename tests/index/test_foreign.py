"""Engines' own block hashes mapped to our prefix keys, for block sizes that fit and that do not."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index import foreign
from kvstore.index.foreign import ForeignBlocks
from kvstore.page import page_keys

PAGE = 64
BLOCKS_MAX = 1000


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + i * 31) % 50_000 for i in range(count)]


def hashes_of(count: int, base: int = 0) -> list[int]:
    return [base + 2**63 + i for i in range(count)]


def keys_of(tokens: list[int]) -> list[bytes]:
    return [bytes(key) for key in page_keys(tokens, PAGE)]


def keys_from(pieces: Iterable[list[bytes]]) -> list[bytes]:
    return [key for piece in pieces for key in piece]


@pytest.mark.parametrize("size", [1, 16, 32, 48, 64, 96, 128, 256])
def test_all_blocks_in_one_event_are_all_full_pages(size: int) -> None:
    tokens = tokens_of(768)
    blocks = ForeignBlocks(PAGE, BLOCKS_MAX)
    stored = keys_from(blocks.stored("GPU", hashes_of(768 // size), None, tokens, size))
    assert stored == keys_of(tokens)
    blocks.check()


@pytest.mark.parametrize("size", [16, 32, 64])
def test_blocks_one_at_a_time_complete_a_page_with_their_last(size: int) -> None:
    tokens = tokens_of(256)
    blocks = ForeignBlocks(PAGE, BLOCKS_MAX)
    hashes: list[int | None] = [None, *hashes_of(256 // size)]
    found = []
    for number, (parent, name) in enumerate(itertools.pairwise(hashes)):
        assert name is not None
        ids = tokens[number * size : (number + 1) * size]
        new = keys_from(blocks.stored("GPU", [name], parent, ids, size))
        assert len(new) == ((number + 1) * size % PAGE == 0)
        found += new
    assert found == keys_of(tokens)


def test_hashes_may_be_bytes_and_chains_may_branch() -> None:
    head, left, right = tokens_of(64), tokens_of(64, 1), tokens_of(64, 2)
    blocks = ForeignBlocks(PAGE, BLOCKS_MAX)
    keys_from(blocks.stored("GPU", [b"h" * 32, b"i" * 32], None, head, 32))
    to_left = keys_from(blocks.stored("GPU", [b"l" * 32, b"m" * 32], b"i" * 32, left, 32))
    to_right = keys_from(blocks.stored("GPU", [b"r" * 32, b"s" * 32], b"i" * 32, right, 32))
    assert to_left == keys_of(head + left)[1:]
    assert to_right == keys_of(head + right)[1:]


def test_an_unknown_parent_missing_tokens_and_no_room_are_counted_not_guessed() -> None:
    blocks = ForeignBlocks(PAGE, 2)
    assert keys_from(blocks.stored("GPU", [1, 2], 99, tokens_of(128), 64)) == []
    assert blocks.unmapped == 2
    assert keys_from(blocks.stored("GPU", [1], None, [], 64)) == []
    assert keys_from(blocks.stored("GPU", [1], None, tokens_of(63), 64)) == []
    assert keys_from(blocks.stored("GPU", [1], None, [*tokens_of(63), -1], 64)) == []
    assert keys_from(blocks.stored("GPU", [1], None, [*tokens_of(63), 2**32], 64)) == []
    assert blocks.unmapped == 6
    assert keys_from(blocks.stored("GPU", [1, 2, 3], None, tokens_of(192), 64)) == keys_of(
        tokens_of(128)
    )
    assert (blocks.unmapped, len(blocks)) == (7, 2)
    blocks.check()


def test_a_block_known_from_one_medium_needs_no_tokens_in_another() -> None:
    tokens = tokens_of(128)
    blocks = ForeignBlocks(PAGE, BLOCKS_MAX)
    keys_from(blocks.stored("GPU", [1, 2, 3, 4], None, tokens, 32))
    assert keys_from(blocks.stored("CPU", [1], None, [], 32)) == []
    assert keys_from(blocks.stored("CPU", [2], 1, [], 32)) == keys_of(tokens)[:1]
    assert set(keys_from(blocks.removed("GPU", [1]))) >= set(keys_of(tokens)[:1])
    assert keys_from(blocks.removed("GPU", [1])) == []
    assert len(blocks) == 4  # it is still in CPU memory


class Engine:
    """What an engine with its own hashes has, page by page."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.tokens = tokens_of(size * count)
        self.keys = keys_of(self.tokens)
        self.present: set[int] = set()

    def whole(self) -> set[bytes]:
        return {
            key
            for page, key in enumerate(self.keys)
            if all(
                block in self.present
                for block in range(
                    page * PAGE // self.size, ((page + 1) * PAGE - 1) // self.size + 1
                )
            )
        }


@settings(max_examples=100)
@given(
    size=st.sampled_from([16, 32, 48, 64, 128]),
    at_first=st.integers(0, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 11)), max_size=60),
)
def test_whatever_comes_and_goes_the_map_never_claims_a_page_that_is_not_whole(
    size: int, at_first: int, steps: list[tuple[bool, int]]
) -> None:
    engine = Engine(size, 12)
    blocks = ForeignBlocks(PAGE, BLOCKS_MAX)
    claimed: set[bytes] = set()
    leaf_first = True
    for store, number in [*((True, n) for n in range(at_first)), *steps]:
        if store and (number == 0 or number - 1 in engine.present):
            ids = engine.tokens[number * size : (number + 1) * size]
            parent = number - 1 if number else None
            claimed |= set(keys_from(blocks.stored("GPU", [number], parent, ids, size)))
            engine.present.add(number)
        elif not store and number in engine.present:
            leaf_first &= max(engine.present) == number
            claimed -= set(keys_from(blocks.removed("GPU", [number])))
            engine.present.discard(number)
        blocks.check()
        assert claimed <= engine.whole()
        if leaf_first:
            assert claimed == engine.whole()


def test_pages_that_have_gone_leave_nothing_with_the_blocks_they_shared() -> None:
    """A prompt that ends in the middle of a page, and all the conversations that go on from it."""
    blocks = ForeignBlocks(PAGE, BLOCKS_MAX)
    keys_from(blocks.stored("GPU", [1, 2, 3], None, tokens_of(48), 16))
    for turn in range(200):
        name = 100 + turn
        assert len(keys_from(blocks.stored("GPU", [name], 3, tokens_of(16, turn + 1), 16))) == 1
        assert len(keys_from(blocks.removed("GPU", [name]))) == 1
    assert [len(block.part_of) for block in blocks._blocks.values()] == [0, 0, 0]
    assert (blocks._parts, len(blocks._pages)) == (0, 0)
    blocks.check()


def test_what_blocks_remember_of_unfinished_pages_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(foreign, "TAIL_BYTES_MAX", 10_000)
    blocks = ForeignBlocks(4_096, BLOCKS_MAX)
    keys_from(blocks.stored("GPU", hashes_of(1_000), None, tokens_of(1_000), 1))
    assert 30 < len(blocks) < 100
    assert blocks.unmapped == 1_000 - len(blocks)
    blocks.check()


def test_pages_that_hang_on_a_block_are_bounded() -> None:
    blocks = ForeignBlocks(PAGE, 100)
    keys_from(blocks.stored("GPU", hashes_of(63), None, tokens_of(63), 1))
    for turn in range(30):
        keys_from(blocks.stored("GPU", [turn], hashes_of(63)[-1], [turn], 1))
    assert blocks._parts <= foreign.PARTS_PER_BLOCK * 100 + 63
    assert blocks.unmapped > 0
    blocks.check()


def test_many_pages_on_one_block_come_in_pieces() -> None:
    blocks = ForeignBlocks(PAGE, 10_000)
    keys_from(blocks.stored("GPU", [1], None, tokens_of(32), 32))
    for turn in range(3_000):
        keys_from(blocks.stored("GPU", [100 + turn], 1, tokens_of(32, turn + 1), 32))
    pieces = list(blocks.stored("CPU", [1], None, [], 32))
    assert len(pieces) > 3
    assert keys_from(pieces) == [], "the other halves are not in this medium"
    again = list(blocks.stored("GPU", [1], None, [], 32))
    assert len(keys_from(again)) == 3_000
    gone = list(blocks.removed("GPU", [1]))
    assert max(map(len, gone)) <= 2_048 < len(keys_from(gone)) == 3_000
