"""Goal: tenants get equal parts of what there is if they ask for more, and none is idle."""

import random

import pytest

from conductor.routing import shares
from conductor.routing.shares import HALF_S, FairShares, in_turn
from tests.conductor.routing.columns import request, waiting


def test_one_tenant_alone_is_never_above_its_share() -> None:
    fair = FairShares()
    fair.came("a")
    fair.charge("a", 1e6, 0.0)
    assert not fair.levels()


def test_who_got_more_than_its_share_is_told_in_steps() -> None:
    fair = FairShares()
    for tenant, got in (("a", 600), ("b", 100), ("c", 100), ("d", 0)):
        fair.came(tenant)
        fair.charge(tenant, got, 0.0)
    assert fair.levels() == {"a": 6}  # three times its share of 200
    fair.went("b")
    fair.went("c")
    fair.went("d")
    assert not fair.levels()
    fair.check()


def test_what_was_got_long_ago_counts_less() -> None:
    fair = FairShares()
    fair.came("a")
    fair.came("b")
    fair.charge("a", 1_000, 0.0)
    fair.charge("b", 100, 4 * HALF_S)
    assert fair.levels() == {"b": 1}
    fair.charge("b", 10, 5_000 * HALF_S)
    assert fair.levels() == {"b": 4}
    fair.check()


def test_what_was_got_so_long_ago_that_it_is_next_to_nothing_is_no_share() -> None:
    fair = FairShares()
    for tenant in "ab":
        fair.came(tenant)
    fair.charge("a", 1, 0.0)
    fair.charge("elsewhere", 1, 1_074 * HALF_S)
    assert fair.levels() == {}
    fair.check()


def test_two_who_want_all_get_half_and_a_third_all_it_wants() -> None:
    fair, chance = FairShares(), random.Random(1)
    got = {"small": 0.0, "large": 0.0, "rare": 0.0}
    for tenant in got:
        fair.came(tenant)
    asked = waiting([request(n, tenant=name) for n, name in enumerate(got, 1)])
    for turn in range(4_000):
        rows = [0, 1, 2] if turn % 10 == 0 else [0, 1]  # the last seldom asks for anything
        chance.shuffle(rows)
        first = in_turn(rows, asked, fair.levels())[0]
        tenant = asked.tenants[first]
        tokens = {"small": 10, "large": 300, "rare": 20}[tenant]
        got[tenant] += tokens
        fair.charge(tenant, tokens, turn * 0.1)
    assert got["small"] == pytest.approx(got["large"], rel=0.2)
    assert got["rare"] == pytest.approx(400 * 20, rel=0.1)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "TENANTS_MAX", 3)
    fair = FairShares()
    for number in range(20):
        fair.came(f"t{number}")
        fair.charge(f"t{number}", 10, 0.0)
        fair.went(f"t{number}")
    fair.check()


def test_urgent_ones_come_first_then_those_within_their_share_then_the_policys_order() -> None:
    asked = waiting(
        [
            request(1, tenant="a"), request(2, tenant="b"), request(3, priority=-1, tenant="a"),
            request(4, tenant="c"),
        ]
    )  # fmt: skip
    assert list(in_turn([3, 2, 1, 0], asked, {"a": 1})) == [2, 3, 1, 0]
    assert list(in_turn([3, 2, 1, 0], asked, {})) == [2, 3, 1, 0]
    same = waiting([request(1), request(2)])
    assert list(in_turn([1, 0], same, {})) == [1, 0]
