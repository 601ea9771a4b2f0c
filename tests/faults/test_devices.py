"""Two engines on one device and one node, and what one of them does not survive.

Host memory plays the device, with the ring, the threads and the staging memory that a GPU has.
"""

import signal

import pytest

from tests.conftest import WaitUntil
from tests.faults.conftest import Puppet, Scene

torch = pytest.importorskip("torch")

PAGES = 12
"""Pages of 1 MiB: three slices of the ring."""
FIRST, SECOND, THIRD = 1, 2, 3
ON = {"device": "cpu:0"}


@pytest.fixture
def engines(scene: Scene) -> tuple[Puppet, Puppet]:
    """Two processes that have both copied to and from their device."""
    one, other = scene.puppet(), scene.puppet()
    assert one.do("extract", chain=FIRST, count=PAGES, **ON)["stored"] == PAGES
    for engine in (one, other):
        assert restored(engine, FIRST) == PAGES
    return one, other


def restored(engine: Puppet, chain: int) -> int:
    """Restore a chain on the device; returns the number of pages, all of them right."""
    found = engine.do("restore", chain=chain, count=PAGES, **ON)
    assert found["wrong"] == []
    return int(found["pages"])


@pytest.mark.parametrize(
    ("number", "where", "held"),
    [(signal.SIGKILL, "gather", "puts"), (signal.SIGSTOP, "scatter", "leases")],
    ids=["killed while it stores", "stopped while it loads"],
)
def test_an_engine_that_ends_or_stops_in_a_copy_does_not_disturb_the_other(
    scene: Scene, engines: tuple[Puppet, Puppet], wait_until: WaitUntil, number, where, held
):
    one, other = engines
    one.do("arm", where=where, when="middle")
    do, chain = ("restore", FIRST) if where == "scatter" else ("extract", SECOND)
    copying = one.begin(do, chain=chain, count=PAGES, **ON)
    one.at(where)
    assert scene.daemon.stats()[held] > 0

    one.signal(number)

    assert restored(other, FIRST) == PAGES
    assert other.do("extract", chain=THIRD, count=PAGES, **ON)["stored"] == PAGES
    assert restored(other, THIRD) == PAGES
    if number is signal.SIGKILL:
        wait_until(lambda: scene.daemon.stats()[held] == 0)
        assert other.do("extract", chain=SECOND, count=PAGES, **ON)["stored"] == PAGES
        assert restored(other, SECOND) == PAGES
    else:
        assert scene.daemon.stats()[held] > 0, "it may go on"
        one.signal(signal.SIGCONT)
        one.go(where)
        assert one.end(copying) == {"pages": PAGES, "wrong": []}
        assert restored(one, THIRD) == PAGES
    assert other.do("state")["troubles"] == {}
