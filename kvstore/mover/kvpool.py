"""An engine's KV pool as addresses and strides, and the pieces of its pages. No torch.

A pool has **planes**: memory with one part (for example the K of layer 3) of every block. Block b
of plane i is the ``block_bytes`` contiguous bytes at ``planes[i] + b * block_stride_bytes``. A page
of a canonical or opaque layout is the planes in order, and in each plane the page's blocks in
order::

    page = plane 0: block b0, block b1, … │ plane 1: block b0, block b1, … │ …
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.mover import Pieces
from kvstore.protocol.errors import InvalidArgument, LayoutMismatch


class HeadRows(NamedTuple):
    """Some adjacent heads of a block: it has one row a token, and in a row head after head.

    Attributes:
        tokens: rows of a block.
        heads: heads of a row.
        first: first of the wanted heads.
        stop: the one after the last.
    """

    tokens: int
    heads: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class KVPool:
    """An engine's memory for K and V, as addresses and strides.

    A plane holds one part (for example the K of layer 3) of every block. Block b of plane i is the
    ``block_bytes`` contiguous bytes at ``planes[i] + b * block_stride_bytes``. A page is the planes
    in order, and in each plane the page's blocks in order. The engine owns the memory and must keep
    it until every job that uses the pool has ended.

    Attributes:
        planes: address of block 0 of each plane, in page order: for canonical pages
            ``[layer 0 K, layer 0 V, layer 1 K, …]``, for opaque pages one plane per layer.
        block_bytes: bytes of one block in one plane, contiguous.
        block_stride_bytes: distance between the starts of two blocks in a plane, at least
            ``block_bytes``.
        block_count: number of blocks in the pool.
        planes_per_layer: 2 if K and V are separate planes, 1 if they share one.
        device: device of the memory: ``cpu``, or ``cuda:N``, which needs torch. ``cpu:N`` is host
            memory that is treated as a device's, for tests and benchmarks.

    Raises:
        InvalidArgument: the numbers cannot describe memory; ``field`` names the wrong one.
    """

    planes: tuple[int, ...]
    block_bytes: int
    block_stride_bytes: int
    block_count: int
    planes_per_layer: int = 2
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.planes_per_layer < 1:
            raise InvalidArgument("planes_per_layer", f"{self.planes_per_layer} is not positive")
        if not self.planes or len(self.planes) % self.planes_per_layer:
            raise InvalidArgument("planes", f"{len(self.planes)} are not a whole number of layers")
        if not 0 < self.block_bytes <= self.block_stride_bytes:
            raise InvalidArgument("block_bytes", f"{self.block_bytes} is outside 1..stride")
        if self.block_count < 1:
            raise InvalidArgument("block_count", f"{self.block_count} is not positive")

    @property
    def layer_count(self) -> int:
        """Number of layers in the pool."""
        return len(self.planes) // self.planes_per_layer

    def part(self, offset: int, size: int) -> "KVPool":
        """A pool of ``size`` bytes of each block in each plane, from ``offset`` on.

        Raises:
            InvalidArgument: these bytes are not within a block.
        """
        if not 0 <= offset < offset + size <= self.block_bytes:
            what = f"{size} bytes at {offset} are not within {self.block_bytes}"
            raise InvalidArgument("part", what)
        planes = tuple(plane + offset for plane in self.planes)
        return replace(self, planes=planes, block_bytes=size)

    def blocks_per_page(self, page_bytes: int) -> int:
        """Number of blocks of one page.

        Args:
            page_bytes: bytes of one page, see :attr:`Space.page_bytes`.

        Raises:
            LayoutMismatch: a page of that size is not a whole number of the pool's blocks.
        """
        count, rest = divmod(page_bytes, len(self.planes) * self.block_bytes)
        if rest or not count:
            raise LayoutMismatch(
                "block_bytes",
                f"a page of {page_bytes} bytes is not a whole number of blocks of"
                f" {len(self.planes)} planes x {self.block_bytes} bytes",
            )
        return count

    def pieces(
        self, blocks: npt.ArrayLike, page_bytes: int, page_count: int, *, by_layer: bool = False
    ) -> Pieces:
        """The pieces of pages that are in ``blocks``; adjacent blocks become one piece.

        Args:
            blocks: block numbers, ``blocks_per_page`` for each page, in page order.
            page_bytes: bytes of one page.
            page_count: number of pages.
            by_layer: one segment per layer (to wait for layers), else one per page.

        Raises:
            InvalidArgument: a block is not in the pool, or the number of blocks is wrong.
        """
        table = self.table(blocks, page_bytes, page_count)
        if self.block_stride_bytes != self.block_bytes:  # no block is adjacent to another
            return self._apart(table, by_layer=by_layer)
        per_page = table.shape[1]
        # starts[p, j]: block j of page p is not adjacent to block j-1.
        starts = np.ones(table.shape, dtype=bool)
        starts[:, 1:] = table[:, 1:] != table[:, :-1] + 1
        run_pages, run_at = np.nonzero(starts)
        ends_at = np.append(run_at[1:], 0)
        ends_at[np.append(run_pages[1:] != run_pages[:-1], True)] = per_page
        lengths = (ends_at - run_at).astype(np.uint64) * np.uint64(self.block_bytes)
        offsets = table[run_pages, run_at].astype(np.uint64) * np.uint64(self.block_stride_bytes)
        runs = np.bincount(run_pages, minlength=len(table))
        return self._spread(offsets, lengths, runs, by_layer=by_layer)

    def head_pieces(self, planes: npt.ArrayLike, blocks: npt.ArrayLike, rows: "HeadRows") -> Pieces:
        """The pieces of some heads: a page is these heads of each token of its blocks, in order.

        Args:
            planes: number of the plane of each page, shape (pages,).
            blocks: blocks of each page, shape (pages, blocks of a page).
            rows: what is in a block, and which heads.

        Raises:
            InvalidArgument: a plane or block is not in the pool, or a block has no such rows.
        """
        numbers, at = np.asarray(blocks, dtype=np.int64), np.asarray(planes, dtype=np.int64)
        row_bytes, rest = divmod(self.block_bytes, rows.tokens)
        head_bytes, rest_of_row = divmod(row_bytes, rows.heads)
        if rest or rest_of_row:
            what = f"{self.block_bytes} bytes are not {rows.tokens} rows of {rows.heads} heads"
            raise InvalidArgument("block_bytes", what)
        if not 0 <= rows.first < rows.stop <= rows.heads:
            raise InvalidArgument("heads", f"{rows.first} to {rows.stop} of {rows.heads}")
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(self.planes):
            raise InvalidArgument("planes", f"a plane is outside 0..{len(self.planes) - 1}")
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < self.block_count:
            raise InvalidArgument("blocks", f"a block is outside 0..{self.block_count - 1}")
        starts = np.asarray(self.planes, dtype=np.uint64)[at][:, None, None]
        starts = starts + (numbers * self.block_stride_bytes).astype(np.uint64)[:, :, None]
        if rows.first == 0 and rows.stop == rows.heads:  # a block is one piece
            inside, length = np.zeros(1, dtype=np.uint64), self.block_bytes
        else:
            inside = np.arange(rows.tokens, dtype=np.uint64) * np.uint64(row_bytes)
            inside += np.uint64(rows.first * head_bytes)
            length = (rows.stop - rows.first) * head_bytes
        address = np.ascontiguousarray((starts + inside).reshape(-1))
        each = numbers.shape[1] * len(inside)
        end = np.arange(1, len(at) + 1, dtype=np.int64) * each
        return Pieces(address, np.full(len(address), length, dtype=np.uint64), end, 1)

    def table(
        self, blocks: npt.ArrayLike, page_bytes: int, page_count: int
    ) -> npt.NDArray[np.int64]:
        """Check block numbers, and arrange them by page: shape (pages, blocks of a page).

        Args:
            blocks: see :meth:`pieces`.
            page_bytes: bytes of one page.
            page_count: number of pages.

        Raises:
            InvalidArgument: a block is not in the pool, or the number of blocks is wrong.
        """
        flat = np.array(blocks, dtype=np.int64).reshape(-1)
        per_page = self.blocks_per_page(page_bytes)
        if len(flat) != page_count * per_page:
            what = f"{len(flat)} blocks for {page_count} pages of {per_page} each"
            raise InvalidArgument("blocks", what)
        if len(flat) and not (int(flat.min()) >= 0 and int(flat.max()) < self.block_count):
            raise InvalidArgument("blocks", f"a block is outside 0..{self.block_count - 1}")
        return flat.reshape(-1, per_page)

    def _apart(self, table: npt.NDArray[np.int64], *, by_layer: bool) -> Pieces:
        """The pieces of these pages if every block of a plane is one."""
        planes = np.array(self.planes, dtype=np.uint64)
        offsets = table.view(np.uint64) * np.uint64(self.block_stride_bytes)
        address = (planes[:, None] + offsets[:, None, :]).reshape(-1)
        length = np.empty(len(address), dtype=np.uint64)
        length.fill(self.block_bytes)
        segments = self.layer_count if by_layer else 1
        count = len(table) * segments
        end = np.arange(1, count + 1, dtype=np.int64) * (table.shape[1] * len(planes) // segments)
        return Pieces(address, length, end, segments)

    def _spread(
        self,
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        runs: npt.NDArray[np.int64],
        *,
        by_layer: bool,
    ) -> Pieces:
        """Repeat each page's runs of blocks for every plane, page by page."""
        planes = np.asarray(self.planes, dtype=np.uint64)
        pages, plane_count = len(runs), len(planes)
        if pages and (runs == runs[0]).all():
            each = int(runs[0])
            address = planes[None, :, None] + offsets.reshape(pages, 1, each)
            length = np.broadcast_to(lengths.reshape(pages, 1, each), address.shape)
        else:
            parts = np.split(offsets, np.cumsum(runs)[:-1])
            sizes = np.split(lengths, np.cumsum(runs)[:-1])
            address = np.concatenate([(planes[:, None] + part).reshape(-1) for part in parts])
            length = np.concatenate([np.tile(size, plane_count) for size in sizes])
        segments = self.layer_count if by_layer else 1
        pieces_each = np.repeat(runs * (plane_count // segments), segments)
        return Pieces(
            np.ascontiguousarray(address.reshape(-1)),
            np.ascontiguousarray(length.reshape(-1)),
            np.cumsum(pieces_each, dtype=np.int64),
            segments,
        )


class PoolPages(NamedTuple):
    """Pages in blocks of a pool; see :meth:`KVPool.pieces`."""

    pool: KVPool
    blocks: npt.ArrayLike
    page_bytes: int
    pages: int


def pieces_of_each(asked: Sequence[PoolPages]) -> list[Pieces]:
    """The pieces of pages in several pools.

    If a pool is a part of the same blocks as the one before, they are looked at once.

    Raises:
        InvalidArgument, LayoutMismatch: see :meth:`KVPool.pieces`.
    """
    found: list[Pieces] = []
    before: PoolPages | None = None
    for one in asked:
        offset = None
        if before and one.blocks is before.blocks and one[2:] == before[2:]:
            offset = _offset(one.pool, before.pool)
        if offset is None:
            found.append(one.pool.pieces(*one[1:]))
        else:
            found.append(found[-1].moved(offset))
        before = one
    return found


def _offset(pool: KVPool, other: KVPool) -> int | None:
    """Bytes from each part of a block of ``other`` to the same of ``pool``; None = it varies.

    It does not for two parts of one pool that have the same size.
    """
    offset = pool.planes[0] - other.planes[0]
    moved = replace(other, planes=tuple(plane + offset for plane in other.planes))
    return offset if moved == pool else None
