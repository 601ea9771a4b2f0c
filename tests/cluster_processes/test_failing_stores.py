"""Goal: etcd or Redis that is killed, stopped, emptied or replaced stalls nobody, and costs misses
at most; then pages are found again, and no node was restarted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import pytest

from kvstore.client.space import Space
from kvstore.protocol.page import PrefixKeys
from kvstore.transport.reader import CONNECTIONS
from tests.cluster_processes.conftest import (
    FETCH_WAIT_S,
    ClusterNode,
    ClusterScene,
    begin_fetch,
    fetch,
    is_chain,
    read,
)
from tests.cluster_processes.failing_stores import (
    ClusterStores,
    LocalHits,
    Server,
    descriptors,
    shared,
    threads,
)
from tests.conftest import WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAGES = 8
READ_S = 2.0
BUSY_S = 4.0
"""What a busy machine may add; a client gives up a node that does not answer after 5 s more."""
AGAIN_S = 30.0


class Harm(NamedTuple):
    """What is done to a store, and what ends it; whether nodes notice it at once."""

    begin: Callable[[Server], None]
    end: Callable[[Server], None]
    shows: bool


def nothing(server: Server) -> None:
    del server


def replace(server: Server) -> None:
    server.forget()
    server.start()


def empty(server: Server) -> None:
    server.empty()


HARMS = {
    "killed": Harm(lambda one: one.kill(), lambda one: one.start(), shows=True),
    "stopped": Harm(lambda one: one.stop(), lambda one: one.go_on(), shows=True),
    "emptied": Harm(empty, nothing, shows=False),
    "replaced": Harm(lambda one: one.kill(), replace, shows=True),
}
STORES = [("etcd", "peers"), ("redis", "redis")]


@pytest.fixture(params=STORES, ids="-".join)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClusterStores]:
    with ClusterStores(*request.param, tmp_path) as made:
        yield made


@pytest.mark.parametrize("how", HARMS)
def test_a_store_that_fails_stalls_no_read_and_pages_are_found_again(
    scene: ClusterScene, stores: ClusterStores, wait_until: WaitUntil, how: str
) -> None:
    a, b = stores.start(scene, "a", "b")
    here, there = scene.space(a), scene.space(b)
    first = put(here, 1)
    wait_until(lambda: fetch(there, first[:2]) == 2, AGAIN_S)
    most = descriptors(b) + CONNECTIONS, threads(b) + CONNECTIONS
    harm = HARMS[how]
    with LocalHits(scene.space(b)) as local:
        b.close_gate("lease")
        job = begin_fetch(there, first)
        b.at_gate("lease")
        stores.each(harm.begin)
        b.open_gate("lease")
        assert job.result(FETCH_WAIT_S) == PAGES, "a read under way needs no store"
        if harm.shows:
            wait_until(lambda: stores.is_away(a) and stores.is_away(b), AGAIN_S)
            without = "degraded" if stores.directory == "redis" else "current"
            wait_until(lambda: stores.directory_is(without, b), AGAIN_S)

        second = put(here, 2)
        begun = monotonic()
        came = begin_fetch(there, second).result(FETCH_WAIT_S)
        assert monotonic() - begun < READ_S + BUSY_S
        assert came in (0, PAGES)
        local.go_on()

        stores.each(harm.end)
        found_again(wait_until, there, content.keys(2, PAGES), 2)
        found_again(wait_until, there, put(here, 3), 3)
        wait_until(lambda: stores.has_met(a, ["b"]) and stores.has_met(b, ["a"]), AGAIN_S)
        wait_until(lambda: stores.directory_is("current", b), AGAIN_S)
    local.check()
    for node, other in ((a, b), (b, a)):
        wait_until(lambda: asks_nothing(node, stores), AGAIN_S)  # noqa: B023
        goes_on(node, other)
    wait_until(lambda: descriptors(b) <= most[0] and threads(b) <= most[1], AGAIN_S, "growth")


def put(space: Space, chain: int) -> PrefixKeys:
    """Store a chain; returns its keys."""
    keys = content.keys(chain, PAGES)
    assert space.put(keys, content.pages(chain, PAGES)).stored == PAGES
    return keys


def found_again(wait_until: WaitUntil, space: Space, keys: PrefixKeys, chain: int) -> None:
    """Wait until another node's pages come."""
    wait_until(lambda: fetch(space, keys) == PAGES, AGAIN_S)
    assert is_chain(chain, read(space, keys))


def asks_nothing(node: ClusterNode, stores: ClusterStores) -> bool:
    """Whether no question to the directory is left; a node announces what it took on its own."""
    if stores.directory != "redis":
        return True
    told = shared(node)
    return (told["waiting"], told["outstanding"]) == (0, 0)


def goes_on(node: ClusterNode, other: ClusterNode) -> None:
    """Nothing of a node was started again, and it has said all."""
    log = node.process.stderr
    ups = [line for line in log.splitlines() if f"peer={other.name}" in line]
    assert log.count(f"node up peer={other.name}") == 1, f"the session stays: {ups}"
    assert f"node left peer={other.name}" not in log
    assert node.stats()["cluster"]["directory"]["restarts"] == 0
