"""Goal: in no history does a client read a wrong byte, wait for ever, or leave anything behind."""

import pytest

from kvstore.state.disk.jobs import DiskRules, SyncPolicy, WritePolicy
from kvstore.testing.simulation import Simulation
from kvstore.testing.timeline import PAGE_BYTES, FaultRates

SEEDS = 30


def disk_rules(seed: int) -> DiskRules:
    """Every write policy with every sync policy, in turn; some with few bytes in flight."""
    return DiskRules(
        list(WritePolicy)[seed % 3],
        list(SyncPolicy)[seed // 3 % 3],
        sync_interval_ns=5_000_000,
        in_flight_bytes_max=(4 if seed % 4 == 3 else 16) * PAGE_BYTES,
        retry_ns=20_000_000,
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_history_of_clients_and_faults_shows_a_wrong_byte(seed):
    outcome = Simulation(seed).run(seconds=0.3)

    assert outcome.pages_stored > 0
    assert outcome.pages_read > 0


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_history_with_a_failing_disk_shows_a_wrong_byte(seed):
    outcome = Simulation(seed, extents=3, rules=disk_rules(seed)).run(seconds=0.3)

    assert outcome.pages_stored > 0
    assert outcome.pages_read > 0


def test_the_histories_with_a_disk_contain_what_they_are_there_for():
    faults = FaultRates(disk=0.1)
    simulation = Simulation(3, extents=3, faults=faults, rules=disk_rules(4))
    outcome = simulation.run(seconds=1.5)
    counts = simulation.node.pages.counts

    assert outcome.pages_from_disk > 10
    assert outcome.pages_persisted > 10
    assert outcome.pages_checked > 10
    assert outcome.disk_failures > 5
    assert counts["disk_quota_pages"] > 0
    assert counts["disk_refused_quota"] > 0


def test_the_histories_contain_what_they_are_there_for():
    outcome = Simulation(1).run(seconds=1.5)

    assert outcome.connections_lost > 10
    assert outcome.processes_ended > 10
    assert outcome.late_pieces > 10, "nobody wrote after it had lost its connection"
    assert outcome.lookups_waited > 0


@pytest.mark.parametrize("seed", range(5))
def test_no_history_of_clients_whose_end_nobody_tells_shows_a_wrong_byte(seed):
    outcome = Simulation(seed, faults=FaultRates(process=0.01, unwatched=1.0)).run(seconds=1.0)

    assert outcome.extents_retired > 0


def test_one_seed_is_one_history():
    assert Simulation(7).run(0.3) == Simulation(7).run(0.3) != Simulation(8).run(0.3)


def test_without_faults_nothing_is_lost():
    outcome = Simulation(3, faults=FaultRates(0, 0, 0)).run(0.5)

    assert outcome.connections_lost == outcome.processes_ended == 5, "the five at the end"
    assert outcome.late_pieces == 0


@pytest.mark.soak("simulation", minutes=2.5)
@pytest.mark.parametrize("hundred", range(20))
def test_two_thousand_histories_show_no_wrong_byte(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        Simulation(10_000 + seed).run(seconds=2.0)


@pytest.mark.soak("simulation", minutes=1.5)
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_histories_with_a_failing_disk_show_no_wrong_byte(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        Simulation(20_000 + seed, extents=3, rules=disk_rules(seed)).run(seconds=1.0)
