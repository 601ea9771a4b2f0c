"""Copies of pages at several nodes: put with replicas, and what operators start."""

import signal
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.protocol.errors import TooFewCopies
from tests.cluster_processes.conftest import ClusterScene, is_chain, read
from tests.cluster_processes.failing_stores import ClusterStores
from tests.conftest import wait_for
from tests.faults import content

SPACE = content.IDENTITY.digest.hex()

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_a_put_with_two_replicas_is_a_hit_at_the_second_node_when_the_first_is_killed(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)

    assert scene.space(a).put(keys, content.pages(1, 6), replicas=2).stored == 6
    a.signal(signal.SIGKILL)

    there = scene.space(b)
    assert there.lookup(keys).pages == 6
    assert is_chain(1, read(there, keys))


def test_a_put_says_how_many_nodes_have_the_pages_when_too_few_do(scene: ClusterScene) -> None:
    a, b = scene.start("a", "b")
    here, keys = scene.space(a), content.keys(1, 6)

    with pytest.raises(TooFewCopies) as too_few:
        here.put(keys, content.pages(1, 6), replicas=3)
    assert too_few.value.copies == 2
    assert here.lookup(keys).pages == 6

    b.signal(signal.SIGKILL)
    with pytest.raises(TooFewCopies) as too_few:
        here.put(keys, content.pages(1, 6), replicas=2)
    assert too_few.value.copies == 1
    assert here.lookup(keys).pages == 6


def test_a_moved_prefix_is_a_hit_at_the_other_node_and_has_left_this_one(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    here, there = scene.space(a), scene.space(b)
    moved, stays = content.keys(1, 6), content.keys(2, 4)
    here.put(moved, content.pages(1, 6))
    here.put(stays, content.pages(2, 4))

    job = a.finished(a.begin_job("/v1/move-to-node", space=SPACE, key=moved[5].hex(), node="b"))

    assert job["result"]["complete"], job
    assert job["result"]["dropped"] == 6
    assert a.stats()["counts"]["removed_moved"] == 6
    assert here.lookup(stays).pages == 4
    assert is_chain(1, read(there, moved))
    assert there.lookup(moved).pages == 6


def test_two_nodes_that_move_the_same_prefix_to_each_other_do_not_lose_it(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    here, there = scene.space(a), scene.space(b)
    keys = content.keys(1, 6)
    moving = {"space": SPACE, "key": keys[5].hex()}
    for _ in range(10):  # which of the two is faster differs
        for one in (here, there):
            one.put(keys, content.pages(1, 6))
        at_a = a.begin_job("/v1/move-to-node", node="b", **moving)
        at_b = b.begin_job("/v1/move-to-node", node="a", **moving)
        ended = [a.finished(at_a), b.finished(at_b)]
        assert 6 in (here.lookup(keys).pages, there.lookup(keys).pages), ended


def test_a_replicated_prefix_is_at_so_many_nodes(scene: ClusterScene) -> None:
    a, b, c = scene.start("a", "b", "c")
    here, keys = scene.space(a), content.keys(1, 6)
    here.put(keys, content.pages(1, 6))

    job = a.finished(a.begin_job("/v1/replicate", space=SPACE, key=keys[5].hex(), copies=3))

    assert job["result"] == {
        "pages": 12, "bytes": 12 * content.PAGE_BYTES, "to b": 6, "to c": 6, "copies": 3,
        "complete": True, "why": "",
    }  # fmt: skip
    for node in (a, b, c):
        assert is_chain(1, read(scene.space(node), keys))


def test_a_node_that_drains_is_shown_and_left_out_of_copies_by_name(
    scene: ClusterScene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ClusterStores("redis", "peers", tmp_path) as stores:
        a, b = stores.start(scene, "a", "b")
        there, keys = scene.space(b), content.keys(1, 6)
        assert a.finished(a.begin_job("/v1/drain"))["result"]["complete"]
        assert wait_for(lambda: b.stats()["cluster"]["peers"]["a"]["draining"])
        assert not a.stats()["cluster"]["peers"]["b"]["draining"]

        with pytest.raises(TooFewCopies, match="1 not asked: draining"):
            there.put(keys, content.pages(1, 6), replicas=2)
        asked = b.begin_job("/v1/replicate", space=SPACE, key=keys[5].hex(), copies=2)
        assert "draining, so not asked: a" in b.finished(asked)["result"]["why"]
        assert main(["nodes", "--url", b.process.ready.group(2)]) == 0
        assert "draining" in capsys.readouterr().out


def test_a_drain_whose_target_dies_says_what_was_copied_and_drops_nothing(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    here = scene.space(a)
    for chain in (1, 2):
        here.put(content.keys(chain, 6), content.pages(chain, 6))
    job = a.begin_job("/v1/drain", bytes_per_s=1 << 20)
    assert wait_for(lambda: a.job(job)["result"].get("pages") == 6)
    assert a.stats()["cluster"]["state"] == "draining"
    there = scene.space(b)
    assert is_chain(2, read(there, content.keys(2, 6))), "what was used last goes first"

    b.signal(signal.SIGKILL)

    result = a.finished(job)["result"]
    assert not result["complete"]
    assert (result["pages"], result["kept"], result["to b"]) == (6, 6, 6)
    assert "no session" in result["why"]
    assert a.stats()["cluster"]["state"] == "up"
    for chain in (1, 2):
        assert is_chain(chain, read(here, content.keys(chain, 6)))


def test_a_drain_whose_target_is_killed_while_it_reads_ends(scene: ClusterScene) -> None:
    a, b = scene.start("a", "b")
    here, keys = scene.space(a), content.keys(1, 6)
    here.put(keys, content.pages(1, 6))
    b.close_gate("read")
    job = a.begin_job("/v1/drain")
    b.at_gate("read")

    b.signal(signal.SIGKILL)

    result = a.finished(job)["result"]
    assert (result.get("pages", 0), result["kept"], result["complete"]) == (0, 6, False)
    assert is_chain(1, read(here, keys))


def test_a_full_target_takes_what_it_has_room_for_and_keeps_what_was_used_later(
    scene: ClusterScene,
) -> None:
    a, b = scene.add("a", "b")
    a.start([a, b])
    b.start([a, b], host__capacity_bytes=16 << 20)
    scene.meet(a, b)
    here, there = scene.space(a), scene.space(b)
    for chain in range(1, 5):
        here.put(content.keys(chain, 6), content.pages(chain, 6))
    own = content.keys(9, 4)
    there.put(own, content.pages(9, 4))

    result = a.finished(a.begin_job("/v1/drain"))["result"]

    assert not result["complete"]
    assert 6 <= result["pages"] <= 12
    assert result["kept"] >= 12
    assert "no room" in result["why"]
    assert is_chain(9, read(there, own))
    assert is_chain(4, read(there, content.keys(4, 6)))
    for chain in range(1, 5):
        assert is_chain(chain, read(here, content.keys(chain, 6)))


def test_a_drain_is_cancelled(scene: ClusterScene) -> None:
    a, _ = scene.start("a", "b")
    here = scene.space(a)
    for chain in (1, 2):
        here.put(content.keys(chain, 6), content.pages(chain, 6))
    job = a.begin_job("/v1/drain", bytes_per_s=1 << 10)
    assert wait_for(lambda: a.job(job)["result"].get("pages") == 6)

    a.cancel(job)

    ended = a.finished(job)
    assert (ended["state"], ended["result"]["why"]) == ("cancelled", "cancelled")
    assert (ended["result"]["pages"], ended["result"]["kept"]) == (6, 6)


def test_a_whole_drain_lets_the_node_go(scene: ClusterScene) -> None:
    a, b, c = scene.start("a", "b", "c")
    here = scene.space(a)
    for chain in range(1, 6):
        here.put(content.keys(chain, 4), content.pages(chain, 4))

    result = a.finished(a.begin_job("/v1/drain"))["result"]

    assert (result["complete"], result["pages"], result["kept"]) == (True, 20, 0)
    more = content.keys(7, 2)
    assert here.put(more, content.pages(7, 2)).stored == 2, "it still serves"
    a.signal(signal.SIGKILL)
    spaces = [scene.space(node) for node in (b, c)]
    for chain in range(1, 6):
        keys = content.keys(chain, 4)
        assert any(is_chain(chain, read(space, keys)) and space.lookup(keys).pages == 4
                   for space in spaces)  # fmt: skip
