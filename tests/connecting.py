"""Stores that are connected before a test uses them."""

from typing import Any

import pytest

from kvstore.client.store import KVStore
from tests.conftest import wait_for


def connect(address: str, **options: Any) -> KVStore:
    """A store of a node that runs; connected also where its first attempt came to nothing.

    That gives a busy machine a second, and what a store does before the next attempt is a miss.
    """
    store = KVStore.connect(address, **options)
    if not wait_for(lambda: store.connected):
        store.close()
        pytest.fail(f"no connection to {address}")
    return store
