"""Goal: what a node acknowledged as durable is there after a power cut, what as evicted is not."""

import pytest

from kvstore.state.disk.graves import Graves
from kvstore.state.disk.jobs import SyncPolicy
from kvstore.state.disk.syncs import Syncs
from kvstore.testing.life import Toll
from kvstore.testing.powercut import History

SEEDS = 60
CONTROL_SEEDS = 15
EVICTION_SEEDS = 180
POLICIES = (SyncPolicy.INTERVAL, SyncPolicy.ALWAYS)


def add_up(tolls: list[Toll]) -> Toll:
    total = Toll()
    for toll in tolls:
        for name, value in vars(toll).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def run(seeds: range, *policies: SyncPolicy, cuts: int = 1) -> Toll:
    """Each seed once, the policies in turn."""
    return add_up([History(seed, policies[seed % len(policies)]).run(cuts) for seed in seeds])


def run_with_evictions(seeds: range, cuts: int = 1) -> Toll:
    histories = [History(seed, POLICIES[seed % 2], evictions=True) for seed in seeds]
    return add_up([history.run(cuts, fully=False) for history in histories])


def test_no_power_cut_loses_a_page_that_was_acknowledged_as_durable():
    toll = run(range(SEEDS), *POLICIES)

    assert toll.cuts == SEEDS
    assert toll.survived > 10 * SEEDS
    assert toll.stepwise > SEEDS, "long prompts with few bytes in flight"
    assert toll.read > 50 * SEEDS


def test_without_syncs_the_same_power_cuts_lose_pages_that_had_been_written():
    toll = run(range(CONTROL_SEEDS), SyncPolicy.NONE)

    assert toll.acknowledged == 0, "nothing is durable where nothing is synced"
    assert toll.written > 0
    assert toll.lost > CONTROL_SEEDS, "a disk that loses nothing proves nothing"


def test_the_histories_contain_what_they_are_there_for():
    toll = run(range(4), *POLICIES, cuts=4)

    assert toll.cuts == 16
    assert toll.reclaimed > 16, "segments are reclaimed while the power fails"
    assert toll.removed > 0
    assert toll.survived > 60


def test_a_node_that_acknowledges_before_the_sync_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Syncs, "wait", lambda syncs, durable: syncs.ended.append(durable))

    with pytest.raises(AssertionError, match="durable pages are lost"):
        run(range(10), SyncPolicy.INTERVAL)


def test_no_power_cut_brings_a_page_back_whose_eviction_was_acknowledged():
    toll = run_with_evictions(range(EVICTION_SEEDS))

    assert toll.cuts == EVICTION_SEEDS
    assert toll.evicted > 10 * EVICTION_SEEDS
    assert toll.gone > 10 * EVICTION_SEEDS
    assert 0 < toll.returned < toll.doubtful, "a cut before the sync can undo an eviction, or not"


def test_an_eviction_that_writes_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Graves, "bury", lambda *_: None)
    monkeypatch.setattr(Graves, "bury_all", lambda *_: None)

    with pytest.raises(AssertionError, match="evicted pages are back"):
        run_with_evictions(range(20))


def test_one_seed_is_one_history():
    assert History(7).run(2) == History(7).run(2) != History(8).run(2)


@pytest.mark.soak("crash", minutes=0.5)
@pytest.mark.parametrize("hundred", range(100))
def test_ten_thousand_power_cuts_undo_nothing_that_was_acknowledged(hundred: int):
    seeds = range(1_000 + 100 * hundred, 1_100 + 100 * hundred)

    assert run(seeds, *POLICIES).survived > 0
    assert run_with_evictions(seeds, cuts=2).gone > 0
    assert run(seeds[:20], SyncPolicy.NONE).lost > 0
