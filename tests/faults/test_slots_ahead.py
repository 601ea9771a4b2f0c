"""Goal: a slot that is reserved for the next page outlives no client, no connection, no pause."""

import socket

import numpy as np
import pytest

from kvstore.client import ahead
from kvstore.client.link import Link, Moving
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.client.stores import Storer
from kvstore.protocol.errors import PeerUnreachable
from tests.faults import content
from tests.faults.conftest import CAPACITY_BYTES, Scene, StatsUntil

CHAIN, OTHER = 31, 32
PUT = 6


@pytest.fixture(autouse=True)
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, single pages that are put here count as many."""
    monkeypatch.setattr(ahead, "AHEAD_IDLE_S", 3600.0)


def put_singles(space: Space, chain: int, count: int = PUT, first: int = 0) -> int:
    names, stored = content.keys(chain, first + count), 0
    for at in range(first, first + count):
        stored += space.put(names[at : at + 1], [content.page(chain, at)]).stored
    return stored


def read(store: KVStore, chain: int, count: int) -> list[int]:
    """Which of the pages of a chain are not what was put."""
    out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(count)]
    assert content.open_space(store).get(content.keys(chain, count), out=out) == count
    return content.wrong_pages(chain, out)


def ahead_pages(scene: Scene) -> int:
    count: int = scene.daemon.stats()["counts"].get("stored_ahead_pages", 0)
    return count


def test_single_pages_are_put_with_one_request_and_are_what_was_put(
    scene: Scene, stats_until: StatsUntil, monkeypatch: pytest.MonkeyPatch
):
    store = scene.client()
    before = ahead_pages(scene)

    assert put_singles(content.open_space(store), CHAIN) == PUT

    assert ahead_pages(scene) - before == PUT - 2, "the second one asks for a slot"
    assert read(scene.client(), CHAIN, PUT) == []
    stats = scene.daemon.stats()
    assert (stats["slots_ahead"], stats["slots_ahead_bytes"]) == (1, content.PAGE_BYTES)

    monkeypatch.setattr(ahead, "AHEAD_IDLE_S", 0.0)
    stats_until(lambda stats: not stats["slots_ahead"], "it is given back when it is idle")
    assert not scene.daemon.stats()["host"]["writing_bytes"]


def test_a_page_that_another_client_has_put_is_asked_about_before_the_next_copy(scene: Scene):
    put_singles(content.open_space(scene.client()), CHAIN)
    space = content.open_space(scene.client())
    put_singles(space, OTHER, 3)
    before = ahead_pages(scene)

    names = content.keys(CHAIN, PUT)
    for at in range(PUT):
        result = space.put(names[at : at + 1], [content.page(CHAIN, at)])
        assert (result.stored, result.existing) == (0, 1)

    assert ahead_pages(scene) == before
    assert read(scene.client(), CHAIN, PUT) == []


def test_a_client_that_closes_gives_its_slot_back(scene: Scene, stats_until: StatsUntil):
    store = scene.client()
    put_singles(content.open_space(store), CHAIN)
    assert scene.daemon.stats()["slots_ahead"] == 1

    store.close()

    stats_until(lambda stats: not stats["sessions"])
    stats = scene.daemon.stats()
    assert stats["slots_ahead"] == 0
    assert stats["host"]["limbo_bytes"] == stats["host"]["writing_bytes"] == 0


def test_a_client_that_is_killed_while_it_writes_to_its_slot_leaves_nothing(
    scene: Scene, stats_until: StatsUntil
):
    writer = scene.puppet()
    assert writer.do("put_singles", chain=CHAIN, count=3) == 3
    writer.do("arm", where="gather", when="before")
    writer.begin("put_singles", chain=OTHER, count=1)
    writer.at("gather")
    assert scene.daemon.stats()["slots_ahead"] == 1

    writer.process.kill()

    stats_until(lambda stats: not stats["sessions"])
    host = scene.daemon.stats()["host"]
    assert host["limbo_bytes"] == host["writing_bytes"] == 0
    assert host["free_bytes"] + host["ready_bytes"] == CAPACITY_BYTES
    assert content.open_space(scene.client()).lookup(content.keys(OTHER, 1)).pages == 0
    assert read(scene.client(), CHAIN, 3) == []


def test_a_slot_of_a_broken_connection_is_not_written_to_on_the_next_one(
    scene: Scene, stats_until: StatsUntil
):
    store = scene.client()
    space = content.open_space(store)
    put_singles(space, CHAIN)
    link = store._link
    assert isinstance(link, Link)
    connection, before = link._connection, link.epoch
    assert connection is not None

    connection._socket.shutdown(socket.SHUT_RDWR)

    stats_until(lambda _: link.connected and link.epoch > before)
    assert put_singles(space, OTHER) == PUT
    stats_until(lambda stats: not stats["host"]["limbo_bytes"], "the client has settled")
    assert read(scene.client(), OTHER, PUT) == []
    assert scene.daemon.stats()["slots_ahead"] == 1


def test_a_slot_is_not_written_to_if_its_connection_ends_before_the_write_begins(
    scene: Scene, stats_until: StatsUntil, monkeypatch: pytest.MonkeyPatch
):
    store = scene.client()
    space = content.open_space(store)
    put_singles(space, CHAIN)
    link = store._link
    assert isinstance(link, Link)
    moving, before, written = link.moving, link.epoch, ahead_pages(scene)

    def reconnected_first() -> Moving:
        monkeypatch.setattr(link, "moving", moving)
        connection = link._connection
        assert connection is not None
        connection._socket.shutdown(socket.SHUT_RDWR)
        stats_until(lambda _: link.connected and link.epoch > before)
        stats_until(lambda stats: not stats["host"]["limbo_bytes"], "the slot may be another's")
        return moving()

    reserved, results = Storer._put_reserved, list[object]()

    def put_reserved(*arguments: object) -> object:
        results.append(reserved(*arguments))  # type: ignore[arg-type]
        return results[-1]

    monkeypatch.setattr(link, "moving", reconnected_first)
    monkeypatch.setattr(Storer, "_put_reserved", put_reserved)

    with pytest.raises(PeerUnreachable, match="reconnected"):
        put_singles(space, OTHER, 1)
    assert results == [None], "nothing is written to the slot of the connection that ended"
    assert ahead_pages(scene) == written


def test_a_node_of_an_earlier_version_is_asked_for_no_slot(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    store = scene.client()
    monkeypatch.setattr(store._link, "node_minor", 6)
    before = ahead_pages(scene)

    assert put_singles(content.open_space(store), CHAIN) == PUT

    assert ahead_pages(scene) == before
    assert scene.daemon.stats()["slots_ahead"] == 0
