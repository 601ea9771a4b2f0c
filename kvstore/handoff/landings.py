"""Data that arrives at decode: received and verified, in the pool or in staging of a device.

In host memory bytes land in the pool itself. For a pool on a device they land in staging, are
verified there, and then spread; such a landing has ended when the device has finished.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from kvstore.handoff import device_copies
from kvstore.handoff.device_copies import DeviceCopies
from kvstore.handoff.effects import Landing
from kvstore.handoff.links import cause_of
from kvstore.handoff.memory import AuxSlots, HandoffPool, seeds_of
from kvstore.handoff.places import AUX_PLANE
from kvstore.handoff.staging import Receive, Staging
from kvstore.handoff.states import FailureCode
from kvstore.mover.kvpool import HeadRows
from kvstore.mover.push_way import BlockRows
from kvstore.mover.ranges import Places
from kvstore.protocol.errors import KVStoreError

_BROKE: Final = "the connection broke within a range"
_WRONG_BYTES: Final = "bytes do not match their digest"
_NO_STAGING: Final = "no staging is free: the device is late, or links of this peer are slow"
_SCRATCH_BYTES: Final = 64 * 1024

_Copy = tuple[list[BlockRows], HeadRows | None]
LandingEnded = Callable[[Landing, FailureCode | None, str], None]
"""Gets a landing whose blocks are not written any more, why it failed, and a description."""


def skip(size: int, receive: Receive) -> None:
    """Receive and discard bytes; raises what ``receive`` raises."""
    scratch = np.empty(min(size, _SCRATCH_BYTES), dtype=np.uint8)
    for at in range(0, size, _SCRATCH_BYTES):
        receive([(int(scratch.ctypes.data), min(size - at, _SCRATCH_BYTES))], b"")


class HostLandings:
    """The landings of one decode manager, into a pool in host memory.

    Args:
        pool: of decode.
        aux: for aux data.
        staged: start address of the memory for heads that another transport writes.
        landed: called once per landing, without locks.
    """

    copying = 0

    def __init__(self, pool: HandoffPool, aux: AuxSlots, staged: int, landed: LandingEnded) -> None:
        self._pool, self._aux, self._staged, self._landed = pool, aux, staged, landed

    def reader(self, peer: str) -> "HostReader":
        """For one reader of a peer's links; it has memory of its own."""
        del peer
        return HostReader(self._pool, self._aux, self._staged, self._landed)

    def settle(self, link: bytes, settled: Callable[[], None]) -> None:
        """A link has ended: call something, as nothing lands any more."""
        del link
        settled()

    def close(self) -> None:
        """Nothing is left to wait for."""


class HostReader:
    """Receives the data of one reader; the arguments are those of :class:`HostLandings`."""

    def __init__(self, pool: HandoffPool, aux: AuxSlots, staged: int, landed: LandingEnded) -> None:
        self._pool, self._aux, self._staged, self._landed = pool, aux, staged, landed
        self._staging = Staging()

    def land(self, landing: Landing, receive: Receive | None) -> None:
        """Receive the data of a landing, unless another transport has written it; verify it.

        Raises:
            KVStoreError: what ``receive`` raises; the landing has ended.
        """
        code: FailureCode | None = FailureCode.PEER_CLOSED
        why = _BROKE
        try:
            right = self._staging.land(self._pool, self._aux, landing, receive, self._staged)
            code, why = None if right else FailureCode.DIGEST, _WRONG_BYTES
        except KVStoreError as error:
            code, why = cause_of(error), f"within a range: {error}"
            raise
        finally:
            self._landed(landing, code, why)


class DeviceLandings:
    """The landings of one decode manager; each reader calls it for its own link.

    Args:
        pool: on a device.
        aux: for aux data.
        landed: called once per landing, without locks.
        failed: called with the room of a landing whose copy has failed, and why, while the device
            may still write to its blocks.

    Raises:
        DeviceUnavailable: there is no memory for staging.
    """

    def __init__(
        self, pool: HandoffPool, aux: AuxSlots, landed: LandingEnded,
        failed: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self._pool, self._aux, self._landed, self._failed = pool, aux, landed, failed
        self._lock = threading.Lock()
        self._copying: Counter[bytes] = Counter()  # of each link
        self._settled: dict[bytes, Callable[[], None]] = {}
        assert pool.device is not None
        way = pool.device.way_in(pool.slot_bytes, pool.rows_max)
        self._copies = DeviceCopies(way)

    @property
    def copying(self) -> int:
        """How many copies the device has not finished."""
        return self._copies.flying

    def land(self, peer: str, landing: Landing, receive: Receive | None) -> None:
        """Receive the data of a landing, and let the device copy it to its blocks.

        Args:
            peer: owner of the link; each peer has a share of the slots.
            landing: the landing.
            receive: receives the data.

        Raises:
            KVStoreError: what ``receive`` raises; the landing has ended.
        """
        assert receive is not None, "no other transport writes to a device"
        size = landing.share.bytes_of(landing.ranges)
        slot = self._copies.take_for(peer, device_copies.DEVICE_S)
        code: FailureCode | None = FailureCode.PEER_CLOSED
        why, copy = _BROKE, None
        try:
            if slot < 0:
                skip(size, receive)
                code, why = FailureCode.DEVICE, _NO_STAGING
            elif receive(self._places(landing, slot), _seeds(landing)) != landing.digests:
                code, why = FailureCode.DIGEST, _WRONG_BYTES
            else:
                copy = self._copy_of(landing)
                code = None
        except KVStoreError as error:
            code, why = cause_of(error), f"within a range: {error}"
            raise
        finally:
            if slot >= 0:
                self._copies.done_for(peer)
            if code is not None:
                if slot >= 0:
                    self._copies.free(slot)
                self._landed(landing, code, why)
        if code is None:
            self._spread(landing, slot, copy)

    def reader(self, peer: str) -> "DeviceReader":
        """For one reader of a peer's links."""
        return DeviceReader(self, peer)

    def settle(self, link: bytes, settled: Callable[[], None]) -> None:
        """A link has ended: call ``settled`` once no landing of it is being copied any more."""
        with self._lock:
            if self._copying[link]:
                self._settled[link] = settled
                return
        settled()

    def close(self) -> None:
        """Wait until the device has finished, without limit."""
        self._copies.close()

    # ---- internal ---------------------------------------------------------------------------

    def _places(self, landing: Landing, slot: int) -> Places:
        places, at = [], int(self._copies.slot(slot).ctypes.data)
        for one, target in zip(landing.ranges, landing.targets, strict=True):
            if one.plane == AUX_PLANE:
                places.append(self._aux.place(target, one.size))
                continue
            places.append((at, landing.share.range_bytes(one)))
            at += places[-1][1]
        return places

    def _copy_of(self, landing: Landing) -> _Copy | None:
        """The copy for the device; None = no data for blocks."""
        of_blocks = [at for at, one in enumerate(landing.ranges) if one.plane != AUX_PLANE]
        if not of_blocks:
            return None
        rows = self._pool.block_rows(
            [landing.ranges[at] for at in of_blocks],
            [landing.targets[at] for at in of_blocks],
            landing.rows,
        )
        return rows, self._pool.head_rows(landing.share.heads) if landing.rows else None

    def _spread(self, landing: Landing, slot: int, copy: _Copy | None) -> None:
        """Let the device copy the contents of a slot."""
        if copy is None:
            self._copies.free(slot)
            self._landed(landing, None, "")
            return
        with self._lock:
            self._copying[landing.link] += 1
        self._copies.begin(slot, *copy, landing.after, self._end_of(landing, slot))

    def _end_of(self, landing: Landing, slot: int) -> Callable[[str, bool], None]:
        def ended(why: str, idle: bool) -> None:  # noqa: FBT001
            if not idle:
                self._failed(landing.room, why)
                return
            if not why:
                self._copies.free(slot)
            self._landed(landing, FailureCode.DEVICE if why else None, why)
            with self._lock:
                self._copying[landing.link] -= 1
                self._copying = +self._copying
                last = not self._copying[landing.link]
                settled = self._settled.pop(landing.link, None) if last else None
            if settled is not None:
                settled()

        return ended


class DeviceReader:
    """Receives the data of one reader over a link of a peer."""

    def __init__(self, landings: DeviceLandings, peer: str) -> None:
        self._landings, self._peer = landings, peer

    def land(self, landing: Landing, receive: Receive | None) -> None:
        """See :meth:`DeviceLandings.land`."""
        self._landings.land(self._peer, landing, receive)


def open_landings(
    pool: HandoffPool, aux: AuxSlots, staged: int, landed: LandingEnded,
    failed: Callable[[int, str], None],
) -> HostLandings | DeviceLandings:  # fmt: skip
    """The landings into a pool, in host memory or on a device; see these classes."""
    if pool.device is None:
        return HostLandings(pool, aux, staged, landed)
    return DeviceLandings(pool, aux, landed, failed)


def _seeds(landing: Landing) -> bytes:
    return seeds_of(landing.share.seed_of(landing.room), landing.ranges)
