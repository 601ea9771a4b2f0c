"""The mover against the xxhash package and a numpy model, on every implementation there is."""

import ctypes
import itertools
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import mover
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.mover import ISAS, Fallback, Mode, Native, Pieces, Progress, Word

Bytes = npt.NDArray[np.uint8]
WAIT_S = 30.0
SEEDS = (0, 1, 0x9E3779B185EBCA87, 2**64 - 1)


def implementations() -> Iterator[Native | Fallback]:
    yield Fallback()
    library = mover.load(mover.LIBRARY)
    if library is not None:
        for isa in range(library.kv_best_isa() + 1):
            yield Native(library, isa)


@pytest.fixture(params=list(implementations()), ids=lambda each: each.description, autouse=True)
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Native | Fallback:
    chosen: Native | Fallback = request.param
    monkeypatch.setattr(mover, "_chosen", chosen)
    return chosen


def noise(count: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def u64(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def zeros(count: int) -> Bytes:
    """Memory that begins at a multiple of 64, as the fastest stores want it."""
    memory = np.zeros(count + 64, dtype=np.uint8)
    return memory[-address(memory) % 64 :][:count]


def address(array: npt.NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


def expected(page: Bytes, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(page.tobytes(), seed)


class Layout:
    """Random pages and, in another buffer, the shuffled pieces they are made of."""

    def __init__(self, lengths: list[list[int]], segments: int, seed: int, shift: int) -> None:
        """``lengths[p]``: of page p's pieces; ``shift`` bytes put both sides out of alignment."""
        dice = random.Random(seed)
        self.page_bytes = sum(lengths[0])
        self.page_count = len(lengths)
        flat = [length for page in lengths for length in page]
        order = list(range(len(flat)))
        dice.shuffle(order)
        self.offsets = [0] * len(flat)
        at = shift
        for index in order:
            self.offsets[index] = at
            at += flat[index] + dice.choice((0, 64, 128)) * (shift == 0) + (shift > 0)
        self.lengths = flat
        self.pool = zeros(at + 64)
        self.memory = zeros(self.page_count * self.page_bytes + shift + 64)
        start = address(self.memory) + shift
        self.pages = u64(*(start + i * self.page_bytes for i in range(self.page_count)))
        self.view = self.memory[shift : shift + self.page_count * self.page_bytes].reshape(
            self.page_count, self.page_bytes
        )
        self.seeds = u64(*(dice.getrandbits(64) for _ in lengths))
        ends, total = [], 0
        for page in lengths:
            cuts = sorted(dice.randint(0, len(page)) for _ in range(segments - 1))
            ends += [total + cut for cut in [*cuts, len(page)]]
            total += len(page)
        where = u64(*(address(self.pool) + offset for offset in self.offsets))
        self.pieces = Pieces(where, u64(*flat), np.array(ends, dtype=np.int64), segments)

    def spread(self, pages: Bytes) -> Bytes:
        """The pool as a scatter of ``pages`` must leave it (it was zero)."""
        pool, at, flat = np.zeros_like(self.pool), 0, pages.reshape(-1)
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            pool[offset : offset + length] = flat[at : at + length]
            at += length
        return pool

    def digests(self) -> Bytes:
        found = b"".join(map(expected, self.view, self.seeds.tolist()))
        return np.frombuffer(found, dtype=np.uint8).reshape(-1, 16)


def even_layout(
    pages: int = 3, page_bytes: int = 1 << 20, piece: int = 1 << 15, segments: int = 4
) -> Layout:
    layout = Layout([[piece] * (page_bytes // piece)] * pages, 1, seed=1, shift=0)
    each = page_bytes // piece // segments
    ends = np.arange(1, pages * segments + 1, dtype=np.int64) * each
    layout.pieces = layout.pieces._replace(end=ends, segments=segments)
    layout.view[:] = noise(layout.view.size).reshape(layout.view.shape)
    return layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    unit = draw(st.sampled_from((1, 16, 64, 2048)))
    pages = draw(st.integers(1, 4))
    units = draw(st.integers(1, 700 if unit < 2048 else 200))
    lengths = []
    for _ in range(pages):
        inner = draw(st.lists(st.integers(1, units), max_size=12, unique=True))
        cuts = sorted({0, units, *inner})
        lengths.append([(b - a) * unit for a, b in itertools.pairwise(cuts)])
    shift = draw(st.sampled_from((0, 0, 16, 32, 7)))
    segments = draw(st.integers(1, 4))
    return Layout(lengths, segments, draw(st.integers(0, 2**32)), shift)


each_layout = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


# Digests


def test_digests_equal_those_of_the_xxhash_package_at_every_length(
    implementation: Native | Fallback,
) -> None:
    data = noise(4096)
    for length, seed in itertools.product(range(2049), SEEDS):
        shift = length % 5
        digests = np.zeros((1, 16), dtype=np.uint8)
        pages = u64(address(data) + shift)
        job = mover.Job(Mode.DIGEST, length, pages, u64(seed), digests, None, None, None)
        assert implementation.move(job) == 1
        assert digests.tobytes() == expected(data[shift : shift + length], seed), (length, seed)


def test_digests_equal_those_of_the_xxhash_package_at_large_lengths() -> None:
    data = noise(3 << 20)
    dice = random.Random(5)
    edges = [base + d for base in (1 << 18, 1 << 20) for d in (-1, 0, 1, 64, 1024)]
    for length in edges + [dice.randrange(2049, 2 << 20) for _ in range(40)]:
        shift, seed = dice.randrange(64), dice.getrandbits(64)
        found = mover.digest(u64(address(data) + shift), length, u64(seed))
        assert found.tobytes() == expected(data[shift : shift + length], seed), length


def test_each_page_is_digested_under_its_own_seed() -> None:
    page = noise(4096)
    found = mover.digest(u64(*[address(page)] * 3), 4096, u64(1, 2, 1))
    assert found[0].tobytes() == expected(page, 1)
    assert found[1].tobytes() == expected(page, 2)
    assert (found[0] == found[2]).all()


# Copies


@each_layout
@given(layout=layouts())
def test_gather_fills_pages_with_the_pieces_in_order(layout: Layout) -> None:
    pages = noise(layout.view.size).reshape(layout.view.shape)
    layout.pool[:] = layout.spread(pages)
    around = layout.memory.size - layout.view.size
    digests = mover.gather(layout.pages, layout.page_bytes, layout.pieces, layout.seeds)
    assert (layout.view == pages).all()
    assert np.count_nonzero(layout.memory) == np.count_nonzero(pages), f"in the {around} around"
    assert (digests == layout.digests()).all()


@pytest.mark.parametrize("order", ["page", "segment"])
@each_layout
@given(layout=layouts())
def test_scatter_puts_every_byte_where_its_piece_is_and_none_elsewhere(
    layout: Layout, order: mover.Literal["page", "segment"]
) -> None:
    layout.view[:] = noise(layout.view.size).reshape(layout.view.shape)
    progress = Progress()
    ok = mover.scatter(
        layout.pages,
        layout.page_bytes,
        layout.digests(),
        layout.seeds,
        layout.pieces,
        progress,
        order,
    )
    assert ok.all()
    assert (layout.pool == layout.spread(layout.view)).all()
    assert (progress.done, progress.good_pages) == (layout.pieces.segments, layout.page_count)


@pytest.mark.parametrize("piece", [1 << 20, 2048, 1 << 16])
def test_large_jobs_past_the_cache_keep_every_byte(piece: int) -> None:
    layout = even_layout(pages=5, piece=piece, segments=1)
    pages = layout.view.copy()
    ok = mover.scatter(
        layout.pages, layout.page_bytes, layout.digests(), layout.seeds, layout.pieces
    )
    assert ok.all()
    assert (layout.pool == layout.spread(pages)).all()
    layout.memory[:] = 0
    digests = mover.gather(layout.pages, layout.page_bytes, layout.pieces, layout.seeds)
    assert (layout.view == pages).all()
    assert (digests == layout.digests()).all()


def test_pages_of_one_piece_need_no_list() -> None:
    source, target = noise(3 * 4096).reshape(3, 4096), np.zeros((3, 4096), dtype=np.uint8)
    pieces = Pieces.contiguous(u64(*map(address, source)), 4096)
    digests = mover.gather(u64(*map(address, target)), 4096, pieces, u64(1, 2, 3))
    assert (target == source).all()
    assert digests[2].tobytes() == expected(source[2], 3)


def test_a_job_without_pages_ends_at_once() -> None:
    progress, none = Progress(), u64()
    pieces = Pieces(none, none, np.zeros(0, dtype=np.int64), 7)
    assert mover.gather(none, 64, pieces, none).shape == (0, 16)
    ok = mover.scatter(none, 64, np.zeros((0, 16), np.uint8), none, pieces, progress, "segment")
    assert ok.shape == (0,)
    assert progress.wait(7, WAIT_S)


# Wrong bytes


@pytest.mark.parametrize("byte", [0, 12_345, (1 << 18) + 1, (1 << 20) - 65, (1 << 20) - 1])
@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_flipped_bit_fails_its_page_and_no_other(
    byte: int, order: mover.Literal["page", "segment"]
) -> None:
    layout = even_layout()
    digests, whole = layout.digests(), layout.view.copy()
    layout.view[1, byte] ^= 4
    progress = Progress()
    ok = mover.scatter(
        layout.pages, layout.page_bytes, digests, layout.seeds, layout.pieces, progress, order
    )
    assert ok.tolist() == [True, False, True]
    assert progress.good_pages == 1
    assert progress.done == layout.pieces.segments
    expected_pool = layout.spread(whole)
    per_page = len(layout.lengths) // layout.page_count
    for index, (offset, length) in enumerate(zip(layout.offsets, layout.lengths, strict=True)):
        part = slice(offset, offset + length)
        if index // per_page != 1:
            assert (layout.pool[part] == expected_pool[part]).all()
        elif order == "segment":
            assert not layout.pool[part].any(), "a page that failed was copied"


def test_bytes_of_another_seed_do_not_verify() -> None:
    layout = even_layout(pages=1)
    ok = mover.scatter(
        layout.pages, layout.page_bytes, layout.digests(), layout.seeds + u64(1), layout.pieces
    )
    assert not ok.any()


# Arguments


WRONG: dict[str, Callable[[Pieces], Pieces]] = {
    "too short": lambda p: p._replace(length=p.length - u64(64)),
    "too long": lambda p: p._replace(length=p.length + u64(64)),
    "far too long": lambda p: p._replace(length=np.append(p.length[:-1], u64(2**64 - 64))),
    "nowhere": lambda p: p._replace(address=p.address * u64(0)),
    "empty": lambda p: p._replace(length=p.length * u64(0)),
    "backwards": lambda p: p._replace(end=p.end[::-1]),
    "one too many": lambda p: p._replace(end=np.append(p.end[:-1], p.end[-1] + 1)),
    "before the first": lambda p: p._replace(end=np.append(np.int64(-1), p.end[1:])),
    "too few segments": lambda p: p._replace(end=p.end[:-1]),
    "too few addresses": lambda p: p._replace(address=p.address[:-1]),
    "no segments": lambda p: p._replace(segments=0),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("mode", [Mode.GATHER, Mode.SCATTER, Mode.SCATTER_SEGMENTS])
def test_pieces_that_do_not_fill_their_pages_are_refused_before_a_byte_moves(
    wrong: str, mode: Mode
) -> None:
    layout = even_layout()
    layout.pool[:] = noise(layout.pool.size, seed=2)
    before = layout.pool.copy(), layout.memory.copy()
    pieces, digests = WRONG[wrong](layout.pieces), layout.digests()
    pages, seeds, size = layout.pages, layout.seeds, layout.page_bytes
    with pytest.raises(InvalidArgument, match="pieces|end"):
        if mode is Mode.GATHER:
            mover.gather(pages, size, pieces, seeds)
        else:
            order: mover.Literal["page", "segment"] = "page" if mode is Mode.SCATTER else "segment"
            mover.scatter(pages, size, digests, seeds, pieces, None, order)
    assert (layout.pool == before[0]).all()
    assert (layout.memory == before[1]).all()


def test_arguments_that_do_not_fit_each_other_are_named() -> None:
    layout = even_layout()
    pages, size, seeds, pieces = layout.pages, layout.page_bytes, layout.seeds, layout.pieces
    with pytest.raises(InvalidArgument, match="seeds"):
        mover.gather(pages, size, pieces, seeds[:-1])
    with pytest.raises(InvalidArgument, match="pages"):
        mover.digest(pages.reshape(1, -1), size, seeds[:1])
    with pytest.raises(InvalidArgument, match="digests"):
        mover.scatter(pages, size, layout.digests()[:, :8], seeds, pieces)
    with pytest.raises(InvalidArgument, match="page_bytes"):
        mover.digest(pages, 0, seeds)
