"""Leases on runs of pages: asked for, and what of them is on disk brought to memory first."""

from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter
from typing import Final

from kvstore import wire
from kvstore.client.link import NodeLink
from kvstore.client.resources import Opened, StoreResources
from kvstore.page import DIGEST_BYTES, PrefixKeys

LEASE_S: Final = 30.0
DISK_WAIT_S: Final = 2.0
"""How long a load waits for pages to come from disk, and a put for room, at a time."""

names: Final = count(1)
"""Names leases and puts; never repeats in a process."""


class Leases:
    """Leases on the pages of one space.

    Args:
        services: the connections.
        page_bytes: of each shard of the engine.
        numbers: what the space is called on one of them.
    """

    def __init__(
        self,
        services: StoreResources,
        page_bytes: Sequence[int],
        numbers: Callable[[NodeLink], Opened],
    ) -> None:
        self._services = services
        self._page_bytes = page_bytes
        self._numbers = numbers

    def acquire(self, opened: Opened, keys: PrefixKeys, shard: int, lease: int) -> wire.Acquired:
        """Lease the run, bringing to memory what of it is on disk.

        Raises:
            KVStoreError: the node is away, or refuses.
        """
        link = self._services.link
        leased = self._ask(opened, keys, shard, lease)
        if not leased.more:
            return leased
        # Or it would count against the quota a second time.
        link.send(wire.Release(lease), opened.epoch)

        def again() -> None:
            nonlocal leased
            leased = self._ask(opened, keys, shard, lease)

        known, start = len(leased.digests), perf_counter()
        self.warm(keys, shard, again)
        brought = max(0, len(leased.digests) - known) // DIGEST_BYTES
        self._services.note_disk(brought * self._page_bytes[shard], perf_counter() - start)
        return leased

    def warm(self, keys: PrefixKeys, shard: int, then: Callable[[], None]) -> int:
        """Bring a run to memory, do ``then`` while it is pinned there; how many pages are there.

        Raises:
            KVStoreError: the node is away, or refuses.
        """
        link, lease = self._services.waiting_link("load"), next(names)
        opened = self._numbers(link)
        with link.moving():  # or a link that is closed would leave before the lease is given back
            try:
                leased = self._ask(opened, keys, shard, lease, link, DISK_WAIT_S)
                then()
            finally:
                link.send_later(wire.Release(lease), opened.epoch)
        return len(leased.digests) // DIGEST_BYTES

    def _ask(
        self, opened: Opened, keys: PrefixKeys, shard: int, lease: int,
        link: NodeLink | None = None, wait_s: float = 0.0,
    ) -> wire.Acquired:  # fmt: skip
        number, lease_ms = opened.shards[shard], int(LEASE_S * 1000)
        wait_ms, link = int(wait_s * 1000), link or self._services.link
        request = wire.Acquire(0, lease, opened.space, number, keys.packed, lease_ms, wait_ms)
        leased = link.request(request, self._services.timeout_s + wait_s, opened.epoch)
        assert isinstance(leased, wire.Acquired)
        return leased
