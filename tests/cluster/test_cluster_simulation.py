"""Goal: whatever happens between nodes, no engine reads a wrong byte or waits too long.

A seed that fails is run again by ``drawn_cluster(seed).run(SECONDS)`` with the limits of ``hurry``.
Its error has the last events of the page concerned, and the state of every node.
"""

import pytest

from kvstore.state.disk.jobs import DiskRules, SyncPolicy, WritePolicy
from kvstore.state.remote import pages, rates
from kvstore.testing.cluster import (
    ClusterFaults,
    ClusterSimulation,
    ClusterSize,
    drawn_cluster,
)
from kvstore.testing.timeline import PAGE_BYTES, FaultRates

SEEDS = 200
SECONDS = 0.5
MS = 1_000_000


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are old sooner, peers are asked again sooner, and runs of few pages are split."""
    monkeypatch.setattr(pages, "PART_BYTES_MIN", PAGE_BYTES)
    monkeypatch.setattr(pages, "FRESH_NS", 30 * MS)
    monkeypatch.setattr(rates, "AWAY_NS", 40 * MS)


@pytest.mark.parametrize("ten", range(SEEDS // 10))
def test_no_history_of_a_cluster_shows_a_wrong_byte(ten):
    pages_read = 0
    for seed in range(10 * ten, 10 * ten + 10):
        outcome = drawn_cluster(seed).run(SECONDS)
        pages_read += outcome.pages_read  # none where all nodes are killed again and again

    assert pages_read > 0


def test_the_histories_of_a_cluster_contain_what_they_are_there_for():
    outcomes = [ClusterSimulation(seed).run(1.0) for seed in range(4)]

    def total(name: str) -> int:
        return sum(getattr(outcome, name) for outcome in outcomes)

    assert total("pages_fetched") > 30
    assert total("fetches_failed") > 10
    assert total("fetches_unsettled") > 0
    assert total("nodes_killed") > 1
    assert total("nodes_stopped") > 3
    assert total("partitions") > 3
    assert total("nodes_left") > 3
    assert total("lookups_waited") > 3
    assert total("copies_made") > 3


def test_histories_have_fetches_of_all_shards_and_nodes_that_come_back_with_their_disk_or_without():
    rules = DiskRules(WritePolicy.THROUGH, SyncPolicy.INTERVAL, 5 * MS, 16 * PAGE_BYTES, 20 * MS)
    size = ClusterSize(disks=2, shards=3)
    faults = ClusterFaults(kill=2.0)
    outcomes = [
        ClusterSimulation(seed, size, faults=faults, rules=rules).run(1.0) for seed in range(4)
    ]

    for name in (
        "window_pages_fetched", "disks_lost", "pages_adopted", "pages_from_disk", "pages_persisted",
    ):  # fmt: skip
        assert sum(getattr(outcome, name) for outcome in outcomes) > 1, name
    assert sum(one.pages_fetched - one.window_pages_fetched for one in outcomes) > 10


def test_a_cluster_without_faults_loses_nothing():
    faults = ClusterFaults(trouble=0, damage=0, loss=0)
    outcome = ClusterSimulation(5, faults=faults, rates=FaultRates(0, 0, 0)).run(0.5)

    assert outcome.pages_fetched > 10
    assert outcome.fetches_unsettled == outcome.nodes_killed == outcome.partitions == 0


def test_one_seed_is_one_history_of_a_cluster():
    assert drawn_cluster(7).run(0.2) == drawn_cluster(7).run(0.2) != drawn_cluster(8).run(0.2)


def test_a_history_that_fails_tells_the_story_of_the_page_and_of_the_cluster():
    cluster = drawn_cluster(1)
    cluster.run(0.1)
    node = cluster.nodes[0]
    node.node.pages.slots.extents[0].pinned += 1

    with pytest.raises(AssertionError) as failed:
        cluster.check()

    told = "\n".join(failed.value.__notes__)
    assert "the last events" in told


@pytest.mark.soak("simulation", minutes=1)
@pytest.mark.parametrize("hundred", range(100))
def test_ten_thousand_histories_of_a_cluster_show_no_wrong_byte(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        drawn_cluster(1000 + seed).run(0.6)
