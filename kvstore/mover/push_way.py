"""The interface of a device to handoffs: copies of blocks to and from pinned staging. No torch.

A **way** is one direction: a stream, and a few **slots** of pinned memory. In a slot the blocks of
ranges lie one after the other, as they are sent. :mod:`kvstore.tier.push_memory` implements this.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.mover.kvpool import HeadRows, KVPool

SLOTS_MAX: Final = 8
"""Slots of a way."""
SLOTS_MIN: Final = 2
"""One is filled while the other is sent."""
STAGING_BYTES = 256 * 1024 * 1024
"""Maximum pinned memory of a way, as long as that is :data:`SLOTS_MIN` slots or more."""


def slot_count(slot_bytes: int) -> int:
    """How many slots of that size a way has.

    A slot has room for one block of state data, which may be large: 8 of 100 MB would be more than
    a process may lock.
    """
    return min(SLOTS_MAX, max(SLOTS_MIN, STAGING_BYTES // max(slot_bytes, 1)))


class BlockRows(NamedTuple):
    """Some blocks of one plane.

    Attributes:
        memory: 0 = the pool, from 1 on the state buffers.
        plane: number of the plane in this memory.
        blocks: numbers of the blocks.
    """

    memory: int
    plane: int
    blocks: npt.NDArray[np.int64]


class DeviceFence(Protocol):
    """A point in the work of a device."""

    def done(self) -> bool:
        """Whether the device has reached it.

        Raises:
            DeviceUnavailable: the device has failed, so the state is unknown.
        """


class StartedCopy(NamedTuple):
    """A copy that was submitted to the device.

    Attributes:
        fence: after it and all earlier work; None = the device has failed so badly that it is
            unknown when it stops using the slot and the blocks.
        why: why it was not submitted completely; empty = it was.
    """

    fence: DeviceFence | None
    why: str


class DeviceWay(Protocol):
    """One direction between an engine's blocks and pinned memory; any thread may call it.

    Attributes:
        slots: the pinned memory, shape (slots, bytes of one); its owner is the way.
    """

    slots: npt.NDArray[np.uint8]

    def copy(
        self, slot: int, rows: Sequence[BlockRows], heads: HeadRows | None,
        after: Sequence[DeviceFence],
    ) -> StartedCopy:  # fmt: skip
        """Queue the copy of blocks to a slot, or from it; never waits, never raises.

        Args:
            slot: not shared until the fence is reached.
            rows: the contents of the slot, in order.
            heads: only these heads of each token; None = whole blocks.
            after: points that the device reaches before it copies.
        """

    def close(self) -> None:
        """Free the memory: the device has left it alone. Without this it stays for good."""


class DeviceMemory(Protocol):
    """An engine's pool and state buffers on one device.

    Attributes:
        device: name of the device, as of the pool.
        pools: the pool, then one with the planes of each state buffer, in their order.
    """

    device: str
    pools: Sequence[KVPool]

    def fence(self) -> DeviceFence:
        """A point after all that the calling thread's engine has given to the device so far.

        Raises:
            DeviceUnavailable: the device has failed.
        """

    def way_out(self, slot_bytes: int, rows_max: int) -> DeviceWay:
        """Make the way from the blocks to pinned memory.

        Args:
            slot_bytes: of a slot.
            rows_max: blocks that a slot has room for.

        Raises:
            DeviceUnavailable: there is not so much memory, or it cannot be pinned.
        """

    def way_in(self, slot_bytes: int, rows_max: int) -> DeviceWay:
        """Make the way from pinned memory to the blocks; as :meth:`way_out`."""
