"""Nodes that read the pages of one tenant over Mooncake, in a network of their own."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

from kvstore.client.space import Space
from tests.cluster_processes.conftest import (
    CLEAN_WAIT_S,
    ClusterNode,
    ClusterScene,
    begin_fetch,
    fetch,
    is_chain,
    read,
)
from tests.cluster_processes.mooncake_scenes import Alone
from tests.conftest import Spawn, WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

SETTINGS = {
    "cluster__transports": '["mooncake", "tcp"]', "cluster__mooncake_protocol": "tcp",
    "cluster__rdma_tenants": '["default"]', "host__capacity_bytes": 256 << 20,
}  # fmt: skip
EXTENT_BYTES = 16 << 20


def two_nodes(scene: ClusterScene, spawn: Spawn) -> tuple[ClusterNode, ClusterNode]:
    network = Alone(spawn)
    a, b = scene.add("a", "b")
    for node in (a, b):
        node.run_in = network.program
        node.start([a, b], **SETTINGS)
    scene.meet(a, b)
    return a, b


def counts(node: ClusterNode, name: str = "mooncake") -> dict[str, int]:
    found: dict[str, int] = node.stats()["cluster"]["transports"][name]
    return found


def engines(node: ClusterNode) -> list[int]:
    """The processes of its engines."""
    pid = node.process.pid
    found = []
    for one in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in one.read_text().split():
            if b"engine_child" in Path(f"/proc/{child}/cmdline").read_bytes():
                found += [int(child)]
    return found


def registered(scene: ClusterScene, node: ClusterNode, wait_until: WaitUntil) -> Space:
    """A client of a node, whose first extent is registered."""
    space = scene.space(node)
    assert space.put(content.keys(900, 1), content.pages(900, 1)).stored == 1
    wait_until(lambda: counts(node)["registered_bytes"] > 0)
    return space


def test_200_restores_are_equal_and_go_over_mooncake(
    scene: ClusterScene, spawn: Spawn, wait_until: WaitUntil
) -> None:
    a, b = two_nodes(scene, spawn)
    here, there = registered(scene, a, wait_until), registered(scene, b, wait_until)
    for chain in range(1, 201):
        assert here.put(content.keys(chain, 1), content.pages(chain, 1)).stored == 1
    for chain in range(301, 301 + 255):  # memory is registered after it was used first
        assert there.put(content.keys(chain, 1), content.pages(chain, 1)).stored == 1
    b.knows(a, 201)
    wait_until(lambda: counts(a)["registered_bytes"] >= 13 * EXTENT_BYTES)
    wait_until(lambda: counts(b)["registered_bytes"] == SETTINGS["host__capacity_bytes"])

    for chain in range(1, 201):
        keys = content.keys(chain, 1)
        # A directory that a busy machine keeps for 50 ms from answering counts as empty.
        wait_until(lambda: fetch(there, keys) == 1)  # noqa: B023
        assert is_chain(chain, read(there, keys))

    assert counts(b)["read_pages"] == 200
    assert counts(b)["transfers_failed"] == counts(b)["wrong_pages"] == 0


def test_pages_of_a_tenant_that_is_not_named_go_over_tcp(
    scene: ClusterScene, spawn: Spawn, wait_until: WaitUntil
) -> None:
    a, b = two_nodes(scene, spawn)
    registered(scene, a, wait_until)
    registered(scene, b, wait_until)
    before = counts(a)["registered_bytes"]
    other = msgspec.structs.replace(content.IDENTITY, tenant="other")
    here, there = (scene.connect(one).space(other, [content.SHARD]) for one in (a, b))
    keys = content.keys(1, 4)
    assert here.put(keys, content.pages(1, 4)).stored == 4
    b.knows(a, 5)

    assert fetch(there, keys) == 4
    assert is_chain(1, read(there, keys))

    assert counts(b)["transfers_done"] == 0
    assert counts(b, "tcp")["transfers_done"] > 0
    assert counts(a)["registered_bytes"] == before


def test_engines_of_an_owner_that_are_stopped_cost_one_fetch_its_deadline(
    scene: ClusterScene, spawn: Spawn, wait_until: WaitUntil
) -> None:
    a, b = two_nodes(scene, spawn)
    here, there = registered(scene, a, wait_until), registered(scene, b, wait_until)
    for chain in (1, 2, 3):
        assert here.put(content.keys(chain, 8), content.pages(chain, 8)).stored == 8
    b.knows(a, 25)
    wait_until(lambda: counts(a)["registered_bytes"] >= 2 * EXTENT_BYTES)
    assert fetch(there, content.keys(1, 8)) == 8
    stopped = engines(a)
    assert len(stopped) == 2
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    job = begin_fetch(there, content.keys(2, 8))
    assert is_chain(1, read(there, content.keys(1, 8))), "local hits go on"
    came = job.result(4.0)
    assert is_chain(2, read(there, content.keys(2, came)) if came else [])
    wait_until(lambda: not b.held(), timeout_s=CLEAN_WAIT_S)

    before = counts(b, "tcp")["transfers_done"]
    wait_until(lambda: fetch(there, content.keys(3, 8)) == 8)  # it is not asked for a second
    assert counts(b, "tcp")["transfers_done"] > before
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert is_chain(3, read(there, content.keys(3, 8)))


def test_engines_end_with_a_node_that_is_killed_and_others_read_it_again_later(
    scene: ClusterScene, spawn: Spawn, wait_until: WaitUntil
) -> None:
    a, b = two_nodes(scene, spawn)
    registered(scene, a, wait_until)
    there = registered(scene, b, wait_until)
    left = engines(a)
    a.signal(signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}/maps").exists() for pid in left))

    a.restart()
    scene.meet(a, b)
    here = registered(scene, a, wait_until)
    assert here.put(content.keys(1, 4), content.pages(1, 4)).stored == 4
    b.knows(a, 5)
    before = counts(b)["read_pages"]
    assert fetch(there, content.keys(1, 4)) == 4
    assert is_chain(1, read(there, content.keys(1, 4)))
    assert counts(b)["read_pages"] == before + 4


def test_an_engine_that_peers_read_from_is_replaced_when_it_dies(
    scene: ClusterScene, spawn: Spawn, wait_until: WaitUntil
) -> None:
    a, b = two_nodes(scene, spawn)
    here, there = registered(scene, a, wait_until), registered(scene, b, wait_until)
    assert here.put(content.keys(1, 4), content.pages(1, 4)).stored == 4
    killed = engines(a)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: counts(a)["processes_lost"] == 2)
    # What was registered counts until the next ones are started.
    wait_until(lambda: len(set(engines(a)) - set(killed)) == 2)
    wait_until(lambda: counts(a)["registered_bytes"] > 0)
    b.knows(a, 5)
    assert fetch(there, content.keys(1, 4)) == 4
    assert counts(b)["read_pages"] == 4


def test_a_node_without_a_device_refuses_rdma(scene: ClusterScene, spawn: Spawn) -> None:
    (a,) = scene.add("a")
    a.run_in = Alone(spawn).program
    said = a.refusal([a], **SETTINGS | {"cluster__mooncake_protocol": "rdma"})
    assert "cluster.transports: Mooncake finds no device for rdma" in said
