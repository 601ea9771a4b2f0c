"""What is handed on is what was digested, whoever writes to the memory while it is moved.

A job whose target lies on its own source changes the bytes it has yet to read, at a moment that
never varies; another thread that scribbles changes them at any moment.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvstore import mover
from kvstore.mover import Fallback, Native, Pieces, Progress, native
from tests.faulted import FaultedMemory
from tests.mover.layouts import address, expected, noise, u64, zeros

pytestmark = pytest.mark.usefixtures("implementation")

PAGES, SEGMENTS = 3, 4
# Pages of whole stripes and of odd lengths, larger than a step, and one that is digested as short.
SIZES = (1 << 20, (1 << 20) + 52, 4096, 6000, 200)


class Job:
    """Pages of ``size`` bytes, each of ``SEGMENTS`` segments of two pieces."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = zeros(PAGES * (size + 64))
        self.pages = [
            self.memory[at : at + size] for at in range(0, PAGES * (size + 64), size + 64)
        ]
        for index, page in enumerate(self.pages):
            page[:] = noise(size, index)
        self.content = [page.copy() for page in self.pages]
        self.seeds = u64(*range(PAGES))
        cuts: Any = np.linspace(0, size, 2 * SEGMENTS + 1).astype(int)
        if size % 64 == 0:
            cuts -= cuts % 64
        self.cuts = cuts.tolist()
        self.pool = zeros(PAGES * size + 64)
        self.targets = [
            address(self.pool) + page * size + cut
            for page in range(PAGES)
            for cut in self.cuts[:-1]
        ]

    def source(self, page: int, piece: int) -> int:
        """Where a piece's bytes lie in its page."""
        return address(self.pages[page]) + self.cuts[piece]

    @property
    def pieces(self) -> Pieces:
        lengths = np.tile(np.diff(self.cuts), PAGES).astype(np.uint64)
        ends = np.arange(2, 2 * SEGMENTS * PAGES + 1, 2, dtype=np.int64)
        return Pieces(u64(*self.targets), lengths, ends, SEGMENTS)

    @property
    def digests(self) -> Any:
        found = b"".join(map(expected, self.content, self.seeds.tolist()))
        return np.frombuffer(found, dtype=np.uint8).reshape(-1, 16)

    def scatter(self, order: mover.Order, progress: Progress | None = None) -> list[bool]:
        pages = u64(*map(address, self.pages))
        args = (pages, self.size, self.digests, self.seeds, self.pieces, progress, order)
        return mover.scatter(*args).tolist()

    def arrived(self, page: int, pieces: range = range(2 * SEGMENTS)) -> bool:
        """Whether these pieces hold what the page held when it was digested first."""
        return all(
            ctypes.string_at(self.targets[page * 2 * SEGMENTS + piece],
                             self.cuts[piece + 1] - self.cuts[piece])
            == self.content[page][self.cuts[piece] : self.cuts[piece + 1]].tobytes()
            for piece in pieces
        )  # fmt: skip


@contextmanager
def flickering(array: Any, at: int) -> Iterator[None]:
    """A thread that changes one byte and puts it back, again and again."""
    stop, where, right = threading.Event(), address(array) + at, int(array[at])

    def flicker() -> None:
        while not stop.is_set():
            for _ in range(100):  # each call lets other threads run
                ctypes.memset(where, right ^ 1, 1)
                ctypes.memset(where, right, 1)

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# What a job itself changes


@pytest.mark.parametrize("size", SIZES)
def test_a_page_that_changes_after_it_verified_is_good_no_longer(size):
    job, progress = Job(size), Progress()
    job.targets[0] = job.source(1, 5)  # the first layer of page 0 lands in the third of page 1

    ok = job.scatter("segment", progress)

    assert ok == [True, False, True]
    assert progress.done == SEGMENTS, "the other pages go on"
    assert progress.good_pages == 1
    assert job.arrived(1, range(4)), "the layers before it had been handed on as good"
    assert job.arrived(2)


def test_a_layer_is_announced_only_of_pages_that_are_still_good(monkeypatch):
    job, progress, said = Job(6000), Progress(), list[tuple[int, int]]()
    job.targets[0] = job.source(1, 5)
    publish = Fallback.publish

    def note(self: Fallback, where: Progress, word: mover.Word, value: int) -> None:
        publish(self, where, word, value)
        said.append((where.done, where.good_pages))

    monkeypatch.setattr(mover, "_chosen", Fallback())
    monkeypatch.setattr(Fallback, "publish", note)
    job.scatter("segment", progress)

    assert said == [(1, 3), (2, 3), (3, 1), (4, 1)]


def test_a_change_in_a_layers_last_bytes_is_known_when_the_layer_is_announced():
    """Bytes of a layer that are no whole stripe count with the layer, not with the next one."""
    size = (4 << 20) + 52
    for _ in range(100):
        job, progress, seen = Job(size), Progress(), list[tuple[int, int]]()
        assert job.cuts[6] % 64
        job.targets[0] = job.source(1, 6) - 8
        copying = threading.Thread(target=job.scatter, args=("segment", progress))
        copying.start()
        progress.wait(3, 20.0)
        seen.append((progress.good_pages, progress.done))
        copying.join()
        if seen[0][1] == 3:  # it was looked at before the layer after it
            assert seen == [(1, 3)]
            return
    pytest.skip("the layer after it was always there first")


@pytest.mark.parametrize("order", ["page", "segment"])
@pytest.mark.parametrize("size", SIZES)
def test_what_was_copied_over_a_page_before_its_end_does_not_arrive_as_that_page(size, order):
    job = Job(size)
    job.targets[8] = job.source(1, 6)  # the first piece of page 1 lands on its last but one

    ok = job.scatter(order)

    assert ok[0]
    assert ok[2]
    assert job.arrived(0)
    assert job.arrived(2)
    assert not ok[1] or job.arrived(1, range(1, 8))


# What is read


@pytest.mark.parametrize("odd", [0, 52])
@pytest.mark.parametrize("mode", ["scatter", "gather", "gathered into", "digest"])
def test_no_byte_is_read_twice(mode, odd):
    """What is read once cannot have changed before it is handed on."""
    size = (1 << 19) + odd
    content = noise(size)
    seeds, other = u64(3), zeros(size)
    with FaultedMemory(content.tobytes()) as memory:
        here, there = u64(memory.address), u64(address(other))
        if mode == "scatter":
            found = np.frombuffer(expected(content, 3), np.uint8).reshape(1, 16)
            target = Pieces.contiguous(there, size)
            assert mover.scatter(here, size, found, seeds, target).all()
        elif mode == "gather":
            digests = mover.gather(there, size, Pieces.contiguous(here, size), seeds)
            assert digests.tobytes() == expected(content, 3)
        elif mode == "gathered into":
            other[:] = content[::-1]
            mover.gather(here, size, Pieces.contiguous(there, size), seeds)
        else:
            assert mover.digest(here, size, seeds).tobytes() == expected(content, 3)

        count = -(-size // mmap.PAGESIZE)
        assert len(memory.touched) == count
        # A memmove of the C library may write the ends of its target last.
        assert memory.touched.total() <= 1.1 * count


# What others change


@pytest.mark.parametrize("order", ["page", "segment"])
@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 52])
def test_pages_that_others_write_to_arrive_as_they_verified_or_not_at_all(size, order):
    job = Job(size)
    with flickering(job.pages[1], size - 300):
        for _ in range(300):
            ok = job.scatter(order)
            assert ok[0]
            assert ok[2]
            for page in np.flatnonzero(ok).tolist():
                assert job.arrived(page)
    assert job.scatter(order) == [True] * PAGES


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 52])
def test_a_digest_is_of_the_bytes_that_were_gathered_not_of_what_others_make_of_them(size):
    job = Job(size)
    slots = zeros(PAGES * size)
    pages = u64(*(address(slots) + page * size for page in range(PAGES)))
    pool = np.concatenate(job.content)
    source = Pieces.contiguous(u64(*(address(pool) + p * size for p in range(PAGES))), size)
    with flickering(slots, size + 300):
        for _ in range(300):
            digests = mover.gather(pages, size, source, job.seeds)
            assert (digests == job.digests).all()


# What a caller may ask for


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"end": [3, 2], "length": [64, 32, 32]}, -1),  # the third is behind the list's end
        ({"end": [-1, 2]}, -1),
        ({"end": [0, 2]}, -1),
        ({"end": [2, 1]}, -1),
        ({"pieces": 1}, -2),
        ({"pieces": 3}, -2),
        ({"length": [128, 64]}, -2),
        ({"length": [128, 0]}, -2),
        ({"length": [128, 2**64 - 64]}, -2),
        ({"page": [0, 64]}, -1),
        ({"page": [64, 2**64 - 64]}, -2),
        ({"address": [2**64 - 64, 64]}, -1),
        ({"address": [64, 0]}, -2),
        ({"mode": 4}, native.NO_JOB),
        ({"mode": -1}, native.NO_JOB),
        ({"isa": 4}, native.NO_JOB),
        ({"isa": -1}, native.NO_JOB),
        ({"pages": -1}, native.NO_JOB),
        ({"pages": 1 << 41}, native.NO_JOB),
        ({"page_bytes": 0}, native.NO_JOB),
        ({"page_bytes": 1 << 62}, native.NO_JOB),
        ({"segments": 0}, native.NO_JOB),
        ({"segments": 1 << 62}, native.NO_JOB),
        ({"pieces": -1}, native.NO_JOB),
        ({"page": None}, native.NO_JOB),
        ({"seed": None}, native.NO_JOB),
        ({"digest": None}, native.NO_JOB),
        ({"address": None}, native.NO_JOB),
        ({"length": None}, native.NO_JOB),
        ({"end": None}, native.NO_JOB),
        ({"mode": 2, "ok": None}, native.NO_JOB),
        ({"mode": 0}, native.NO_JOB),  # a digest has no pieces
    ],
    ids=str,
)
def test_the_library_refuses_numbers_that_make_no_job(wrong, answer, implementation):
    if not isinstance(implementation, Native):
        pytest.skip("the fallback is called through the public functions alone")
    real = zeros(128)
    given: dict[str, Any] = {
        "mode": 1, "isa": 0, "pages": 2, "page_bytes": 128, "segments": 1, "pieces": 2,
        "page": [address(real)] * 2, "seed": [0, 0], "digest": [0] * 4, "address": [64, 64, 64],
        "length": [128, 128], "end": [1, 2], "ok": [0], **wrong,
    }  # fmt: skip
    arrays = {
        name: np.array(value, np.int64 if name == "end" else np.uint64)
        for name, value in given.items()
        if isinstance(value, list)
    }
    passed = [arrays[name].ctypes.data if name in arrays else given[name] for name in given]

    assert implementation._move(*passed, None) == answer
