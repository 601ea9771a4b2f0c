"""Goal: whatever happens to prefill, decode and what is between them, no wrong byte counts.

A seed that fails is run again by ``drawn_handoffs(seed).run(SECONDS)``.
"""

import pytest

from kvstore.testing.handoff import SPLITS, HandoffFaults, HandoffSimulation, drawn_handoffs

SEEDS = 200
SECONDS = 3.0


@pytest.mark.parametrize("twenty", range(SEEDS // 20))
def test_no_history_of_handoffs_has_a_wrong_byte_or_holds_anything_at_its_end(twenty):
    succeeded = 0
    for seed in range(20 * twenty, 20 * twenty + 20):
        succeeded += drawn_handoffs(seed).run(SECONDS).succeeded

    assert succeeded > 0


def test_the_histories_of_handoffs_contain_what_they_are_there_for():
    outcomes = [drawn_handoffs(5 * seed).run(12.0) for seed in range(8)]  # faults and ranks

    for name in vars(outcomes[0]):
        assert sum(getattr(one, name) for one in outcomes) > 0, name
    assert sum(one.succeeded for one in outcomes) > 50
    assert sum(one.registry_away + one.registry_late for one in outcomes) > 5
    assert sum(one.registrations_refused for one in outcomes) > 5
    assert sum(one.limbo for one in outcomes) > 20
    assert sum(min(one.prefill_failed, one.decode_failed) for one in outcomes) > 20


def test_handoffs_without_faults_all_succeed():
    faults = HandoffFaults(
        lost=0, doubled=0, flipped=0, stalled=0, hung=0, aborted=0, careless=0, trouble=0
    )
    outcome = HandoffSimulation(5, faults).run(10.0)

    assert outcome.succeeded > 20
    assert outcome.landed_late == outcome.links_closed == outcome.reused == 0


@pytest.mark.parametrize(
    "parts",
    SPLITS[1:],
    ids=["2to1", "stages", "1to2", "one-idle", "stages-to-heads", "2to3", "4to-stages"],
)
def test_handoffs_between_several_ranks_succeed_without_faults(parts):
    faults = HandoffFaults(
        lost=0,
        doubled=0,
        flipped=0,
        misplaced=0,
        stalled=0,
        hung=0,
        aborted=0,
        careless=0,
        trouble=0,
    )
    simulation = HandoffSimulation(7, faults, parts)
    outcome = simulation.run(4.0)

    assert outcome.succeeded_states == (outcome.succeeded if parts[0] == parts[1] else 0)

    assert outcome.succeeded > 8
    assert outcome.succeeded > 0.8 * outcome.requests, "some come at one side only, or mixed up"
    assert outcome.landed_late == outcome.links_closed == outcome.reused == 0


def test_a_link_that_is_given_up_for_blocks_in_limbo_carries_no_other_handoff():
    faults = HandoffFaults(
        lost=0, doubled=0, flipped=0, misplaced=0, stalled=0, careless=0, trouble=0,
        aborted=0.01, hung=0.03,
    )  # fmt: skip
    outcomes = [HandoffSimulation(seed, faults, SPLITS[1]).run(12.0) for seed in range(8)]

    assert sum(one.given_up for one in outcomes) > 10, "each has checked it"


def test_one_seed_is_one_history_of_handoffs():
    assert drawn_handoffs(7).run(4) == drawn_handoffs(7).run(4) != drawn_handoffs(8).run(4)


@pytest.mark.soak("simulation", minutes=2)
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_histories_of_handoffs(thousand):
    for seed in range(1_000 * thousand, 1_000 * thousand + 1_000):
        drawn_handoffs(1_000_000 + seed).run(6.0)
