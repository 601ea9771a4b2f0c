"""Goal: pieces are exactly the bytes that the words of the layout say, for every pool and table."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.mover.jobs import Pieces
from kvstore.mover.kvpool import KVPool, PoolPages, pieces_of_each
from kvstore.protocol.errors import InvalidArgument, LayoutMismatch


@given(
    layers=st.integers(1, 4), per_layer=st.integers(1, 2), per_page=st.integers(1, 5),
    gap=st.sampled_from([0, 0, 8]), by_layer=st.booleans(), data=st.data(),
)  # fmt: skip
def test_pieces_are_what_a_page_is_made_of(layers, per_layer, per_page, gap, by_layer, data):
    block_bytes, block_count = 8, 12
    stride = block_bytes + gap
    pages = data.draw(st.integers(0, 4))
    blocks = data.draw(
        st.lists(st.integers(0, block_count - 1), min_size=pages * per_page,
                 max_size=pages * per_page)
    )  # fmt: skip
    if data.draw(st.booleans()):  # runs of neighbours, as engines hand them out
        blocks = [(blocks[0] + at) % block_count for at in range(len(blocks))]
    planes = [
        np.arange(block_count * stride, dtype=np.uint8) + np.uint8(16 * plane)
        for plane in range(layers * per_layer)
    ]
    addresses = tuple(plane.ctypes.data for plane in planes)
    pool = KVPool(addresses, block_bytes, stride, block_count, per_layer)
    page_bytes = len(planes) * per_page * block_bytes

    pieces = pool.pieces(blocks, page_bytes, pages, by_layer=by_layer)

    assert pieces.segments == (layers if by_layer else 1)
    assert len(pieces.end) == pages * pieces.segments
    begin = 0
    per_segment = len(planes) // pieces.segments
    for number, end in enumerate(pieces.end.tolist()):
        page, segment = divmod(number, pieces.segments)
        expected = b"".join(
            planes[plane][block * stride : block * stride + block_bytes].tobytes()
            for plane in range(segment * per_segment, (segment + 1) * per_segment)
            for block in blocks[page * per_page : (page + 1) * per_page]
        )
        found = b"".join(
            ctypes.string_at(int(address), int(length))
            for address, length in zip(
                pieces.address[begin:end], pieces.length[begin:end], strict=True
            )
        )
        assert found == expected
        begin = end
    assert begin == len(pieces.address) == len(pieces.length)


def test_neighbouring_blocks_become_one_piece_but_not_across_pages_or_gaps():
    dense, gapped = KVPool((0, 4096), 8, 8, 16), KVPool((0, 4096), 8, 16, 16)

    assert dense.pieces([2, 3, 4, 5], 32, 2).length.tolist() == [16, 16, 16, 16]
    assert dense.pieces([2, 3, 3, 2], 64, 1).length.tolist() == [16, 8, 8] * 2
    assert gapped.pieces([2, 3], 32, 1).length.tolist() == [8] * 4


@pytest.mark.parametrize(
    ("blocks", "field"),
    [([0, 16], "blocks"), ([-1, 0], "blocks"), ([0, 1, 2], "blocks"), ([2**40, 0], "blocks")],
)
def test_blocks_that_cannot_be_are_refused(blocks, field):
    with pytest.raises(InvalidArgument) as refused:
        KVPool((0, 4096), 8, 8, 16).pieces(blocks, 32, 1)
    assert refused.value.field == field


@pytest.mark.parametrize("page_bytes", [0, 8, 15, 17, 24])
def test_pages_that_are_no_whole_number_of_blocks_are_refused(page_bytes):
    with pytest.raises(LayoutMismatch) as refused:
        KVPool((0, 4096), 8, 8, 16).blocks_per_page(page_bytes)
    assert refused.value.field == "block_bytes"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (((), 8, 8, 1), "planes"),
        (((0,), 8, 8, 1), "planes"),
        (((0, 1), 0, 8, 1), "block_bytes"),
        (((0, 1), 9, 8, 1), "block_bytes"),
        (((0, 1), 8, 8, 0), "block_count"),
        (((0, 1), 8, 8, 1, 0), "planes_per_layer"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_by_the_field(arguments, field):
    with pytest.raises(InvalidArgument) as refused:
        KVPool(*arguments)
    assert refused.value.field == field


# Several pools

HEADS = 3


def equal(one: Pieces, other: Pieces) -> bool:
    arrays = zip(one[:3], other[:3], strict=True)
    return one.segments == other.segments and all(np.array_equal(a, b) for a, b in arrays)


@given(
    blocks=st.lists(st.integers(0, 11), min_size=4, max_size=4),
    others=st.lists(st.sampled_from(["moved", "blocks", "size", "plane", "stride"]), max_size=4),
    base=st.sampled_from([1 << 12, (1 << 64) - (1 << 20)]), gap=st.sampled_from([0, 8]),
)  # fmt: skip
def test_pieces_in_several_pools_are_those_of_each(blocks, others, base, gap):
    planes = (base, base + 4096, base + 12_288)
    whole = KVPool(planes, 24, 24 + gap, 12, 1)
    asked = [PoolPages(whole.part(16, 8), blocks, 24, 4)]
    for number, kind in enumerate(others):
        pool, table, size, count = whole.part(8 * (number % HEADS), 8), blocks, 24, 4
        if kind == "blocks":
            table = blocks[::-1]
        elif kind == "size":
            size, count = 48, 2
        elif kind == "plane":
            pool = KVPool((*planes[:2], planes[2] + 64), 8, 24 + gap, 12, 1)
        elif kind == "stride":
            pool = KVPool(planes, 8, 8, 12, 1)
        asked.append(PoolPages(pool, table, size, count))

    found = pieces_of_each(asked)

    alone = [one.pool.pieces(one.blocks, one.page_bytes, one.pages) for one in asked]
    assert all(map(equal, found, alone))
    assert len(found) == len(alone)


def test_the_blocks_of_several_parts_of_a_pool_are_looked_at_once(monkeypatch):
    looked: list[KVPool] = []
    table = KVPool.table

    def counted(pool, *arguments):
        looked.append(pool)
        return table(pool, *arguments)

    monkeypatch.setattr(KVPool, "table", counted)
    whole, blocks = KVPool((4096, 8192), 24, 24, 12, 1), [5, 2]
    parts = [whole.part(8 * head, 8) for head in range(HEADS)]

    pieces_of_each([PoolPages(part, blocks, 16, 2) for part in parts])

    assert looked == parts[:1]


@pytest.mark.parametrize("by_layer", [False, True])
def test_joined_pieces_are_the_pages_of_all_parts_in_order(by_layer):
    tables, pool = ([3, 4, 1], [], [7], [2, 2]), KVPool((4096, 8192), 8, 8, 12, 1)
    parts = [pool.pieces(table, 16, len(table), by_layer=by_layer) for table in tables]

    joined = Pieces.joined(parts)

    assert equal(joined, pool.pieces([3, 4, 1, 7, 2, 2], 16, 6, by_layer=by_layer))
    assert equal(Pieces.joined(parts[:1]), parts[0])
