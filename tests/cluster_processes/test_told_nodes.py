"""Goal: nodes that find each other in a real etcd or Redis go on whatever happens to it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.store_servers import EtcdServer, RedisServer
from tests.cluster_processes.conftest import ClusterNode, ClusterScene, fetch, is_chain, read
from tests.cluster_processes.store_scenes import KINDS, start_server
from tests.conftest import WaitUntil, wait_for
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
LEAVE_WAIT_S = 8.0
"""Shorter than the lease: the record of a node that ends is taken away."""


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer | RedisServer]:
    with start_server(request.param, tmp_path / "server") as made:
        yield made


def kind(server: EtcdServer | RedisServer) -> str:
    return "etcd" if isinstance(server, EtcdServer) else "redis"


def settings(server: EtcdServer | RedisServer) -> dict[str, object]:
    name = kind(server)
    return {"cluster__membership": name, f"{name}__endpoints": server.endpoint}


def names(node: ClusterNode) -> set[str]:
    return set(node.stats()["cluster"]["peers"])


def test_nodes_without_a_list_read_each_others_pages_and_the_dead_are_forgotten_at_once(
    scene: ClusterScene, server: EtcdServer | RedisServer, wait_until: WaitUntil
) -> None:
    a, b = scene.add("a", "b")
    for node in (a, b):
        node.start([], **settings(server))
    scene.meet(a, b)
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)
    assert fetch(there, keys) == 6
    assert is_chain(1, read(there, keys))
    assert b.ready()["membership"] == "joined"

    os.kill(b.index_pid, signal.SIGKILL)
    wait_until(lambda: b.stats()["cluster"]["directory"]["restarts"] == 1)
    wait_until(lambda: b.stats()["cluster"]["membership"]["changes"].get("joined") == 2)
    assert b.process.stderr.count("node up peer=a") == 1, "the session stays"
    assert "node left" not in b.process.stderr

    a.signal(signal.SIGKILL)
    assert wait_for(lambda: names(b) == set(), LEAVE_WAIT_S)
    assert wait_for(lambda: b.process.stderr.count("node left peer=a") == 1, LEAVE_WAIT_S)
    a.restart()
    scene.meet(a, b)


def test_a_store_that_is_away_at_the_start_and_later_stops_no_node(
    scene: ClusterScene, server: EtcdServer | RedisServer, wait_until: WaitUntil
) -> None:
    a, b = scene.add("a", "b")
    server.kill()
    for node in (a, b):
        node.start([], **settings(server))
    wait_until(lambda: a.ready()["membership"] == b.ready()["membership"] == "away")
    keys = content.keys(2, 3)
    assert scene.space(a).put(keys, content.pages(2, 3)).stored == 3, "it serves alone"
    server.start()
    scene.meet(a, b)

    server.kill()
    wait_until(lambda: b.ready()["membership"] == "away")
    b.knows(a, 3)
    assert fetch(scene.space(b), keys) == 3, "what was known last counts"
    server.start()
    wait_until(lambda: b.ready()["membership"] == "joined")
    assert b.process.stderr.count("node up peer=a") == 1


def test_the_name_of_a_live_node_is_refused_and_taken_when_that_node_has_ended(
    scene: ClusterScene, server: EtcdServer | RedisServer, wait_until: WaitUntil
) -> None:
    a, twin = scene.add("a", "twin")
    a.start([], **settings(server))
    wait_until(lambda: a.ready()["membership"] == "joined")
    twin.start([], **settings(server), node__name="a")
    wait_until(lambda: twin.ready()["membership"] == "refused")
    said = twin.stats()["cluster"]["membership"]
    assert (said["field"], a.ready()["membership"]) == ("name", "joined")
    wait_until(lambda: twin.process.stderr.count("membership refused") == 1)

    a.process.send_signal(signal.SIGTERM)
    assert a.process.wait() == 0
    assert wait_for(lambda: twin.ready()["membership"] == "joined", 2 * LEAVE_WAIT_S)
