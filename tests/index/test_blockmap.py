"""The map of an engine's blocks in C, against the one in a dict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index import blockmap
from kvstore.index.blockmap import BITS_MAX, NativeBlockMap, PlainBlockMap
from kvstore.mover.chains import CHAINS, NativeChains, WordBuffer

pytestmark = pytest.mark.skipif(
    not isinstance(CHAINS, NativeChains), reason="built without a compiler"
)

TOP = 2**64 - 1
names = st.one_of(
    st.integers(1, TOP),
    st.integers(TOP - 9, TOP),  # these share the last slot, and go on in the first
    st.integers(1, 9),
    st.builds(lambda slot, low: (slot << 58) + low + 1, st.integers(0, 5), st.integers(0, 5)),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove"]),
        st.lists(names, min_size=1, max_size=20),
        st.sampled_from([0, 0, 1, 7, 8, 15, 16, 40, BITS_MAX - 1]),
    ),
    max_size=40,
)


def native() -> NativeBlockMap:
    assert isinstance(CHAINS, NativeChains)
    return NativeBlockMap(CHAINS.binary)


def buffer(values: list[int]) -> WordBuffer:
    filled = WordBuffer(len(values) + 5)
    filled.array[: len(values)] = values
    return filled


@settings(max_examples=300)
@given(steps, st.lists(names, max_size=50))
def test_whatever_is_stored_and_removed_both_maps_say_the_same(
    history: list[tuple[str, list[int], int]], asked: list[int]
) -> None:
    maps = [native(), PlainBlockMap()]
    seen: set[int] = set(asked)
    for number, (what, some, bit) in enumerate(history):
        seen.update(some)
        given_names = buffer(some)
        if what == "store":
            chains = buffer([name % 1_000 + number // 20 + 1 for name in some])
            first, second = (one.store(given_names, len(some), chains, 0, bit) for one in maps)
            assert first == second
        else:
            outs = [WordBuffer(len(some) + 2) for _ in maps]
            gone = [
                one.remove(given_names, len(some), bit, out, 2)
                for one, out in zip(maps, outs, strict=True)
            ]
            assert gone[0] == gone[1]
            assert outs[0].array.tolist() == outs[1].array.tolist()
        assert len(maps[0]) == len(maps[1])
    every = sorted(seen)
    found = [one.find(buffer(every), len(every)) for one in maps]
    assert found[0][0].tolist() == found[1][0].tolist() == [maps[0].chain(n) for n in every]
    assert found[0][1].tolist() == found[1][1].tolist()
    for one in maps:
        one.clear()
        assert len(one) == 0
        assert not any(map(one.chain, every))


def test_a_block_takes_no_more_than_24_bytes() -> None:
    blocks = native()
    dice = np.random.default_rng(1)
    worst = 0.0
    for _ in range(300):
        some = WordBuffer(128)
        some.array[:] = dice.integers(1, TOP, 128, np.uint64)
        blocks.store(some, 128, some, 0, 3)
        if len(blocks) > 1_000:
            size = sum(array.nbytes for array in blocks._arrays)
            worst = max(worst, size / len(blocks))
    assert len(blocks) == 128 * 300
    assert 19 < worst <= 24
    assert blockmap._SLOTS_MIN * 17 < 2_000, "of an engine that has said nothing"
