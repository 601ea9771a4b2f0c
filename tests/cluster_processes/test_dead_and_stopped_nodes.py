"""Nodes that are killed or stopped in the middle of a fetch: the others miss, and go on."""

import os
import signal
from pathlib import Path

import pytest

from kvstore.client.space import Space
from kvstore.protocol.errors import PeerUnreachable
from tests.cluster_processes.conftest import (
    CLEAN_WAIT_S,
    FETCH_WAIT_S,
    ClusterNode,
    ClusterScene,
    begin_fetch,
    fetch,
    is_chain,
    read,
)
from tests.conftest import WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PAGES = 16
OWN = 7
"""A chain that is local."""


def two_nodes(scene: ClusterScene) -> tuple[ClusterNode, ClusterNode, Space]:
    """The owner of a chain, a node without it, and a client of that, which has a local chain."""
    a, b = scene.start("a", "b")
    keys = content.keys(1, PAGES)
    assert scene.space(a).put(keys, content.pages(1, PAGES)).stored == PAGES
    there = scene.space(b)
    assert there.put(content.keys(OWN, 2), content.pages(OWN, 2)).stored == 2
    b.knows(a, PAGES)
    return a, b, there


def has_own(space: Space) -> bool:
    """Whether a local chain is a hit now."""
    keys = content.keys(OWN, 2)
    pages = read(space, keys)
    return space.lookup(keys).pages == 2 == len(pages) and is_chain(OWN, pages)


@pytest.mark.parametrize("when", ["lease", "read"])
def test_an_owner_is_killed(scene: ClusterScene, wait_until: WaitUntil, when: str) -> None:
    a, b, there = two_nodes(scene)
    boot = b.stats()["cluster"]["peers"]["a"]["boot"]
    keys = content.keys(1, PAGES)
    b.close_gate(when)
    job = begin_fetch(there, keys)
    b.at_gate(when)

    a.signal(signal.SIGKILL)
    assert has_own(there)
    b.open_gate(when)

    came = job.result(FETCH_WAIT_S)
    assert came < PAGES
    assert is_chain(1, read(there, keys[:came]))
    assert has_own(there)

    a.restart()
    scene.meet(a, b)
    assert b.stats()["cluster"]["peers"]["a"]["boot"] != boot
    keys = content.keys(2, 4)
    assert scene.space(a).put(keys, content.pages(2, 4)).stored == 4
    b.knows(a, 4)
    # A peer that gave nothing is not asked for a second.
    wait_until(lambda: fetch(there, keys) == 4, CLEAN_WAIT_S)
    assert is_chain(2, read(there, keys))


@pytest.mark.parametrize("when", ["lease", "read"])
def test_an_owner_is_stopped(scene: ClusterScene, when: str) -> None:
    a, b, there = two_nodes(scene)
    keys = content.keys(1, PAGES)
    b.close_gate(when)
    job = begin_fetch(there, keys)
    b.at_gate(when)

    a.signal(signal.SIGSTOP)
    assert has_own(there)
    b.open_gate(when)

    came = job.result(FETCH_WAIT_S)
    assert came < PAGES
    assert is_chain(1, read(there, keys[:came]))
    assert has_own(there)
    assert fetch(there, content.keys(3, 4)) == 0, "a lookup is answered without it"

    a.signal(signal.SIGCONT)
    scene.meet(a, b)
    assert has_own(there)


@pytest.mark.parametrize("when", ["lease", "read"])
def test_a_reader_is_killed(scene: ClusterScene, wait_until: WaitUntil, when: str) -> None:
    a, b, there = two_nodes(scene)
    b.close_gate(when)
    job = begin_fetch(there, content.keys(1, PAGES))
    b.at_gate(when)
    assert a.held()["loans"] == 1

    b.signal(signal.SIGKILL)
    with pytest.raises(PeerUnreachable):
        job.result(FETCH_WAIT_S)

    wait_until(lambda: not a.held(), CLEAN_WAIT_S, "what the dead node had leased")
    assert is_chain(1, read(scene.space(a), content.keys(1, PAGES)))


@pytest.mark.parametrize("when", ["lease", "read"])
def test_a_reader_is_stopped(scene: ClusterScene, wait_until: WaitUntil, when: str) -> None:
    a, b, there = two_nodes(scene)
    here, keys = scene.space(a), content.keys(1, PAGES)
    b.close_gate(when)
    job = begin_fetch(there, keys)
    b.at_gate(when)
    assert a.held()["loans"] == 1

    b.signal(signal.SIGSTOP)
    assert is_chain(1, read(here, keys))
    wait_until(lambda: not a.held(), CLEAN_WAIT_S, "what the stopped node had leased")

    b.signal(signal.SIGCONT)
    b.open_gate(when)
    came = job.result(FETCH_WAIT_S)
    assert is_chain(1, read(there, keys[:came]))
    wait_until(lambda: not b.held(), CLEAN_WAIT_S, "slots of what came too late")
    scene.meet(a, b)
    wait_until(lambda: fetch(there, keys) == PAGES, CLEAN_WAIT_S)
    assert is_chain(1, read(there, keys))


def test_pages_of_a_holder_that_is_killed_come_from_another_one(scene: ClusterScene) -> None:
    a, b, c = scene.start("a", "b", "c")
    keys = content.keys(1, PAGES)
    for node in (a, c):
        assert scene.space(node).put(keys, content.pages(1, PAGES)).stored == PAGES
        b.knows(node, PAGES)
    there = scene.space(b)
    b.close_gate("lease")
    job = begin_fetch(there, keys)
    b.at_gate("lease")

    a.signal(signal.SIGKILL)
    b.open_gate("lease")

    assert job.result(FETCH_WAIT_S) == PAGES
    assert is_chain(1, read(there, keys))


def test_a_node_whose_index_process_is_killed_serves_alone_and_finds_others_again(
    scene: ClusterScene, wait_until: WaitUntil
) -> None:
    a, b, there = two_nodes(scene)
    (index,) = children(b.process.pid, "kvstore.index.child")
    os.kill(index, signal.SIGKILL)

    assert has_own(there)
    wait_until(lambda: b.stats()["cluster"]["directory"]["restarts"] == 1 and b.reaches(a), 30.0)
    keys = content.keys(1, PAGES)
    wait_until(lambda: fetch(there, keys) == PAGES, CLEAN_WAIT_S)
    assert is_chain(1, read(there, keys))


def children(pid: int, module: str) -> list[int]:
    """Processes that a process has started with a module."""
    return [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in map(int, (task / "children").read_text().split())
        if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
