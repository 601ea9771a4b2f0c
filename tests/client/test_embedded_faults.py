"""Goal: a fault of the node in this process is a lost node to its engine, never an exception."""

import logging

import numpy as np
import pytest

from kvstore.client.store import KVStore
from kvstore.protocol.errors import PeerUnreachable
from tests.client.conftest import CAPACITY_BYTES, content, new_keys, open_space


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
