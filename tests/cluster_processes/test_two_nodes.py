"""Pages that one node has are a hit on the other."""

import mmap
import os
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity, page_keys
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
READ_S = 6.0
"""2 s, and what a busy machine may add; a client gives up a node that does not answer after 7 s."""


def test_a_client_gets_pages_that_only_another_node_has_and_later_ones_are_local(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)

    assert fetch(there, keys) == 6
    assert is_chain(1, read(there, keys))

    asked, lent = b.stats()["counts"]["locates"], a.stats()["cluster"]["service"]["loans"]
    assert fetch(there, keys) == 6
    assert is_chain(1, read(there, keys))
    assert b.stats()["counts"]["locates"] == asked, "a local hit asks no directory"
    assert a.stats()["cluster"]["service"]["loans"]["lent_pages"] == lent["lent_pages"] == 6
    assert "engine came engine=test" in a.process.stderr
    assert "peer b" not in a.process.stderr, "another node is no engine"


def test_every_shard_is_fetched_and_of_a_window_group_the_last_pages(
    scene: ClusterScene, wait_until: WaitUntil
) -> None:
    a, b = scene.start("a", "b")
    identity = SpaceIdentity(model="two", kv_dtype="float32", page_tokens=64)
    layout = CanonicalLayout(head_dim=128)
    shards = [
        ShardSpec(layout=layout, layers=(0, 2), heads=(0, 2)),
        ShardSpec(layout=layout, layers=(0, 2), heads=(2, 4)),
        ShardSpec(layout=layout, layers=(2, 3), heads=(0, 4), group="window", window_pages=2),
    ]
    keys = page_keys(np.arange(6 * 64), 64)
    here, there = (scene.connect(node).space(identity, shards) for node in (a, b))
    pages = [[os.urandom(size) for _ in keys] for size in here.page_bytes]
    for shard, written in enumerate(pages):
        assert here.put(keys, written, shard=shard).stored == 6

    for shard in (0, 1):
        wait_until(lambda: fetch(there, keys, shard) == 6)  # noqa: B023
        assert read(there, keys, shard) == pages[shard]
    assert there.lookup(keys).pages == 0, "the window group is missing"
    there.lookup(keys, wait_s=2.0)
    assert there.prefetch(keys[4:], 2).result(FETCH_WAIT_S) == 2
    assert read(there, keys[4:], 2) == pages[2][4:]
    assert there.lookup(keys).pages == 6


def test_pages_on_the_ssd_of_their_owner_only_are_fetched(
    scene: ClusterScene, tmp_path: Path
) -> None:
    a, b = scene.add("a", "b")
    a.start(
        [a, b], ssd__directories=tmp_path / "ssd", ssd__capacity_bytes="256MiB",
        ssd__segment_bytes="16MiB", ssd__sync="interval",
    )  # fmt: skip
    b.start([a, b])
    scene.meet(a, b)
    here, keys = scene.space(a), content.keys(1, 6)
    assert here.put(keys, content.pages(1, 6)).stored == 6
    here.persist(keys)
    for chain in range(2, 10):  # as much as its memory
        more = content.keys(chain, 8)
        assert here.put(more, content.pages(chain, 8)).stored == 8
        here.persist(more)
    assert here.lookup(keys).tiers == {"host": 0, "ssd": 6}
    b.knows(a, a_pages(a))
    there = scene.space(b)

    assert fetch(there, keys) == 6
    assert is_chain(1, read(there, keys))


def a_pages(node: ClusterNode) -> int:
    """Pages of all its media, as its own statistics have them."""
    stats = node.stats()
    host = stats["host"]["ready_bytes"] + stats["host"]["pinned_bytes"]
    return int(host + stats["ssd"]["live_bytes"]) // content.PAGE_BYTES


def test_a_full_reader_gets_a_shorter_prefix(scene: ClusterScene) -> None:
    a, b = scene.add("a", "b")
    a.start([a, b])
    b.start([a, b], host__capacity_bytes=16 << 20)
    scene.meet(a, b)
    keys = content.keys(1, 24)
    assert scene.space(a).put(keys, content.pages(1, 24)).stored == 24
    there = scene.space(b)
    b.knows(a, 24)

    came = fetch(there, keys)

    assert came < 24
    assert is_chain(1, read(there, keys[:came])), "what came is right"
    own = content.keys(2, 4)
    assert there.put(own, content.pages(2, 4)).stored == 4
    assert is_chain(2, read(there, own))


def test_a_reader_whose_memory_is_all_in_use_gets_nothing_in_time_and_all_when_it_is_free(
    scene: ClusterScene, wait_until: WaitUntil
) -> None:
    a, b = scene.add("a", "b")
    a.start([a, b])
    b.start([a, b], host__capacity_bytes=16 << 20)
    scene.meet(a, b)
    keys = content.keys(1, 8)
    assert scene.space(a).put(keys, content.pages(1, 8)).stored == 8
    there = scene.space(b)
    b.knows(a, 8)
    with ExitStack() as held:
        for chain in (2, 3):  # a client may hold half of the memory
            own, client = content.keys(chain, 8), scene.space(b)
            assert client.put(own, content.pages(chain, 8)).stored == 8
            views = held.enter_context(client.get(own))
            assert is_chain(chain, [bytes(one) for one in views.arrays])
            assert len(views.arrays) == 8
        begun = monotonic()
        assert begin_fetch(there, keys).result(FETCH_WAIT_S) == 0
        assert monotonic() - begun < READ_S

    wait_until(lambda: fetch(there, keys) == 8, CLEAN_WAIT_S)
    assert is_chain(1, read(there, keys))


def test_a_page_that_is_damaged_at_its_owner_is_a_miss_and_leaves_it(scene: ClusterScene) -> None:
    a, b = scene.start("a", "b")
    here, keys = scene.space(a), content.keys(1, 6)
    assert here.put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)
    damage(a, content.page(1, 3).tobytes())

    assert fetch(there, keys) == 3
    assert is_chain(1, read(there, keys[:3]))
    assert read(there, keys[3:]) == []
    assert a.stats()["cluster"]["service"]["loans"]["reports_true"] == 1
    assert here.lookup(keys).pages == 3


def damage(node: ClusterNode, page: bytes) -> None:
    """Change a bit of a page in the memory of a node."""
    for entry in Path(f"/proc/{node.process.pid}/fd").iterdir():
        if not str(entry.readlink()).startswith("/memfd:kvstore"):
            continue
        with entry.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
            at = memory.find(page)
            if at >= 0:
                memory[at + 5000] ^= 1
                return
    pytest.fail("the page is nowhere")


def test_pages_that_nobody_has_looked_up_are_fetched_by_a_get_of_several_batches(
    scene: ClusterScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)
    monkeypatch.setattr("kvstore.client.space.BATCH_BYTES", 2 * there.page_bytes[0])

    copies = [bytearray(there.page_bytes[0]) for _ in keys]

    assert there.get(keys, copies) == 6
    assert is_chain(1, [bytes(one) for one in copies])


def test_a_get_of_later_pages_fetches_them_if_the_page_before_is_here(
    scene: ClusterScene,
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)

    assert read(there, keys[2:]) == [], "the page before them is not here"
    assert is_chain(1, read(there, keys[:2]))
    assert is_chain(1, [*read(there, keys[:2]), *read(there, keys[2:])])
    assert there.lookup(keys).pages == 6
