"""The mover against the xxhash package and a numpy model, on every implementation there is."""

import itertools
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvstore import mover
from kvstore.mover import Fallback, Mode, Native, Order, Pieces, Progress, binary
from kvstore.protocol.errors import InvalidArgument, TierUnavailable
from tests.mover.layouts import Layout, address, even_layout, expected, layouts, noise, u64

SEEDS = (0, 1, 0x9E3779B185EBCA87, 2**64 - 1)

pytestmark = pytest.mark.usefixtures("implementation")
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
        job = mover.MoverJob(Mode.DIGEST, length, pages, u64(seed), digests, None, None, None)
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
    digests = mover.gather(layout.pages, layout.page_bytes, layout.pieces, layout.seeds)
    assert (layout.view == pages).all()
    assert np.count_nonzero(layout.memory) == np.count_nonzero(pages), "bytes around"
    assert (digests == layout.digests()).all()


@pytest.mark.parametrize("order", ["page", "segment"])
@each_layout
@given(layout=layouts())
def test_scatter_puts_every_byte_where_its_piece_is_and_none_elsewhere(
    layout: Layout, order: Order
) -> None:
    layout.view[:] = noise(layout.view.size).reshape(layout.view.shape)
    progress = Progress()
    ok = layout.scatter(progress, order)
    assert ok.all()
    assert (layout.pool == layout.spread(layout.view)).all()
    counted = (layout.pieces.segments, layout.page_count) if order == "segment" else (0, 0)
    assert (progress.done, progress.good_pages) == counted


@pytest.mark.parametrize("piece", [1 << 20, 2048, 1 << 16])
@pytest.mark.parametrize("shift", [0, 32, 16, 7])
def test_large_jobs_past_the_cache_keep_every_byte(piece: int, shift: int) -> None:
    layout = even_layout(pages=2, piece=piece, segments=1, shift=shift)
    pages = layout.view.copy()
    assert layout.scatter().all()
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
    none = u64()
    pieces = Pieces(none, none, np.zeros(0, dtype=np.int64), 7)
    assert mover.gather(none, 64, pieces, none).shape == (0, 16)
    ok = mover.scatter(none, 64, np.zeros((0, 16), np.uint8), none, pieces, None, "segment")
    assert ok.shape == (0,)


# Wrong bytes


@pytest.mark.parametrize("byte", [0, 12_345, (1 << 18) + 1, (1 << 20) - 65, (1 << 20) - 1])
@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_flipped_bit_fails_its_page_and_no_other(byte: int, order: Order) -> None:
    layout = even_layout()
    digests, whole = layout.digests(), layout.view.copy()
    layout.view[1, byte] ^= 4
    progress = Progress()
    ok = mover.scatter(
        layout.pages, layout.page_bytes, digests, layout.seeds, layout.pieces, progress, order
    )
    assert ok.tolist() == [True, False, True]
    if order == "segment":
        assert (progress.done, progress.good_pages) == (layout.pieces.segments, 1)
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
    digests, layout.seeds = layout.digests(), layout.seeds + u64(1)
    args = (layout.pages, layout.page_bytes, digests, layout.seeds, layout.pieces)
    assert not mover.scatter(*args).any()


# Arguments


WRONG: dict[str, Callable[[Pieces], Pieces]] = {
    "too short": lambda p: p._replace(length=p.length - u64(64)),
    "too long": lambda p: p._replace(length=p.length + u64(64)),
    "far too long": lambda p: p._replace(length=np.append(p.length[:-1], u64(2**64 - 64))),
    "wrapped around": lambda p: p._replace(length=p.length + u64(2**63, 2**63, *[0] * 94)),
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
    calls: dict[Mode, Callable[[], object]] = {
        Mode.GATHER: lambda: mover.gather(pages, size, pieces, seeds),
        Mode.SCATTER: lambda: mover.scatter(pages, size, digests, seeds, pieces),
        Mode.SCATTER_SEGMENTS: lambda: mover.scatter(
            pages, size, digests, seeds, pieces, None, "segment"
        ),
    }
    with pytest.raises(InvalidArgument, match=r"pieces|end"):
        calls[mode]()
    assert (layout.pool == before[0]).all()
    assert (layout.memory == before[1]).all()


def test_arguments_that_do_not_fit_each_other_are_named() -> None:
    layout = even_layout()
    pages, size, seeds, pieces = layout.pages, layout.page_bytes, layout.seeds, layout.pieces
    with pytest.raises(InvalidArgument, match="seeds"):
        mover.gather(pages, size, pieces, seeds[:-1])
    with pytest.raises(InvalidArgument, match="pages"):
        mover.digest(pages.reshape(1, -1), size, seeds)
    with pytest.raises(InvalidArgument, match="digests"):
        mover.scatter(pages, size, layout.digests()[:, :8], seeds, pieces)
    with pytest.raises(InvalidArgument, match="page_bytes"):
        mover.digest(pages, 0, seeds)


def test_parts_of_a_job_keep_their_pieces() -> None:
    layout = even_layout(pages=4, segments=2)
    digests, pieces = layout.digests(), layout.pieces
    parts = [(np.arange(0, 1), pieces.pages(0, 1)), (np.arange(1, 3), pieces.pages(1, 3))]
    for chosen, part in [*parts, (np.array([3]), pieces.choose(np.array([3])))]:
        args = (layout.pages[chosen], layout.page_bytes, digests[chosen], layout.seeds[chosen])
        assert mover.scatter(*args, part).all()
    assert (layout.pool == layout.spread(layout.view)).all()


# Memory


@pytest.mark.parametrize("write", [False, True])
def test_populate_makes_memory_resident_and_keeps_its_bytes(write: bool) -> None:
    size, page = 1 << 20, os.sysconf("SC_PAGE_SIZE")
    with mmap.mmap(-1, size) as memory:
        view = np.frombuffer(memory, dtype=np.uint8)
        view[5 * page + 3] = 77
        start = address(view)
        mover.populate(start + 100, size - 100, write)
        mover.populate(start, 0, write)
        with Path("/proc/self/pagemap").open("rb") as table:
            table.seek(start // page * 8)
            entries = np.frombuffer(table.read(size // page * 8), dtype=np.uint64)
        assert not write or (entries >> u64(63)).all(), "a page is not resident"
        assert view[5 * page + 3] == 77
        assert np.count_nonzero(view) == 1
        del view


def test_populate_of_memory_that_is_not_there_is_an_error(
    implementation: Native | Fallback,
) -> None:
    with mmap.mmap(-1, 1 << 16) as memory:
        start = address(np.frombuffer(memory, dtype=np.uint8))
    if isinstance(implementation, Native):  # the fallback touches memory; it cannot ask
        with pytest.raises(TierUnavailable):
            mover.populate(start, 1 << 16, write=True)


# Which one runs


def test_a_missing_library_and_one_of_another_version_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert binary.load(tmp_path / "nothing.so") is None
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert binary.load(tmp_path / "broken.so") is None
    monkeypatch.setattr(binary, "VERSION", -1)
    assert binary.load(binary.LIBRARY) is None


def test_it_says_what_runs() -> None:
    built = binary.load(binary.LIBRARY) is not None
    assert mover.is_native is built
    assert mover.description.startswith("native " if built else "fallback numpy+xxhash")
