"""A client process forks; parent and child do not get into each other's way."""

import os
import signal

from tests.faults import content
from tests.faults.conftest import Scene, StatsUntil

HELD = 8
LEASED, WRITING, OTHER = 1, 2, 3


def store_leased(scene: Scene) -> None:
    space = content.open_space(scene.client())
    assert space.put(content.keys(LEASED, HELD), content.pages(LEASED, HELD)).stored == HELD


def test_a_child_connects_anew_and_its_end_frees_nothing_of_its_parent(
    scene: Scene, stats_until: StatsUntil
):
    store_leased(scene)
    parent = scene.puppet()
    assert parent.do("view", name="a", chain=LEASED, count=HELD) == HELD
    parent.do("arm", where="gather", when="middle")
    put = parent.begin("put", chain=WRITING, count=HELD)
    parent.at("gather")
    before = scene.daemon.stats()

    forked = parent.do(
        "fork",
        use=[
            {"do": "get", "chain": LEASED, "count": HELD},
            {"do": "lookup", "chain": LEASED, "count": HELD},
            {"do": "state"},
        ],
    )

    assert forked["status"] == 0
    inherited, got, hit, state = forked["answers"]
    assert inherited["maps"] == 0, "the node's memory is not in the child"
    assert got == {"pages": HELD, "wrong": []}, "its first use connects"
    assert hit == HELD
    assert state["connected"]
    stats_until(lambda stats: stats["connections"] == before["connections"])
    after = scene.daemon.stats()
    for name in ("leases", "puts", "connections"):
        assert after[name] == before[name]
    for name in ("pinned_bytes", "writing_bytes", "limbo_bytes"):
        assert after["host"][name] == before["host"][name]

    assert parent.do("check_view", name="a", chain=LEASED) == []
    parent.go()
    assert parent.end(put)["stored"] == HELD
    assert parent.do("get", chain=WRITING, count=HELD) == {"pages": HELD, "wrong": []}
    assert scene.daemon.stats()["accepted_connections"] == after["accepted_connections"]


def test_a_child_stores_pages_of_its_own(scene: Scene):
    parent = scene.puppet()
    assert parent.do("put", chain=LEASED, count=HELD)["stored"] == HELD

    forked = parent.do("fork", use=[{"do": "put", "chain": OTHER, "count": HELD}])

    assert forked["status"] == 0
    assert forked["answers"][1]["stored"] == HELD
    assert parent.do("get", chain=OTHER, count=HELD) == {"pages": HELD, "wrong": []}


def test_a_store_that_is_closed_leaves_the_node_although_a_child_of_it_lives(
    scene: Scene, stats_until: StatsUntil
):
    parent = scene.puppet()
    child = parent.do("fork_and_stay")

    try:
        parent.do("close")

        stats_until(lambda stats: stats["connections"] == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_runs_nothing_that_its_parent_submitted(scene: Scene):
    store_leased(scene)
    parent = scene.puppet()

    forked = parent.do("fork_in_restore", chain=LEASED, count=HELD)

    assert forked["status"] == 0, "the child's copy of the job has failed, and its own restore not"
    assert forked["pages"] == HELD
    assert forked["untouched"], "blocks that the parent uses again were written to"


def test_a_child_waits_for_no_lock_that_its_parents_threads_held(scene: Scene):
    store_leased(scene)
    parent = scene.puppet()

    statuses = parent.do("fork_with_locks_held", chain=LEASED, count=HELD, timeout_s=60.0)

    assert len(statuses) > 10
    assert set(statuses) == {0}


def test_a_child_of_an_embedded_store_misses_and_its_parent_goes_on(scene: Scene):
    parent = scene.puppet()

    forked = parent.do("fork_embedded", chain=LEASED, timeout_s=60.0)

    assert len(forked["statuses"]) > 5
    assert set(forked["statuses"]) == {0}
    assert forked["view"] == []
    assert forked["pages"] == 2
    assert forked["after"]["existing"] == 2


def test_a_child_that_touches_a_view_of_its_parent_dies_of_it(scene: Scene):
    store_leased(scene)
    parent = scene.puppet()
    assert parent.do("view", name="a", chain=LEASED, count=HELD) == HELD

    status = parent.do("fork_and_touch", name="a")

    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert parent.do("check_view", name="a", chain=LEASED) == []


def test_a_child_that_closes_an_inherited_view_takes_nothing_from_its_parent(scene: Scene):
    store_leased(scene)
    parent = scene.puppet()
    assert parent.do("view", name="a", chain=LEASED, count=HELD) == HELD

    forked = parent.do("fork_and_close_view", name="a", chain=OTHER)

    assert forked["status"] == 0
    _, _, stored, unfinished = forked["answers"]
    assert stored["stored"] == 1
    assert unfinished == {}, "or the child could never say that it has settled"
    assert scene.daemon.stats()["leases"] == 1
    assert parent.do("check_view", name="a", chain=LEASED) == []


def test_a_parent_killed_while_its_child_lives_gives_everything_back(
    scene: Scene, stats_until: StatsUntil
):
    store_leased(scene)
    parent = scene.puppet()
    assert parent.do("view", name="a", chain=LEASED, count=HELD) == HELD
    parent.do("arm", where="gather", when="middle")
    parent.begin("put", chain=WRITING, count=HELD)
    parent.at("gather")
    child = parent.do("fork_and_stay")

    try:
        parent.signal(signal.SIGKILL)

        stats_until(lambda stats: stats["leases"] == stats["puts"] == 0)
        host = scene.daemon.stats()["host"]
        assert host["pinned_bytes"] == host["writing_bytes"] == host["limbo_bytes"] == 0
    finally:
        os.kill(child, signal.SIGKILL)
