"""A power cut loses what was not synced, and nothing else; what is left is never wrong."""

import pytest

from tests.tier.ssd.histories import live_and_die


@pytest.mark.parametrize("block", range(8))
def test_what_was_synced_survives_every_power_cut(block):
    for seed in range(block * 25, block * 25 + 25):
        live_and_die(seed)


def test_pages_that_were_never_synced_are_lost_sometimes():
    lost = sum(live_and_die(seed, syncs=False) for seed in range(40))

    assert lost > 0, "a disk that loses nothing would prove nothing"


@pytest.mark.soak("crash", minutes=4)
def test_ten_thousand_power_cuts_lose_nothing_that_was_synced():
    for seed in range(10_000):
        live_and_die(seed)
