"""KV pools on devices, as jobs of a store use them. torch is loaded with the first one."""

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.client import forks
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import CapacityError, DeviceUnavailable

if TYPE_CHECKING:
    from kvstore.tier.gpu import DevicePool
    from kvstore.tier.lane import Device, DeviceCopy, DeviceEvent, Lane

POOLS_MAX: Final = 256
"""Pools that a store can have; an engine has one for each KV group."""


class BlocksOnDevice(NamedTuple):
    """Blocks of a job.

    Attributes:
        pool: their pool.
        table: block numbers, shape (pages, blocks of a page), int64.
        after: the job begins when the device has reached this event.
        copy: the device's unfinished work for the job.
    """

    pool: "DevicePool"
    table: npt.NDArray[np.int64]
    after: "DeviceEvent"
    copy: "DeviceCopy"

    def pages(self, start: int, stop: int) -> "BlocksOnDevice":
        """The blocks of pages ``start`` to ``stop``."""
        return self._replace(table=self.table[start:stop])

    def choose(self, wanted: npt.NDArray[np.intp]) -> "BlocksOnDevice":
        """The blocks of the pages with the numbers ``wanted``."""
        return self._replace(table=self.table[wanted])

    def gather(
        self, targets: mover.Addresses, size: int, seeds: npt.NDArray[np.uint64]
    ) -> mover.Digests:
        """Copy the pages to host memory; see :meth:`kvstore.tier.gpu.DevicePool.extract`."""
        table = np.ascontiguousarray(self.table)
        return self.pool.extract(table, targets, size, seeds, self.after, self.copy)


class DevicePools:
    """The device pools of one store; thread-safe.

    Pools of one device share its lanes: one to the device, one from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[KVPool, DevicePool] = {}
        self._lanes: dict[str, tuple[Device, Lane, Lane]] = {}
        self._closed = ""
        forks.register(self)

    def blocks(self, pool: KVPool, table: npt.NDArray[np.int64]) -> BlocksOnDevice:
        """The blocks of a new job, which starts after the queued work of this thread's engine.

        Raises:
            InvalidArgument: the pool's device has a wrong name.
            DeviceUnavailable: torch or the device is missing, or the device has failed.
        """
        from kvstore.tier.lane import DeviceCopy

        found = self.pool(pool)
        try:
            after = found.fence()
        except RuntimeError as error:
            raise DeviceUnavailable(f"{pool.device}: {error}", "copy") from error
        return BlocksOnDevice(found, table, after, DeviceCopy())

    def pool(self, pool: KVPool) -> "DevicePool":
        """The device's part of a pool; made with the first call."""
        found = self._pools.get(pool)
        return found if found is not None else self._open(pool)

    def close(self) -> None:
        """Free the memory; jobs have ended."""
        with self._lock:
            self._closed = "the store is closed"
            lanes = list(self._lanes.values())
            self._pools.clear()
            self._lanes.clear()
        for _, way_in, way_out in lanes:
            way_in.close()
            way_out.close()

    def forked(self) -> None:
        """In a forked child: the parent has the device."""
        self._lock = threading.Lock()
        forks.keep((self._pools, self._lanes))
        self._pools, self._lanes = {}, {}
        self._closed = "the device belongs to the parent of this fork"

    def _open(self, pool: KVPool) -> "DevicePool":
        try:
            from kvstore.tier.gpu import DevicePool, open_device
            from kvstore.tier.lane import Lane
        except ImportError as error:
            raise DeviceUnavailable(
                f"a pool on {pool.device} needs torch ({error}):"
                " pip install '.[torch]' in the clone"
            ) from error
        with self._lock:
            if self._closed:
                raise DeviceUnavailable(self._closed)
            if pool in self._pools:
                return self._pools[pool]
            if len(self._pools) >= POOLS_MAX:
                raise CapacityError(f"{POOLS_MAX} pools on devices are in use already")
            try:
                if pool.device not in self._lanes:
                    device = open_device(pool.device)
                    self._lanes[pool.device] = device, Lane(device), Lane(device)
                found = DevicePool(pool, *self._lanes[pool.device])
            except RuntimeError as error:
                raise DeviceUnavailable(f"{pool.device}: {error}") from error
            self._pools[pool] = found
            return found
