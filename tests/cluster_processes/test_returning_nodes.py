"""Goal: a node that is back before its lease ran out has its name at once, wherever it listens, and
nothing is believed of what it had before."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.store_servers import EtcdServer
from tests.cluster_processes.conftest import ClusterNode, ClusterScene, fetch, is_chain, read
from tests.cluster_processes.failing_stores import ClusterStores, index_process
from tests.conftest import WaitUntil, wait_for
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAGES = 6
JOIN_S = 5.0
"""Half a lease."""


@pytest.fixture(params=[("etcd", "peers"), ("redis", "redis")], ids="-".join)
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ClusterStores]:
    with ClusterStores(*request.param, tmp_path) as made:
        yield made


def record(stores: ClusterStores, name: str) -> bytes | None:
    """What the membership's store has of a node."""
    (server,) = stores.servers
    if isinstance(server, EtcdServer):
        return server.get(f"/kvstore/blue/nodes/{name}")
    return server.get(f"kvstore:{{blue}}:node:{name}")


def end_without_goodbye(node: ClusterNode) -> None:
    """Kill a node and its index process, which cannot take the record away."""
    index = index_process(node)
    os.kill(index, signal.SIGSTOP)
    node.signal(signal.SIGKILL)
    os.kill(index, signal.SIGKILL)


@pytest.mark.parametrize("where", ["same", "other"])
def test_a_node_is_back_before_its_lease_has_run_out(
    scene: ClusterScene, stores: ClusterStores, wait_until: WaitUntil, where: str
) -> None:
    a, b = stores.start(scene, "a", "b")
    kept, lost = content.keys(1, PAGES), content.keys(2, PAGES)
    here, there = scene.space(a), scene.space(b)
    for chain, keys in ((1, kept), (2, lost)):
        assert here.put(keys, content.pages(chain, PAGES)).stored == PAGES
    wait_until(lambda: fetch(there, kept) == PAGES)
    before = record(stores, "a")

    end_without_goodbye(a)
    if where == "other":
        a.move()
    assert record(stores, "a") == before, "its lease has not run out"
    a.start([], **stores.settings)

    assert wait_for(lambda: a.ready()["membership"] == "joined", JOIN_S)
    assert "membership refused" not in a.process.stderr
    stores.meet(b, [a])
    stores.meet(a, [b])
    assert b.stats()["cluster"]["peers"]["a"]["endpoint"].startswith(f"{a.host}:")
    assert fetch(there, lost) == 0, "its earlier boot had these"
    assert is_chain(1, read(there, kept))
    again = scene.space(a)
    keys = content.keys(3, PAGES)
    assert again.put(keys, content.pages(3, PAGES)).stored == PAGES
    wait_until(lambda: fetch(there, keys) == PAGES)
    assert is_chain(3, read(there, keys))
    wait_until(lambda: fetch(again, kept) == PAGES)
    assert is_chain(1, read(again, kept)), "the other node's copy"
