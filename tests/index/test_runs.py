"""Usable prefixes against a count by hand, block by block."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.index import runs as runs_module
from kvstore.index.directory import HolderDirectory, PageHolder
from kvstore.index.runs import HolderRuns, PartNeed, PrefixNeeds

HOLDERS = [PageHolder(f"w{number}", "GPU", "", 0) for number in range(12)]
BITS = [0, 1, 7, 8, 9, 63, 64, 500, 1000, 1022, 1023, 2]
DIRECTORY = HolderDirectory(4, dict(zip(HOLDERS[:-1], BITS[:-1], strict=True)))
"""The last holder does not count."""

sets_of_runs = st.lists(
    st.tuples(st.integers(1, 5), st.sets(st.integers(0, 11), max_size=12)), max_size=8
)
part = st.tuples(st.lists(st.integers(0, 11), max_size=4), st.none() | st.integers(1, 7))


def runs_of(runs: list[tuple[int, set[int]]], version: int = 4) -> HolderRuns:
    rows = np.zeros((len(runs), 16), dtype=np.uint64)
    for at, (_, holders) in enumerate(runs):
        for holder in holders:
            rows[at, BITS[holder] // 64] |= np.uint64(1 << BITS[holder] % 64)
    ends = np.cumsum([length for length, _ in runs], dtype=np.int64)
    return HolderRuns(ends, rows, version)


def prepared(candidates: list[list[tuple[list[int], int | None]]]) -> PrefixNeeds:
    needs = PrefixNeeds(
        [
            [PartNeed([HOLDERS[h] for h in holders], window) for holders, window in parts]
            for parts in candidates
        ]
    )
    needs.prepare(DIRECTORY)
    return needs


def usable(blocks: list[set[int]], parts: list[tuple[list[int], int | None]]) -> int:
    """The longest prefix of which every part has what it needs."""

    def met(count: int, holders: list[int], window: int | None) -> bool:
        first = 0 if window is None else max(0, count - window)
        return all(blocks[at] & set(holders) - {11} for at in range(first, count))

    return max(
        count
        for count in range(len(blocks) + 1)
        if not count or (parts and all(met(count, *need) for need in parts))
    )


@pytest.fixture(params=["native", "plain"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """In C, and without the library."""
    if request.param == "plain":
        monkeypatch.setattr(runs_module, "LOOKUP", None)
    elif runs_module.LOOKUP is None:
        pytest.skip("built without a compiler")
    return str(request.param)


_CHECKED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_all(runs: list[tuple[int, set[int]]], candidates: list[list[Any]]) -> None:
    blocks = [holders for length, holders in runs for _ in range(length)]

    needs, found = prepared(candidates), runs_of(runs)
    counted = [usable(blocks, parts) for parts in candidates]
    assert needs.prefixes(found).tolist() == counted
    some = needs.prefixes_and_runs(found)
    prefixes, leading, torn, there = some.prefixes, some.leading, some.torn, some.there
    assert prefixes.tolist() == counted
    every = [
        [bool(parts) and all(held & set(one) - {11} for one, _ in parts) for _, held in runs]
        for parts in candidates
    ]
    assert there.tolist() == every
    heads = [[*one, False].index(False) for one in every]
    assert leading.tolist() == [sum(length for length, _ in runs[:head]) for head in heads]
    assert torn == any(any(one[head:]) for one, head in zip(every, heads, strict=True))


@pytest.mark.usefixtures("implementation")
@_CHECKED
@given(sets_of_runs, st.lists(st.lists(part, max_size=3), max_size=6))
def test_prefixes_are_those_counted_block_by_block(runs, candidates) -> None:
    check_all(runs, candidates)


@pytest.mark.usefixtures("implementation")
@_CHECKED
@given(sets_of_runs, st.lists(st.lists(st.tuples(part.map(lambda p: p[0]), st.none()), max_size=3)))
def test_prefixes_without_windows_are_those_counted_block_by_block(runs, candidates) -> None:
    check_all(runs, candidates)


@pytest.mark.usefixtures("implementation")
def test_many_runs_are_looked_at_in_several_steps() -> None:
    runs = [(1, {0, 1 + run % 2} if run < 1700 else {1 + run % 2}) for run in range(2000)]
    candidates = [[([0], None)], [([1, 2], None)], [([1], None)], [([0], None), ([1, 2], None)]]

    assert prepared(candidates).prefixes(runs_of(runs)).tolist() == [1700, 2000, 1, 1700]


@pytest.mark.usefixtures("implementation")
def test_runs_of_another_directory_have_no_prefix() -> None:
    needs, found = prepared([[([0], None)]]), runs_of([(5, {0})], version=5)
    assert needs.prefixes(found).tolist() == [0]
    some = needs.prefixes_and_runs(found)
    prefixes, leading, torn, there = some.prefixes, some.leading, some.torn, some.there
    assert (prefixes.tolist(), leading.tolist(), torn) == ([0], [0], False)
    assert there.tolist() == [[False]]


@pytest.mark.usefixtures("implementation")
def test_a_group_with_a_window_counts_again_after_a_gap() -> None:
    runs = [(4, {0, 1}), (2, {0}), (3, {0, 1})]
    candidates = [[([0], None), ([1], window)] for window in (1, 3, 4, None)]

    assert prepared(candidates).prefixes(runs_of(runs)).tolist() == [9, 9, 4, 4]
