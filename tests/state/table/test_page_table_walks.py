"""Goal: long walks of the page table agree with the model too: full pools, many readers."""

from random import Random

import pytest

from tests.state.table.test_page_table_model import PagesMachine
from tests.state.world import PAGE

WALKS = {
    "store": 8, "begin_put": 4, "commit": 4, "abort": 1, "lookup": 4, "acquire": 6, "release": 4,
    "lose": 1, "end": 1, "drop": 1, "time_passes": 2,
}  # fmt: skip
"""How often a step of a walk is which rule."""


@pytest.mark.parametrize("seed", range(40))
def test_long_walks_agree_with_the_model(seed):
    """What short histories rarely reach: full pools, many readers, puts below pending ones."""
    chance = Random(seed)
    machine = PagesMachine()
    quota = chance.choice([6 * PAGE, 12 * PAGE, 1 << 40])
    machine.start(quota=quota, extents=chance.randint(1, 4))
    for name in chance.choices([*WALKS], weights=[*WALKS.values()], k=500):
        step = getattr(machine, name)
        step(ns=chance.randint(1, 4)) if name == "time_passes" else step(chance=chance)
        machine.the_actions_tell_the_whole_truth()
        machine.no_page_is_out_of_reach()
        machine.checks_and_quotas_hold()
    machine.teardown()
