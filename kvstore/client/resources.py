"""What the spaces of one store share: connections, workers, and what was learnt of the node."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from kvstore.client import forks
from kvstore.client.jobs import Worker
from kvstore.client.link import NodeLink
from kvstore.client.promotion import Promotion
from kvstore.errors import KVStoreError, TransferError

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S_GUESS: Final = 5e9
DISK_BYTES_PER_S_GUESS: Final = 1e9
_SAID_MAX: Final = 100


class StoreResources:
    """What the spaces of one store share.

    Attributes:
        link: the node.
        waiting_link: gives the connection for requests of one purpose that may wait, so that
            nothing else waits behind them.
        timeout_s: longest wait for any answer.
        loads: runs restores.
        stores: runs extracts.
        troubles: error code → how often a read became a miss because of it.
        load_bytes_per_s: how fast loads of pages in the node's memory have been.
        disk_bytes_per_s: how fast the node has brought pages from its disks to its memory.
        disk_waits: how often that was waited for.
        promotion: the device slab; None for none, and in a forked child.
    """

    def __init__(
        self, link: NodeLink, waiting_link: Callable[[str], NodeLink], timeout_s: float,
        promotion: Promotion | None = None,
    ) -> None:  # fmt: skip
        """Start the workers (their threads start with their first job)."""
        self.link = link
        self.waiting_link = waiting_link
        self.timeout_s = timeout_s
        self.promotion = promotion
        self.loads = Worker("kvstore-load")
        self.stores = Worker("kvstore-store")
        self.troubles: Counter[str] = Counter()
        self.load_bytes_per_s = LOAD_BYTES_PER_S_GUESS
        self.disk_bytes_per_s = DISK_BYTES_PER_S_GUESS
        self.disk_waits = 0
        self._said: set[str] = set()
        forks.register(self)

    def forked(self) -> None:
        """In a forked child: the slab is the parent's."""
        self.promotion = None

    def load_seconds(self, size: int, on_disk: int) -> float:
        """How long loading so many bytes may take, when so many of them are on disk only."""
        return size / self.load_bytes_per_s + on_disk / self.disk_bytes_per_s

    def note_disk(self, size: int, seconds: float) -> None:
        """Learn from a wait for pages from the disks."""
        self.disk_waits += 1
        if size and seconds > 0:
            self.disk_bytes_per_s += 0.1 * (size / seconds - self.disk_bytes_per_s)

    def note_load(self, size: int, seconds: float) -> None:
        """Learn from a finished load from memory (moving average over about ten)."""
        if size and seconds > 0:
            self.load_bytes_per_s += 0.1 * (size / seconds - self.load_bytes_per_s)

    def note_trouble(self, error: KVStoreError) -> None:
        """A read became a miss."""
        self.troubles[error.code] += 1
        if isinstance(error, TransferError):
            return  # the link has said that the node is away
        # A node that refuses does so at every lookup: said once, the rest is counted.
        level = logging.WARNING if str(error) not in self._said else logging.DEBUG
        if len(self._said) < _SAID_MAX:
            self._said.add(str(error))
        log.log(level, "a read became a miss: %s", error)


class Opened(NamedTuple):
    """What a space and the engine's shards are called on one connection."""

    epoch: int
    space: int
    shards: list[int]
