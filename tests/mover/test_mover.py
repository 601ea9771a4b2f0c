"""The mover against the xxhash package and a numpy model, on every implementation there is."""

import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import mover
from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.mover import Fallback, Mode, Native, Order, Pieces, Progress, Word, native

Bytes = npt.NDArray[np.uint8]
WAIT_S = 20.0
SEEDS = (0, 1, 0x9E3779B185EBCA87, 2**64 - 1)


def implementations() -> Iterator[Native | Fallback]:
    yield Fallback()
    library = native.load(native.LIBRARY)
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
            at += flat[index] + dice.choice((0, 64, 128)) + shift % 16
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

    def scatter(
        self, progress: Progress | None = None, order: Order = "page"
    ) -> npt.NDArray[np.bool_]:
        args = (self.pages, self.page_bytes, self.digests(), self.seeds, self.pieces)
        return mover.scatter(*args, progress, order)

    def digests(self) -> Bytes:
        found = b"".join(map(expected, self.view, self.seeds.tolist()))
        return np.frombuffer(found, dtype=np.uint8).reshape(-1, 16)


def even_layout(pages: int = 3, piece: int = 1 << 15, segments: int = 4, shift: int = 0) -> Layout:
    """Pages of 1 MiB."""
    layout = Layout([[piece] * ((1 << 20) // piece)] * pages, 1, seed=1, shift=shift)
    each = (1 << 20) // piece // segments
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


# Progress


class Running:
    """A scatter in another thread."""

    def __init__(self, layout: Layout, order: Order) -> None:
        self.layout, self.order, self.progress = layout, order, Progress()
        self.digests = layout.digests()
        self.ok: npt.NDArray[np.bool_] | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        layout = self.layout
        args = (layout.pages, layout.page_bytes, self.digests, layout.seeds, layout.pieces)
        self.ok = mover.scatter(*args, self.progress, self.order)
        self.progress.finish()

    def join(self) -> npt.NDArray[np.bool_]:
        self.thread.join(WAIT_S)
        assert self.ok is not None
        return self.ok


def test_segments_are_counted_in_order_and_hold_their_bytes_when_they_are() -> None:
    segments = 8
    layout = even_layout(pages=24, segments=segments)
    whole = layout.spread(layout.view)
    job = Running(layout, "segment")
    job.thread.start()
    for segment in range(segments):
        assert job.progress.wait(segment + 1, WAIT_S)
        assert job.progress.good_pages == layout.page_count
        for page in range(layout.page_count):
            slot = page * segments + segment
            first = int(layout.pieces.end[slot - 1]) if slot else 0
            for index in range(first, int(layout.pieces.end[slot])):
                offset = layout.offsets[index]
                part = slice(offset, offset + layout.lengths[index])
                assert (layout.pool[part] == whole[part]).all(), (segment, page)
    assert job.join().all()
    assert not job.progress.wait(segments + 1, WAIT_S), "it finished with fewer"


def test_a_waiter_wakes_when_its_segment_is_done_and_when_the_job_finishes() -> None:
    progress, answers = Progress(), dict[int, bool]()
    arrived = threading.Barrier(3)

    def wait(count: int) -> None:
        arrived.wait(WAIT_S)
        answers[count] = progress.wait(count, 2 * WAIT_S)  # longer than the joins below

    threads = [threading.Thread(target=wait, args=(count,)) for count in (1, 2)]
    for thread in threads:
        thread.start()
    arrived.wait(WAIT_S)
    mover._chosen.publish(progress, Word.DONE, 1)
    threads[0].join(WAIT_S)
    assert answers == {1: True}
    progress.finish()
    threads[1].join(WAIT_S)
    assert answers == {1: True, 2: False}


def test_a_wait_for_what_does_not_come_ends_when_time_is_up() -> None:
    assert not Progress().wait(1, 0.01)
    assert Progress().wait(0, 0.0)


@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_job_cancelled_beforehand_writes_nothing(order: Order) -> None:
    job = Running(even_layout(), order)
    job.progress.cancel()
    job.thread.start()
    assert not job.join().any()
    assert not job.layout.pool.any()
    assert job.progress.done == 0


def test_a_gather_cancelled_beforehand_writes_nothing() -> None:
    layout, progress = even_layout(), Progress()
    before = layout.memory.copy()
    layout.pool[:] = 1
    progress.cancel()
    args = (layout.pages, layout.page_bytes, layout.pieces, layout.seeds)
    assert not mover.gather(*args, progress).any()
    assert (layout.memory == before).all()


@pytest.mark.parametrize("order", ["page", "segment"])
def test_other_threads_run_while_a_job_does_and_can_cancel_it(
    implementation: Native | Fallback, wait_until: Callable[..., None], order: Order
) -> None:
    """One page ten thousand times over takes most of a second; its first byte shows that it began.

    A job that kept the GIL would be at its end before this thread could cancel it.
    """
    layout, count = even_layout(pages=1, segments=1), 10_000
    layout.pool = zeros(1 << 20)
    layout.pieces = Pieces.contiguous(u64(address(layout.pool)).repeat(count), 1 << 20)
    layout.view[0, 0] = 200
    job = Running(layout, order)
    job.digests = job.digests.repeat(count, axis=0)
    layout.pages, layout.seeds = layout.pages.repeat(count), layout.seeds.repeat(count)
    job.thread.start()
    if order == "page" and isinstance(implementation, Native):  # the fallback verifies all first
        wait_until(lambda: layout.pool[0] == 200)
    job.progress.cancel()
    ok = job.join()
    finished = int(np.count_nonzero(ok))
    assert finished < (count if order == "page" else 1)
    assert ok[:finished].all()
    layout.pool[:] = 0
    assert not layout.pool.any()


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
    assert native.load(tmp_path / "nothing.so") is None
    (tmp_path / "broken.so").write_bytes(b"no library")
    assert native.load(tmp_path / "broken.so") is None
    monkeypatch.setattr(native, "VERSION", -1)
    assert native.load(native.LIBRARY) is None


def test_it_says_what_runs() -> None:
    built = native.load(native.LIBRARY) is not None
    assert mover.is_native is built
    assert mover.description.startswith("native " if built else "fallback numpy+xxhash")
