"""Goal: two nodes whose link is cut in the middle of a read serve their own pages, hold nothing for
each other, and read each other's pages again when it is healed."""

from collections.abc import Iterator
from functools import partial
from time import monotonic

import pytest

from tests.cluster_processes.conftest import (
    CLEAN_WAIT_S,
    FETCH_WAIT_S,
    ClusterScene,
    begin_fetch,
    fetch,
    is_chain,
    read,
)
from tests.cluster_processes.failing_stores import LocalHits
from tests.cluster_processes.networks import ADDRESSES, CutLink, cut_link
from tests.cluster_processes.test_strangers import certificates
from tests.conftest import WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PAGES = 16
LOCAL_S = 1.0
TRIES = 3
"""A busy machine may add a second to one of them; a node that is asked adds two to each."""
HEAL_S = 15.0


@pytest.fixture
def link() -> Iterator[CutLink]:
    with cut_link() as made:
        yield made


@pytest.mark.parametrize("when", ["lease", "read"])
def test_a_link_is_cut_during_a_read_and_healed(
    scene: ClusterScene, link: CutLink, wait_until: WaitUntil, when: str
) -> None:
    a, b = scene.add("a", "b")
    for side, node in enumerate((a, b)):
        node.host, node.run_in = ADDRESSES[side], partial(link.program, side)
    for node in (a, b):
        node.start([a, b], **certificates())
    scene.meet(a, b)
    keys = content.keys(1, PAGES)
    assert scene.space(a).put(keys, content.pages(1, PAGES)).stored == PAGES
    b.knows(a, PAGES)
    there = scene.space(b)
    with LocalHits(scene.space(b)) as local:
        b.close_gate(when)
        job = begin_fetch(there, keys)
        b.at_gate(when)
        assert a.held()["loans"] == 1
        link.cut()

        came = job.result(FETCH_WAIT_S)
        assert came < PAGES
        assert b.held()["limbo"] > 0, "whoever stands at the gate may write still"
        b.open_gate(when)
        wait_until(lambda: not b.held(), CLEAN_WAIT_S, "slots that nobody writes any more")
        wait_until(lambda: not a.held(), CLEAN_WAIT_S, "what was lent")
        wait_until(lambda: not b.stats()["cluster"]["peers"]["a"]["up"])
        took_s = list[float]()
        for _ in range(TRIES):
            begun = monotonic()
            assert fetch(there, content.keys(1, PAGES)) == came
            took_s.append(monotonic() - begun)
        assert min(took_s) < LOCAL_S, "nobody who is away is asked"
        local.go_on()
        wait_until(lambda: not a.stats()["cluster"]["peers"]["b"]["up"])

        link.heal()
        wait_until(lambda: fetch(there, keys) == PAGES, HEAL_S)
        assert is_chain(1, read(there, keys))
        scene.meet(a, b)
    local.check()
