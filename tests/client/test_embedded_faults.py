"""Goal: a fault of the node in this process is a lost node to its engine, never an exception."""

import logging
import threading

import numpy as np
import pytest

from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import PeerUnreachable
from tests.client.conftest import (
    CAPACITY_BYTES,
    TIMEOUT_S,
    content,
    mapped_bytes,
    new_keys,
    open_space,
)


def break_once(monkeypatch, target, name, error):
    calls = []

    def broken(*_arguments, **_options):
        calls.append(name)
        raise error

    monkeypatch.setattr(target, name, broken)
    return calls


@pytest.mark.parametrize("error", [AssertionError("a page"), OSError(12, "no memory")])
@pytest.mark.parametrize("read", ["lookup", "get"])
def test_a_fault_of_the_node_is_a_miss_and_so_are_all_reads_after_it(
    error, read, monkeypatch, caplog
):
    with KVStore.open(CAPACITY_BYTES) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
        space.put(keys, pages)

        def pages_of() -> int:
            if read == "lookup":
                return space.lookup(keys).pages
            return space.get(keys, [np.zeros_like(page) for page in pages])

        assert pages_of() == 2
        calls = break_once(monkeypatch, store._link._desk, "receive", error)

        with caplog.at_level(logging.ERROR):
            assert [pages_of() for _ in range(3)] == [0, 0, 0]
            with pytest.raises(PeerUnreachable, match="has failed"):
                space.put(keys, pages)

        assert not store.connected
        assert len(calls) == 1, "a node that failed is not asked again"
        assert sum("a miss from now on" in one.message for one in caplog.records) == 1
        assert store.troubles["peer_unreachable"] >= 3
        with pytest.raises(PeerUnreachable, match=str(error.args[-1])):
            store.stats()


def test_a_fault_while_there_are_no_calls_is_said_and_loses_the_node(
    tmp_path, monkeypatch, caplog, wait_until
):
    with KVStore.open(CAPACITY_BYTES, ssd_directories=[tmp_path]) as store:
        space = open_space(store)
        keys = new_keys(space, 1)
        space.put(keys, content(1, space.page_bytes[0]))
        break_once(monkeypatch, store._link._desk, "poll_disk", AssertionError("a job"))

        wait_until(lambda: not store.connected)

        assert space.lookup(keys).pages == 0
        assert any("a job" in one.message for one in caplog.records)


def test_a_lookup_that_waits_misses_when_the_node_fails_in_another_thread(monkeypatch, wait_until):
    with KVStore.open(CAPACITY_BYTES) as store:
        space = open_space(store)
        keys = new_keys(space, 2)
        opened = space.numbers()
        begin = wire.BeginPut(0, 1 << 44, opened.space, opened.shards[0], keys.packed, b"")
        store._link.request(begin, TIMEOUT_S)
        found: list[int] = []
        waiter = threading.Thread(target=lambda: found.append(space.lookup(keys, wait_s=50).pages))
        waiter.start()
        wait_until(lambda: store.stats()["waiting_requests"] == 1)
        with store._link._answered:  # the waiter does nothing meanwhile
            break_once(monkeypatch, store._link._desk, "receive", AssertionError("a page"))
            advanced = break_once(monkeypatch, store._link._desk, "advance", AssertionError("late"))
            store.report_prefill(1e-6)
        waiter.join(TIMEOUT_S)

        assert found == [0]
        assert not advanced, "a node that failed is not used again"
        assert store._link._why.endswith("AssertionError('a page')")


@pytest.mark.parametrize("earlier", [False, True])
def test_a_store_whose_node_fails_when_it_is_closed_gives_its_memory_back(earlier, monkeypatch):
    store = KVStore.open(CAPACITY_BYTES)
    space = open_space(store)
    keys, pages = new_keys(space, 1), content(1, space.page_bytes[0])
    space.put(keys, pages)
    ended = break_once(monkeypatch, store._link.node, "disconnected", AssertionError("a lease"))
    if earlier:
        break_once(monkeypatch, store._link._desk, "receive", AssertionError("a page"))
        assert space.lookup(keys).pages == 0

    store.close()

    assert len(ended) == (not earlier)
    assert mapped_bytes(store._link._mapping) == 0
