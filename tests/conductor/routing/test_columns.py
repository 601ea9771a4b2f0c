"""Prefixes as columns are the same as prefixes by engine."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conductor.routing.columns import FoundPrefixes, Prefix, prefix_columns

ENGINES = ["a", "b", "c", "d"]


@given(st.permutations(ENGINES), st.lists(st.sampled_from(ENGINES), unique=True), st.data())
def test_columns_of_columns_are_those_of_their_values(
    asked: list[str], known: list[str], data: st.DataObject
) -> None:
    tokens = st.lists(st.integers(0, 1 << 20), min_size=len(known), max_size=len(known))
    numbers = np.array([data.draw(tokens) for _ in range(6)], dtype=np.int64).reshape(6, -1)
    found = FoundPrefixes(known, numbers, list(range(len(known))))

    values = dict(found)

    assert values == {
        name: Prefix(*numbers[:3, at].tolist(), at, *numbers[3:, at].tolist())
        for at, name in enumerate(known)
    }
    assert found.get("e") is None
    expected = prefix_columns(values, asked)
    for one in (prefix_columns(found, asked), prefix_columns(found, list(asked))):
        assert one.numbers.tolist() == expected.numbers.tolist()
        assert one.usable.tolist() == expected.usable.tolist()
        assert one.peer.tolist() == expected.peer.tolist()
