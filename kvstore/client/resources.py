"""Resources shared by the spaces of a store: connections, workers, and measured speeds."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvstore.client import forks
from kvstore.client.device import DevicePools
from kvstore.client.jobs import Worker
from kvstore.client.node_link import NodeLink
from kvstore.client.promotion import Promotion
from kvstore.protocol.errors import DeviceCause, DeviceUnavailable, KVStoreError, TransferError

log = logging.getLogger(__name__)

LOAD_BYTES_PER_S_GUESS: Final = 5e9
DISK_BYTES_PER_S_GUESS: Final = 1e9
_SAID_MAX: Final = 100
LOADS: Final = 2
"""Maximum loads of a store that copy at a time: an engine's ranks and KV groups, and requests that
start together, do not wait for each other's copies. A single load is not faster."""
_SLOW_LOADS: Final = 4
"""Maximum loads of a store that wait at a time, each on a connection of its own."""


class StoreResources:
    """Resources shared by the spaces of one store.

    Attributes:
        link: the link to the node.
        waiting_link: returns the connection for requests of one purpose that may wait, so that
            other requests do not wait behind them.
        timeout_s: maximum wait for an answer.
        loads: runs restores, :data:`LOADS` at a time.
        slow_loads: runs the loads that wait for a disk or for other nodes, so that others do not
            wait behind them.
        stores: runs extracts.
        troubles: error code → how many reads became a miss because of it.
        device_failures: cause → how many of these failed on an engine's device because of it.
        load_bytes_per_s: speed of loads from the node's memory, as its loaders measured it.
        disk_bytes_per_s: speed of the node's reads from disk to memory, likewise.
        waits: number of loads that waited for the disk or for other nodes.
        promotion: the device slab; None = no slab, or a forked child.
        devices: KV pools on devices.
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
        self.devices = DevicePools()
        self.loads = Worker("kvstore-load", LOADS)
        self.slow_loads = Worker("kvstore-slow-load", _SLOW_LOADS)
        self._lanes = deque(range(_SLOW_LOADS))
        self.stores = Worker("kvstore-store")
        self.troubles: Counter[str] = Counter()
        self.device_failures: Counter[DeviceCause] = Counter()
        self.load_bytes_per_s = LOAD_BYTES_PER_S_GUESS
        self.disk_bytes_per_s = DISK_BYTES_PER_S_GUESS
        self.waits = 0
        self._said: set[str] = set()
        forks.register(self)

    def forked(self) -> None:
        """In a forked child: the slab belongs to the parent, and so do loads that wait."""
        self.promotion = None
        self._lanes = deque(range(_SLOW_LOADS))

    @contextmanager
    def slow_link(self) -> Iterator[NodeLink]:
        """A connection for one load that waits; shared only if too many wait at a time."""
        try:
            lane = self._lanes.pop()
        except IndexError:
            yield self.waiting_link("load 0")
            return
        try:
            yield self.waiting_link(f"load {lane}")
        finally:
            self._lanes.append(lane)

    def note_trouble(self, error: KVStoreError) -> None:
        """Count and log a read that became a miss."""
        self.troubles[error.code] += 1
        if isinstance(error, DeviceUnavailable):
            self.device_failures[error.cause] += 1
        if isinstance(error, TransferError):
            return  # the link has logged that the node is away
        # A node may refuse every lookup: log it once, and count all.
        level = logging.WARNING if str(error) not in self._said else logging.DEBUG
        if len(self._said) < _SAID_MAX:
            self._said.add(str(error))
        log.log(level, "a read became a miss: %s", error)


class Opened(NamedTuple):
    """The numbers of a space and its shards on one connection."""

    epoch: int
    space: int
    shards: list[int]
