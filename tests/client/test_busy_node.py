"""Goal: a put ends in a limited time, with few questions, at a node that stays busy."""

from time import monotonic

import pytest

from kvstore.client import stores
from kvstore.client.loads import DISK_WAIT_S
from kvstore.client.results import PutResult
from kvstore.client.store import KVStore
from kvstore.client.stores import BUSY_PAUSE_S
from kvstore.protocol.errors import CapacityError
from tests.client.conftest import CAPACITY_BYTES, content, new_keys, open_space


def test_a_node_that_refuses_at_once_to_let_a_put_wait_is_not_asked_without_end(monkeypatch):
    with KVStore.open(CAPACITY_BYTES) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 3), content(3, space.page_bytes[0])
        asked: list[int] = []

        def busy(rest, *_arguments) -> tuple[PutResult, bool]:
            asked.append(len(rest))
            assert len(asked) < 1000, "it is asked without end"
            return PutResult(0, refused=len(rest)), True

        monkeypatch.setattr(space._stores, "put", busy)
        began = monotonic()

        with pytest.raises(CapacityError, match="3 of 3 pages"):
            space.put(keys, pages)

        assert monotonic() - began >= DISK_WAIT_S
        assert 3 <= len(asked) <= DISK_WAIT_S / BUSY_PAUSE_S + 3


def test_a_node_that_decides_slowly_is_asked_until_it_has_decided_on_all(monkeypatch):
    with KVStore.open(CAPACITY_BYTES) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 3), content(3, space.page_bytes[0])
        now = [100.0]
        monkeypatch.setattr(stores, "monotonic", lambda: now[0])

        def slow(rest, *_arguments) -> tuple[PutResult, bool]:
            now[0] += 0.9 * DISK_WAIT_S
            return PutResult(1, refused=len(rest) - 1), True

        monkeypatch.setattr(space._stores, "put", slow)

        assert space.put(keys, pages) == PutResult(3)
        assert now[0] > 100.0 + 2 * DISK_WAIT_S
