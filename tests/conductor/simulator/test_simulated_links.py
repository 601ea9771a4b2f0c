"""Simulated links share their bandwidth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.simulator.links import Links

BANDWIDTHS = {"a": 100.0, "b": 100.0, "slow": 10.0}


def drain(links: Links) -> dict[int, float]:
    ended: dict[int, float] = {}
    while (at := links.ends_at) is not None:
        for number in links.ended(at):
            ended[number] = at
        links.check()
    return ended


def test_a_transfer_alone_has_the_whole_link():
    links = Links(BANDWIDTHS)
    number = links.start(("a", "slow"), 1_000, 5.0)

    assert drain(links) == {number: pytest.approx(105.0)}


def test_two_transfers_share_a_link_and_the_second_speeds_up_when_the_first_has_ended():
    links = Links(BANDWIDTHS)
    first = links.start(("a",), 1_000, 0.0)
    second = links.start(("a", "b"), 2_000, 0.0)

    assert drain(links) == {first: pytest.approx(20.0), second: pytest.approx(30.0)}


def test_an_estimate_counts_the_transfers_under_way():
    links = Links(BANDWIDTHS)
    assert links.seconds(("a",), 1_000) == pytest.approx(10.0)

    links.start(("a",), 1_000, 0.0)

    assert links.seconds(("a", "b"), 1_000) == pytest.approx(20.0)


def test_a_stopped_transfer_leaves_its_share_to_others():
    links = Links(BANDWIDTHS)
    first = links.start(("a",), 1_000, 0.0)
    second = links.start(("a",), 1_000, 0.0)

    links.stop(first, 10.0)

    assert drain(links) == {second: pytest.approx(15.0)}
    assert len(links) == 0


transfers = st.lists(
    st.tuples(
        st.floats(0, 50, allow_nan=False),
        st.floats(2, 5_000, allow_nan=False),
        st.sets(st.sampled_from(sorted(BANDWIDTHS)), min_size=1),
    ),
    min_size=1,
    max_size=12,
)


@given(transfers)
def test_every_transfer_ends_and_no_link_carries_more_than_it_can(
    coming: list[tuple[float, float, set[str]]],
):
    links = Links(BANDWIDTHS)
    ended: dict[int, float] = {}
    started: dict[int, tuple[float, float, set[str]]] = {}
    for at, size, over in sorted(coming, key=lambda one: one[0]):
        while links.ends_at is not None and links.ends_at <= at:
            now = links.ends_at
            ended |= dict.fromkeys(links.ended(now), now)
        started[links.start(tuple(sorted(over)), size, at)] = at, size, over
        links.check()
    ended |= drain(links)

    assert ended.keys() == started.keys()
    for number, (at, size, over) in started.items():
        alone = size / min(BANDWIDTHS[one] for one in over)
        assert ended[number] - at >= alone * 0.999 - 1.0
    for name, bandwidth in BANDWIDTHS.items():
        mine = [number for number, one in started.items() if name in one[2]]
        if mine:
            first, last = min(started[n][0] for n in mine), max(ended[n] for n in mine)
            carried = sum(started[n][1] for n in mine)
            assert carried <= bandwidth * (last - first) + 2.0 * len(mine)
