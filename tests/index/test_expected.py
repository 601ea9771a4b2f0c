"""Expected pages against a model: each of them counts exactly while somebody expects it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index import expected
from kvstore.index.control import Expect, IndexSettings, SourceBounds
from kvstore.index.expected import Expectations
from tests.local_index import LocalIndex

WORKERS = ("a", "b")
SPANS = st.tuples(
    st.sampled_from(WORKERS),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 20),
    st.integers(0, 20),
)


def chains(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.uint64)


def applied(expectations: Expectations, now: int, there: set[tuple[str, int]]) -> None:
    for change in expectations.due(now):
        pages = {(change.worker, page) for page in change.chains.tolist()}
        if change.begin:
            there |= pages
        else:
            assert pages <= there, "what ends had begun"
            there -= pages


@given(st.lists(SPANS, max_size=12))
def test_a_page_counts_exactly_while_somebody_expects_it(spans):
    expectations, there = Expectations(), set()
    for worker, pages, start, length in spans:
        expectations.add(worker, chains(*pages), start, start + length)
    for now in range(45):
        applied(expectations, now, there)
        expectations.check()
        assert there == {
            (worker, page)
            for worker, pages, start, length in spans
            for page in pages
            if start <= now < start + length
        }
    assert len(expectations) == 0


def test_what_a_forgotten_worker_was_expected_to_have_never_comes_back():
    expectations, there = Expectations(), set()
    expectations.add("a", chains(1, 2), 0, 10)
    expectations.add("a", chains(3), 5, 10)
    expectations.add("b", chains(1), 0, 10)
    applied(expectations, 1, there)
    expectations.forget("a")
    expectations.check()
    there = {pair for pair in there if pair[0] != "a"}  # its entries are dropped
    applied(expectations, 6, there)
    assert there == {("b", 1)}


@given(st.lists(st.tuples(SPANS, st.integers(0, 45)), max_size=12))
def test_what_is_withdrawn_counts_only_if_somebody_else_expects_it(spans):
    expectations, there = Expectations(), set()
    for (worker, pages, start, length), _ in spans:
        expectations.add(worker, chains(*pages), start, start + length)
    for now in range(45):
        for (worker, pages, start, length), until in spans:
            if until == now:
                expectations.withdraw(worker, chains(*pages), start + length, now)
                expectations.check()
        applied(expectations, now, there)
        expectations.check()
        left = [  # of equal ones any may be withdrawn
            one for one, until in spans if one[2] <= now < min(until, one[2] + one[3])
        ]
        same = {(one[0], tuple(one[1]), one[2] + one[3]) for one, _ in spans}
        if len(same) == len(spans):
            assert there == {(worker, page) for worker, pages, _, _ in left for page in pages}
    assert len(expectations) == 0


def test_what_was_left_out_for_room_is_withdrawn_with_the_rest(monkeypatch):
    monkeypatch.setattr(expected, "EXPECTED_MAX", 3)
    expectations, there = Expectations(), set()
    expectations.add("a", chains(1), 0, 5)
    expectations.add("a", chains(2, 3, 4), 0, 9)
    applied(expectations, 0, there)
    expectations.withdraw("a", chains(2, 3, 4), 9, 1)
    expectations.withdraw("a", chains(2, 3, 4), 9, 1)
    expectations.withdraw("b", chains(1), 5, 1)
    expectations.withdraw("a", chains(7), 5, 1)
    applied(expectations, 1, there)
    assert (there, len(expectations)) == ({("a", 1)}, 1)


def test_too_many_expected_pages_are_refused_tails_first(monkeypatch):
    monkeypatch.setattr(expected, "EXPECTED_MAX", 3)
    expectations, there = Expectations(), set()
    expectations.add("a", chains(1, 2), 0, 5)
    expectations.add("a", chains(3, 4), 0, 9)
    assert expectations.refused == 1
    applied(expectations, 0, there)
    assert there == {("a", 1), ("a", 2), ("a", 3)}
    applied(expectations, 5, there)
    expectations.add("a", chains(7, 8), 5, 9)
    assert expectations.refused == 1, "what has ended leaves room"


def test_expected_pages_that_are_refused_are_reported(monkeypatch):
    monkeypatch.setattr(expected, "EXPECTED_MAX", 1)
    index = LocalIndex(IndexSettings(100, SourceBounds(1.0, 1.0, 100)))
    table, _ = index.present()
    assert table is not None
    index.expect(Expect("engine/e", chains(1, 2, 3).tobytes(), 0, 10), table)
    _, report = index.present()
    assert (report.expected, report.dropped) == (1, 2)
