"""Goal: whatever a directory in Redis says, a read brings the right bytes or a miss, in time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from kvstore.cluster.access import StoreServers
from kvstore.cluster.entries import NAME_BYTES, EntryNames
from kvstore.cluster.page_store import ChangedPages
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.protocol.page import PrefixKeys
from tests.cluster_processes.conftest import (
    FETCH_WAIT_S,
    ClusterNode,
    ClusterScene,
    begin_fetch,
    fetch,
    is_chain,
    read,
)
from tests.cluster_processes.failing_stores import ClusterStores, shared
from tests.conftest import WaitUntil
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

PAGES = 8
TRUE = 3
READ_S = 6.0
"""2 s, and what a busy machine may add; a client gives up a node that does not answer after 7 s."""


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[ClusterStores]:
    with ClusterStores("redis", "redis", tmp_path) as made:
        yield made


def names(keys: PrefixKeys) -> bytes:
    """Their names in Redis."""
    return EntryNames("blue").of(
        content.IDENTITY.digest.hex(), content.SHARD.digest.hex(), keys.packed
    )


def say(stores: ClusterStores, boot: str, *said: PrefixKeys) -> None:
    """Say in the name of node ``a`` that it has these pages."""

    async def tell() -> None:
        (server,) = stores.servers
        pages = RedisPages(redis_clients(StoreServers((server.endpoint,)), CALL_S), "blue")
        number = await pages.claim("a", bytes.fromhex(boot), "of nobody")
        changes = [ChangedPages(stored=True, sign="", names=names(keys)) for keys in said]
        assert await pages.change(number, "of nobody", 1, changes)
        await pages.close()

    asyncio.run(tell())


def overwrite(stores: ClusterStores, keys: PrefixKeys, texts: list[bytes]) -> None:
    """Replace the entries of pages."""

    async def write() -> None:
        (server,) = stores.servers
        async with redis_clients(StoreServers((server.endpoint,)), CALL_S)() as client:
            packed = names(keys)
            for at, text in enumerate(texts):
                name = packed[at * NAME_BYTES : (at + 1) * NAME_BYTES]
                await client.set(b"k" + name, text)

    asyncio.run(write())


def boot(node: ClusterNode, other: ClusterNode) -> str:
    found: str = node.stats()["cluster"]["peers"][other.name]["boot"]
    return found


def test_pages_that_a_node_does_not_have_are_misses_in_time(
    scene: ClusterScene, stores: ClusterStores, wait_until: WaitUntil
) -> None:
    a, b = stores.start(scene, "a", "b")
    here, there = scene.space(a), scene.space(b)
    none, some, own = content.keys(5, PAGES), content.keys(6, PAGES), content.keys(7, PAGES)
    assert here.put(some[:TRUE], content.pages(6, TRUE)).stored == TRUE
    assert there.put(own, content.pages(7, PAGES)).stored == PAGES
    say(stores, boot(b, a), none, some, own)

    begun = monotonic()
    assert begin_fetch(there, none).result(FETCH_WAIT_S) == 0
    assert monotonic() - begun < READ_S
    begun = monotonic()
    assert begin_fetch(there, some).result(FETCH_WAIT_S) <= TRUE
    assert monotonic() - begun < READ_S
    wait_until(lambda: fetch(there, some) == TRUE)
    assert is_chain(6, read(there, some[:TRUE]))
    assert is_chain(7, read(there, own))
    assert fetch(scene.space(a), own) in (0, PAGES), "its own name is not believed"
    counts = b.stats()["remote"]["peers"]["a"]
    assert counts["missing_pages"] > 0


def test_entries_that_say_nothing_are_misses_until_they_are_announced_again(
    scene: ClusterScene, stores: ClusterStores, wait_until: WaitUntil
) -> None:
    a, b = stores.start(scene, "a", "b")
    here, there = scene.space(a), scene.space(b)
    keys = content.keys(1, PAGES)
    assert here.put(keys, content.pages(1, PAGES)).stored == PAGES
    wait_until(lambda: shared(a)["announced"] >= PAGES)
    wrong = [b"", b",", b"--1", b"999999999999", b"\xff\x00", b"1" * 5_000, b"x1", b"-"]
    overwrite(stores, keys, wrong)

    begun = monotonic()
    assert begin_fetch(there, keys).result(FETCH_WAIT_S) == 0
    assert monotonic() - begun < READ_S

    (server,) = stores.servers
    server.empty()
    wait_until(lambda: fetch(there, keys) == PAGES, 20.0)
    assert is_chain(1, read(there, keys))
    assert shared(a)["faults"]["lost"] >= 1


def test_a_number_of_a_boot_that_never_was_is_no_longer_believed_than_until_a_renewal(
    scene: ClusterScene, stores: ClusterStores, wait_until: WaitUntil
) -> None:
    a, b = stores.start(scene, "a", "b")
    here, there = scene.space(a), scene.space(b)
    keys = content.keys(1, PAGES)
    assert here.put(keys, content.pages(1, PAGES)).stored == PAGES
    say(stores, "00" * 16, content.keys(2, PAGES))

    assert fetch(there, content.keys(2, PAGES)) == 0
    wait_until(lambda: fetch(there, keys) == PAGES, 20.0)
    assert is_chain(1, read(there, keys))
    wait_until(lambda: shared(a)["faults"].get("lost", 0) >= 1, 20.0)
    assert shared(a)["current"] or shared(a)["announcements"] >= 1
