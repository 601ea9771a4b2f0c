"""Goal: bit-equal logits and K/V whatever the chunks, the company and the origin of the prefix."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapters.reference.config import MODELS
from engine_adapters.reference.model import Chunk, Model
from engine_adapters.reference.pool import PagedPool

BLOCKS = 96
PAGE_BLOCKS = 4
models = {name: Model(MODELS[name]) for name in ("tiny", "demo")}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def dirty_pool(name: str, seed: int = 0) -> PagedPool:
    """A pool full of old K/V: what is masked must not matter."""
    pool = PagedPool(MODELS[name], BLOCKS, 16)
    generator = torch.Generator().manual_seed(seed)
    for plane in (*pool.keys, *pool.values):
        plane.normal_(std=10.0, generator=generator)
    return pool


def shuffled_blocks(seed: int) -> list[int]:
    return random.Random(seed).sample(range(BLOCKS), BLOCKS)


def whole(name: str, tokens: list[int]) -> tuple[torch.Tensor, list[tuple[str, str]]]:
    """Logits after ``tokens`` and K/V hashes, computed in one piece, alone."""
    pool = PagedPool(MODELS[name], BLOCKS, 16)
    logits = models[name].forward([Chunk(tokens, 0, range(BLOCKS))], pool)[0]
    return logits, pool.hashes(range(BLOCKS), len(tokens))


def assert_bit_equal(left: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize(
    ("name", "size"),
    [("tiny", 1), ("tiny", 7), ("tiny", 16), ("tiny", 64), ("demo", 16), ("demo", 100)],
)
def test_logits_do_not_depend_on_the_chunk_size(name: str, size: int) -> None:
    tokens = prompt(150 if size > 1 else 70)
    expected, hashes = whole(name, tokens)
    pool, blocks = dirty_pool(name), shuffled_blocks(1)
    for start in range(0, len(tokens), size):
        piece = tokens[start : start + size]
        logits = models[name].forward([Chunk(piece, start, blocks)], pool)[0]
    assert_bit_equal(logits, expected)
    assert pool.hashes(blocks, len(tokens)) == hashes


@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(1, 199), max_size=5, unique=True),
    others=st.lists(st.tuples(st.integers(1, 130), st.booleans()), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_logits_do_not_depend_on_chunks_and_company(
    cuts: list[int], others: list[tuple[int, bool]], seed: int
) -> None:
    tokens = prompt(200)
    expected, hashes = whole("tiny", tokens)
    pool, blocks = dirty_pool("tiny", seed), shuffled_blocks(seed)
    mine, rest = blocks[:13], blocks[13:]
    edges = [0, *sorted(cuts), 200]
    for start, stop in itertools.pairwise(edges):
        chunks = [Chunk(tokens[start:stop], start, mine)]
        for index, (length, before) in enumerate(others):
            # Company computes over whatever K/V lie in its blocks: only its shape matters here.
            other = Chunk(prompt(length, seed), 0, rest[index * 9 : index * 9 + 9])
            chunks.insert(0 if before else len(chunks), other)
        place = next(i for i, chunk in enumerate(chunks) if chunk.blocks is mine)
        logits = models["tiny"].forward(chunks, pool)[place]
    assert_bit_equal(logits, expected)
    assert pool.hashes(mine, 200) == hashes


@pytest.mark.parametrize("name", ["tiny", "demo"])
@pytest.mark.parametrize("company", [1, 5])
def test_decoding_in_company_equals_decoding_alone(name: str, company: int) -> None:
    tokens = prompt(100)
    pool, blocks = dirty_pool(name), shuffled_blocks(2)
    mine = blocks[:8]
    models[name].forward([Chunk(tokens[:90], 0, mine)], pool)
    for position in range(90, 100):
        chunks = [
            Chunk([position % 7], 20 * index + position % 3, blocks[8 + 10 * index :][:10])
            for index in range(company)
        ]
        own = Chunk(tokens[position : position + 1], position, mine)
        place = position % (company + 1)
        chunks.insert(place, own)
        logits = models[name].forward(chunks, pool)[place]
    assert_bit_equal(logits, whole(name, tokens)[0])


@pytest.mark.parametrize("name", ["tiny", "demo"])
@pytest.mark.parametrize("pages", [1, 2])
def test_a_restored_prefix_equals_a_computed_one(name: str, pages: int) -> None:
    tokens = prompt(170)
    expected, hashes = whole(name, tokens)
    source = PagedPool(MODELS[name], BLOCKS, 16)
    models[name].forward([Chunk(tokens, 0, range(BLOCKS))], source)
    pool, blocks = dirty_pool(name), shuffled_blocks(3)
    moved = torch.tensor(blocks[: pages * PAGE_BLOCKS])
    for target, origin in zip(pool.keys + pool.values, source.keys + source.values, strict=True):
        target[:, moved] = origin[:, : pages * PAGE_BLOCKS]
    start = pages * 64
    logits = models[name].forward([Chunk(tokens[start:], start, blocks)], pool)[0]
    assert_bit_equal(logits, expected)
    assert pool.hashes(blocks, len(tokens)) == hashes


def test_another_token_or_position_does_change_the_logits() -> None:
    tokens = prompt(80)
    expected, hashes = whole("tiny", tokens)
    changed = [tokens[0] ^ 1, *tokens[1:]]
    logits, other = whole("tiny", changed)
    assert not torch.equal(logits, expected)
    assert all(a.k != b.k and a.v != b.v for a, b in zip(hashes, other, strict=True))


def test_greedy_output_of_the_random_model_is_varied() -> None:
    for name in models:
        tokens, pool = prompt(20), PagedPool(MODELS[name], BLOCKS, 16)
        chunk = Chunk(list(tokens), 0, range(BLOCKS))
        for _ in range(24):
            logits = models[name].forward([chunk], pool)[0]
            tokens.append(int(logits.argmax()))
            chunk = Chunk(tokens[-1:], len(tokens) - 1, range(BLOCKS))
        assert len(set(tokens[20:])) >= 12
        assert all(token == 10 or 32 <= token < 127 for token in tokens[20:])
