"""Goal: a client keeps no memory that the node has given to somebody else, and gets what it may."""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.client import link
from kvstore.client.link import Link
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError
from tests.client.conftest import (
    READY,
    TIMEOUT_S,
    Daemon,
    arguments,
    content,
    identity,
    mapped_bytes,
    new_keys,
    open_space,
)

CAPACITY_BYTES = 8 << 20
EXTENT_BYTES = 4 << 20
ROUNDS = 12


@pytest.fixture
def small(spawn, tmp_path: Path) -> Daemon:
    """A daemon of two extents."""
    settings = {"host__capacity_bytes": CAPACITY_BYTES, "host__extent_bytes": EXTENT_BYTES}
    return Daemon(spawn(arguments(tmp_path / "small.sock", **settings), ready=READY))


def memory_of(pids: list[int]) -> tuple[int, int]:
    """Extents that these processes have mapped or open, and bytes allocated for them."""
    seen: dict[int, int] = {}
    for pid in pids:
        for folder in ("map_files", "fd"):
            for entry in Path(f"/proc/{pid}/{folder}").iterdir():
                with contextlib.suppress(OSError):  # it went away
                    if "/memfd:kvstore:" in str(entry.readlink()):
                        status = entry.stat()
                        seen[status.st_ino] = status.st_blocks * 512
    return len(seen), sum(seen.values())


def fill(space: Space, start: int) -> None:
    """Put more than the node has, in chains of their own."""
    size = space.page_bytes[0]
    for part in range(CAPACITY_BYTES // size // 64 + 1):
        keys = new_keys(space, 64, start=(start * 1000 + part) * 10_000)
        with contextlib.suppress(CapacityError):
            space.put(keys, content(64, size))


def tenant(daemon: Daemon, name: str, **options: object) -> tuple[KVStore, Space]:
    store = daemon.connect(name=name, **options)
    return store, open_space(store, tenant=name, page_tokens=16)


def mapped(store: KVStore) -> int:
    assert isinstance(store._link, Link)
    return sum(mapped_bytes(one) for one in store._link._mappings.values())


def test_two_tenants_that_take_turns_keep_no_memory_of_each_others_turn(small, wait_until):
    pids = [os.getpid(), small.process.pid]
    (a, in_a), (b, in_b) = tenant(small, "a"), tenant(small, "b")
    descriptors = []
    with a, b:
        for turn in range(ROUNDS):
            for space in (in_a, in_b):
                fill(space, turn)
                out = [np.zeros(space.page_bytes[0], dtype=np.uint8)]
                space.get(new_keys(space, 1, start=turn * 10_000_000), out)
                _, allocated = memory_of(pids)
                assert allocated <= CAPACITY_BYTES, "what was given back is there again"
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))

        most = 2 * (CAPACITY_BYTES // EXTENT_BYTES)  # what each had in its last turn
        wait_until(lambda: memory_of(pids)[0] <= most, what="what was given back is let go of")
        assert mapped(a) + mapped(b) <= 2 * CAPACITY_BYTES
        assert descriptors[1:] == [descriptors[1]] * (ROUNDS - 1), "as many after each turn"


def test_an_idle_client_lets_go_of_what_another_tenant_took(small, wait_until, monkeypatch):
    monkeypatch.setattr(link, "ASK_S", 0.05)
    (a, in_a), (b, in_b) = tenant(small, "a"), tenant(small, "b")
    with a, b:
        fill(in_a, 1)
        assert mapped(a) > 0

        fill(in_b, 1)

        wait_until(lambda: mapped(a) == 0)
        keys = new_keys(in_a, 2, start=77)
        assert in_a.put(keys, content(2, in_a.page_bytes[0])).stored == 2, "it maps what it needs"


def test_a_view_keeps_its_extent_whatever_else_is_gone(small, wait_until, monkeypatch):
    monkeypatch.setattr(link, "ASK_S", 0.05)
    (a, in_a), (b, in_b) = tenant(small, "a"), tenant(small, "b")
    with a, b:
        keys, pages = new_keys(in_a, 2, start=77), content(2, in_a.page_bytes[0])
        in_a.put(keys, pages)
        fill(in_a, 1)
        in_a.put(keys, pages)
        with in_a.get(keys) as views:
            assert len(views) == 2
            for turn in range(ROUNDS):
                fill(in_b, turn)
            wait_until(lambda: mapped(a) <= 2 * EXTENT_BYTES)
            assert all(map(np.array_equal, views.arrays, pages))
            del views
        wait_until(lambda: fill(in_b, ROUNDS) or mapped(a) == 0)


def test_a_lease_shorter_than_the_client_asks_for_is_no_miss(spawn, tmp_path):
    command = arguments(tmp_path / "short.sock", host__lease_s_max=10.0)
    daemon = Daemon(spawn(command, ready=READY))
    with daemon.connect() as store:
        space = open_space(store)
        keys, pages = new_keys(space, 3), content(3, space.page_bytes[0])
        space.put(keys, pages)

        with space.get(keys) as views:
            assert all(map(np.array_equal, views.arrays, pages))
            assert len(views) == 3
        out = [np.zeros_like(page) for page in pages]
        assert space.get(keys, out) == 3
        assert store.troubles == {}


def test_a_sync_that_takes_long_holds_up_no_put_that_waits_for_room(ssd_daemon):
    with ssd_daemon.connect() as store:
        space = open_space(store)
        keys = new_keys(space, 1)
        space.put(keys, content(1, space.page_bytes[0]), durable=True)
        syncing = store._waiting["persist"]._connection
        assert syncing is not None
        held, done = threading.Event(), threading.Event()

        def sync() -> None:
            with syncing._turn:
                held.set()
                assert done.wait(TIMEOUT_S)

        thread = threading.Thread(target=sync)
        thread.start()
        assert held.wait(TIMEOUT_S)
        try:
            for purpose in ("store", "load", "lookup"):
                assert store._resources.waiting_link(purpose).request(wire.Ping(0), TIMEOUT_S)
        finally:
            done.set()
            thread.join(TIMEOUT_S)


def test_a_connection_that_waits_joins_the_session_of_its_store(small):
    with small.connect(name="one") as store:
        space = open_space(store)
        space.lookup(new_keys(space, 1), wait_s=0.01)

        (session,) = small.ask("/v1/stats")["sessions"]
        assert session["processes"] == 2
        assert identity().tenant == session["tenant"]
