"""A client says what is over: late, on another connection, or while its store is closed."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import mover
from kvstore.client.exchange import Connection
from kvstore.client.link import Link
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import PeerUnreachable
from tests.conftest import WaitUntil
from tests.connecting import connect
from tests.faults import content
from tests.faults.conftest import PAGES, Scene, StatsUntil
from tests.faults.test_daemon_stopped import go_on, stop

CHAIN, OTHER = 1, 2
HELD = 8
HELD_BYTES = HELD * content.PAGE_BYTES
TIMEOUT_S = 10.0


class Gate:
    """Holds whoever comes to it, once."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Where the next put of this process stops, before it writes."""
    made, really_gather = Gate(), mover.gather

    def gather(*arguments: Any) -> Any:
        monkeypatch.setattr(mover, "gather", really_gather)
        made()
        return really_gather(*arguments)

    monkeypatch.setattr(mover, "gather", gather)
    return made


class Put(threading.Thread):
    """A put in a thread of its own; how it ended."""

    def __init__(self, store: KVStore) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._space = content.open_space(store)
        self.start()

    def run(self) -> None:
        try:
            self._space.put(content.keys(CHAIN, HELD), content.pages(CHAIN, HELD))
        except PeerUnreachable as error:
            self.error = error


@pytest.fixture
def cut(wait_until: WaitUntil) -> Callable[[Link], None]:
    """Break a link's connection and wait for the next one."""

    def break_it(link: Link) -> None:
        before, connection = link.epoch, link._connection
        assert connection is not None
        connection._socket.shutdown(2)
        wait_until(lambda: link.epoch > before and link.connected)

    return break_it


def fill(scene: Scene) -> tuple[int, list[int]]:
    """Store as much as there is room for, twice; how many pages are there, and which are wrong."""
    space = content.open_space(scene.client())
    count = PAGES - HELD
    names = content.keys(OTHER, count)
    for start in range(0, count, HELD):
        part = slice(start, start + HELD)
        space.put(names[part], content.pages(OTHER, count)[part])
    out = [np.zeros(content.PAGE_BYTES, dtype=np.uint8) for _ in range(count)]
    got = sum(space.get(names[at : at + HELD], out[at : at + HELD]) for at in range(0, count, HELD))
    return got, content.wrong_pages(OTHER, out)


def test_what_was_settled_before_a_connection_broke_says_nothing_of_that_connection(
    scene: Scene, gate: Gate, cut: Callable[[Link], None], monkeypatch: pytest.MonkeyPatch,
    stats_until: StatsUntil,
):  # fmt: skip
    link = scene.client()._link
    assert isinstance(link, Link)
    first = link.moving()
    first.__enter__()
    cut(link)
    put = Put(scene._clients[0])
    assert gate.entered.wait(TIMEOUT_S)
    late: list[wire.Settled] = []
    really_post = Connection.post

    def post(self: Connection, message: wire.Request, *, now: bool) -> None:
        if isinstance(message, wire.Settled):
            late.append(message)
        else:
            really_post(self, message, now=now)

    monkeypatch.setattr(Connection, "post", post)
    first.__exit__(None, None, None)
    assert late == [wire.Settled(2)], "the first connection's move was the last"
    cut(link)
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == HELD_BYTES)
    monkeypatch.undo()

    # What was decided on the second connection arrives on the third.
    assert link._connection is not None
    for message in late:
        link.send(message)
    link.request(wire.Ping(0), TIMEOUT_S)

    assert scene.daemon.host("limbo") == HELD_BYTES, "the put is still writing"
    assert fill(scene) == (PAGES - HELD, [])
    gate.opened.set()
    put.join(TIMEOUT_S)
    assert isinstance(put.error, PeerUnreachable)
    assert fill(scene) == (PAGES - HELD, []), "its late write met nobody's page"
    stats_until(lambda stats: stats["host"]["limbo_bytes"] == 0)


def test_a_put_of_an_earlier_boot_never_writes_into_the_memory_of_the_next(
    frail: Scene, gate: Gate, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
):
    """Both boots have an extent of that number; the put was granted a slot in the first one's."""
    store = frail.client()
    link = store._link
    assert isinstance(link, Link)
    space = content.open_space(store)
    with link.moving() as memory:
        put = wire.BeginPut(0, 1 << 40, *_numbers(space), content.keys(CHAIN, 1).packed, b"")
        granted = link.request(put, TIMEOUT_S)
        assert isinstance(granted, wire.PutGranted)
        frail.daemon.process.kill()
        frail.restart_daemon()
        wait_until(lambda: link.connected)
        other = frail.client()
        content.open_space(other)
        content.open_space(store).lookup(content.keys(CHAIN, 1))  # its tenant is known again

        with pytest.raises(Exception, match="earlier boot"):
            memory.locate(granted.addresses, content.PAGE_BYTES, write=True)


def _numbers(space: Any) -> tuple[int, int]:
    opened = space.numbers()
    return opened.space, opened.shards[0]


def test_a_store_closed_with_a_view_open_leaves_the_node_when_the_view_is_closed(
    scene: Scene, stats_until: StatsUntil
):
    content.open_space(scene.client()).put(content.keys(CHAIN, HELD), content.pages(CHAIN, HELD))
    store = connect(scene.daemon.address, name="viewer", timeout_s=TIMEOUT_S)
    space = content.open_space(store)
    views = space.get(content.keys(CHAIN, HELD))
    assert len(views) == HELD

    store.close()

    assert scene.daemon.stats()["leases"] == 1
    assert content.wrong_pages(CHAIN, views.arrays) == []
    assert len(space.get(content.keys(CHAIN, 1))) == 0, "it takes no other request"
    views.close()
    stats_until(lambda stats: [one["name"] for one in stats["sessions"]] == ["test"])
    stats = scene.daemon.stats()
    assert stats["leases"] == stats["host"]["pinned_bytes"] == 0


def test_a_view_that_outlives_its_store_and_its_connection_leaves_nothing(
    scene: Scene, stats_until: StatsUntil, cut: Callable[[Link], None]
):
    content.open_space(scene.client()).put(content.keys(CHAIN, HELD), content.pages(CHAIN, HELD))
    store = connect(scene.daemon.address, name="viewer", timeout_s=TIMEOUT_S)
    views = content.open_space(store).get(content.keys(CHAIN, HELD))
    assert len(views) == HELD
    store.close()
    assert isinstance(store._link, Link)
    cut(store._link)

    views.close()

    stats_until(lambda stats: [one["name"] for one in stats["sessions"]] == ["test"])
    assert scene.daemon.stats()["leases"] == 0


def test_a_put_that_runs_while_its_store_is_closed_leaves_nothing(
    scene: Scene, gate: Gate, stats_until: StatsUntil
):
    store = connect(scene.daemon.address, name="writer", timeout_s=TIMEOUT_S)
    put = Put(store)
    assert gate.entered.wait(TIMEOUT_S)

    store.close()
    assert scene.daemon.host("writing") == HELD_BYTES, "it still writes"
    gate.opened.set()
    put.join(TIMEOUT_S)

    assert isinstance(put.error, PeerUnreachable)
    assert "closed" in str(put.error)
    stats_until(lambda stats: stats["sessions"] == [] and stats["puts"] == 0)
    assert scene.daemon.host("limbo") == scene.daemon.host("writing") == 0


def test_a_store_closed_while_a_load_brings_pages_from_disk_leaves_nothing(
    scene: Scene, stats_until: StatsUntil
):
    content.open_space(scene.client()).put(content.keys(CHAIN, HELD), content.pages(CHAIN, HELD))
    store = connect(scene.daemon.address, name="reader", timeout_s=TIMEOUT_S)
    loads, gate = content.open_space(store)._loads, Gate()
    load = threading.Thread(target=loads.warm, args=(content.keys(CHAIN, HELD), 0, gate))
    load.start()
    assert gate.entered.wait(TIMEOUT_S)

    store.close()
    gate.opened.set()
    load.join(TIMEOUT_S)

    stats_until(lambda stats: [one["name"] for one in stats["sessions"]] == ["test"])
    assert scene.daemon.stats()["leases"] == 0


def test_a_store_closed_while_the_node_is_stopped_tells_it_later_what_is_over(
    scene: Scene, stats_until: StatsUntil
):
    content.open_space(scene.client()).put(content.keys(CHAIN, HELD), content.pages(CHAIN, HELD))
    store = connect(scene.daemon.address, name="reader", timeout_s=TIMEOUT_S)
    space = content.open_space(store)
    with space.get(content.keys(CHAIN, 1)) as views:
        assert len(views) == 1
    store._resources.timeout_s = 0.1
    stop(scene.daemon)
    try:
        assert len(space.get(content.keys(CHAIN, HELD))) == 0, "its lease may be granted yet"
        store.close()
    finally:
        go_on(scene.daemon)

    stats_until(lambda stats: [one["name"] for one in stats["sessions"]] == ["test"])
    assert scene.daemon.stats()["leases"] == 0


def test_a_store_closed_with_a_view_open_ends_when_its_node_has_ended(
    frail: Scene, wait_until: WaitUntil
):
    content.open_space(frail.client()).put(content.keys(CHAIN, HELD), content.pages(CHAIN, HELD))
    store = connect(frail.daemon.address, name="viewer", timeout_s=TIMEOUT_S)
    link = store._link
    assert isinstance(link, Link)
    views = content.open_space(store).get(content.keys(CHAIN, HELD))
    store.close()
    frail.daemon.process.kill()

    assert content.wrong_pages(CHAIN, views.arrays) == []
    views.close()

    wait_until(lambda: link._thread is not None and not link._thread.is_alive())
    frail.restart_daemon()


def test_requests_that_wait_share_one_connection_for_each_purpose(
    scene: Scene, stats_until: StatsUntil
):
    store = connect(scene.daemon.address, name="many", timeout_s=TIMEOUT_S)
    space = content.open_space(store)
    together = threading.Barrier(8)

    def look() -> None:
        together.wait(TIMEOUT_S)
        space.lookup(content.keys(CHAIN, 1), wait_s=0.01)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)

    assert scene.daemon.stats()["connections"] == 2
    assert len(scene.daemon.stats()["sessions"]) == 1
    store.close()
    stats_until(lambda stats: stats["connections"] == 0)
    assert space.lookup(content.keys(CHAIN, 1), wait_s=0.01).pages == 0
    with pytest.raises(PeerUnreachable, match="closed"):
        store._waiting_link("one it did not have")
    assert scene.daemon.stats()["connections"] == 0, "a closed store makes no connection"
