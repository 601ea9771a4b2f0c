"""Pages, and the pieces they are made of: random ones, even ones."""

import itertools
import random

import numpy as np
import numpy.typing as npt
import xxhash
from hypothesis import strategies as st

from kvstore import mover
from kvstore.mover import Order, Pieces, Progress

Bytes = npt.NDArray[np.uint8]


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
