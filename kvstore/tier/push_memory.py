"""Blocks of a device pool for handoffs: gathered to pinned memory, and scattered from it.

Everything is done in torch operations, which run alike on ``cuda`` and on ``cpu``. One operation
for each plane gathers or spreads all blocks of a copy; one copy moves them between the device's
staging memory and the host.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvstore.mover.kvpool import HeadRows, KVPool
from kvstore.mover.push_way import BlockRows, DeviceFence, DeviceWay, StartedCopy, slot_count
from kvstore.protocol.errors import DeviceUnavailable, InvalidArgument
from kvstore.tier.gpu import item_of, open_device, plane_view
from kvstore.tier.lane import Device, DeviceEvent

_ALIGNED_BYTES: Final = 64


class PushMemory:
    """An engine's pool and state buffers on one device, for handoffs; thread-safe.

    Args:
        pools: the pool, and one for each state buffer in their order; the engine owns the memory
            and keeps it until the managers that use it were closed.
        device: the device; None = it is opened by the name in the pool.

    Raises:
        InvalidArgument: the pools are on several devices, or on none.
        DeviceUnavailable: the device does not exist.

    Attributes:
        device: its name, as that of the pools.
        pools: as given.
    """

    # An engine may call us in inference mode; tensors made there cannot be written outside of it.
    @torch.inference_mode(mode=False)
    def __init__(self, pools: Sequence[KVPool], device: Device | None = None) -> None:
        names = {pool.device for pool in pools}
        if len(names) != 1 or names == {"cpu"}:
            raise InvalidArgument("pools", f"{sorted(names)} are not one device")
        (self.device,) = names
        self.pools = tuple(pools)
        try:
            self._device = device or open_device(self.device)
            self._pools = [_Planes(pool, self._device) for pool in pools]
        except RuntimeError as error:
            raise DeviceUnavailable(f"{self.device}: {error}") from error

    def fence(self) -> DeviceFence:
        """See :class:`kvstore.mover.push_way.DeviceMemory`."""
        try:
            return _PushFence(self._device.current().record(), self.device)
        except RuntimeError as error:
            raise DeviceUnavailable(f"{self.device}: {_said(error)}") from error

    def way_out(self, slot_bytes: int, rows_max: int) -> DeviceWay:
        """See :class:`kvstore.mover.push_way.DeviceMemory`."""
        return self._way(_gather, slot_bytes, rows_max)

    def way_in(self, slot_bytes: int, rows_max: int) -> DeviceWay:
        """See :class:`kvstore.mover.push_way.DeviceMemory`."""
        return self._way(_spread, slot_bytes, rows_max)

    @torch.inference_mode(mode=False)
    def _way(self, move: "_Move", slot_bytes: int, rows_max: int) -> DeviceWay:
        try:
            return _PushWay(self._device, self._pools, move, slot_bytes, rows_max)
        except (RuntimeError, MemoryError) as error:
            raise DeviceUnavailable(f"{self.device}: {_said(error)}") from error


class _PushFence:
    def __init__(self, event: DeviceEvent, name: str) -> None:
        self.event = event
        self._name = name

    def done(self) -> bool:
        try:
            return self.event.done()
        except RuntimeError as error:
            raise DeviceUnavailable(f"{self._name}: {_said(error)}") from error


class _Planes:
    """The planes of one pool, by blocks or by some heads of them."""

    def __init__(self, pool: KVPool, device: Device) -> None:
        self._pool = pool
        self._item, self.type = item_of(pool)
        self._whole = [plane_view(device, pool, at, self._item, self.type) for at in pool.planes]
        self._cut: tuple[HeadRows, Any, list[Any]] | None = None

    def views(self, heads: HeadRows | None) -> tuple[int, Any, list[Any]]:
        """Bytes of a block, the type of its items, and each plane by (block, token, item)."""
        pool = self._pool
        if heads is None:
            return pool.block_bytes, self.type, [plane.unsqueeze(1) for plane in self._whole]
        row = pool.block_bytes // heads.tokens
        head = row // heads.heads
        size = heads.tokens * (heads.stop - heads.first) * head
        found = self._cut
        if found is None or found[0] != heads:
            self._cut = found = (heads, *self._by_heads(heads, row, head))
        return size, found[1], found[2]

    def _by_heads(self, heads: HeadRows, row: int, head: int) -> tuple[Any, list[Any]]:
        kind, size = (self.type, self._item) if head % self._item == 0 else (torch.uint8, 1)
        shape = self._pool.block_count, heads.tokens, row // size
        cut = slice(heads.first * head // size, heads.stop * head // size)
        return kind, [plane.view(kind).view(shape)[:, :, cut] for plane in self._whole]


class _Part(NamedTuple):
    """One operation: blocks of a plane, and where they are in the device's staging memory."""

    plane: Any
    blocks: Any
    memory: Any


_Move = Callable[[Any, Any, list[_Part]], None]


class _PushWay:
    """A stream, slots in pinned memory, and a buffer of one slot on the device.

    A slot has its data, then the numbers of its blocks.
    """

    def __init__(
        self, device: Device, pools: Sequence[_Planes], move: _Move, slot_bytes: int, rows_max: int
    ) -> None:
        self._device, self._pools, self._move = device, pools, move
        self._lock = threading.Lock()
        self._rows_max = rows_max
        self._index_at = -(-slot_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        whole = self._index_at + -(-8 * rows_max // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._stream = device.stream()
        count = slot_count(whole)
        self._pinned: Any = device.pinned(count * whole).view(count, whole)
        self._staged: Any = device.memory(whole, self._stream)
        self.slots = self._pinned.numpy()[:, :slot_bytes]

    def copy(
        self, slot: int, rows: Sequence[BlockRows], heads: HeadRows | None,
        after: Sequence[DeviceFence],
    ) -> StartedCopy:  # fmt: skip
        """See :class:`kvstore.mover.push_way.DeviceWay`."""
        with self._lock:
            why = ""
            try:
                for fence in after:
                    assert isinstance(fence, _PushFence)
                    self._stream.wait(fence.event)
                self._stream.run(self._work(slot, rows, heads))
            except Exception as error:  # whatever it is: a part may have been given to the device
                why = _said(error)
            try:
                return StartedCopy(_PushFence(self._stream.record(), self._device.name), why)
            except RuntimeError as error:
                return StartedCopy(None, why or _said(error))

    def close(self) -> None:
        """See :class:`kvstore.mover.push_way.DeviceWay`."""
        self._pinned = self._staged = None
        self.slots = np.zeros((0, 0), dtype=np.uint8)

    # ---- internal ---------------------------------------------------------------------------

    def _work(
        self, slot: int, rows: Sequence[BlockRows], heads: HeadRows | None
    ) -> Callable[[], None]:
        """The work for the device; the numbers of the blocks are written to the slot."""
        pinned, staged = self._pinned[slot], self._staged
        numbers = np.concatenate([one.blocks for one in rows])
        count, at = len(numbers), self._index_at
        assert count <= self._rows_max
        pinned.numpy()[at : at + 8 * count].view(np.int64)[:] = numbers
        index = staged[at : at + 8 * count].view(torch.int64)
        source = pinned[at : at + 8 * count].view(torch.int64)
        parts, total = self._parts(rows, heads, index)

        def work() -> None:
            index.copy_(source, non_blocking=True)
            self._move(pinned[:total], staged[:total], parts)

        return work

    def _parts(
        self, rows: Sequence[BlockRows], heads: HeadRows | None, index: Any
    ) -> tuple[list[_Part], int]:
        """The operations, each on neighbours of one plane; and bytes of all."""
        found: list[_Part] = []
        at = first = 0
        size, kind, planes = self._pools[rows[0].memory].views(heads)
        assert all(one.memory == rows[0].memory for one in rows)
        for number, those in groupby(rows, lambda one: one.plane):
            count, plane = sum(len(one.blocks) for one in those), planes[number]
            memory = self._staged[at : at + count * size].view(kind).view(count, *plane.shape[1:])
            found.append(_Part(plane, index[first : first + count], memory))
            at, first = at + count * size, first + count
        assert at <= self.slots.shape[1]
        return found, at


def _gather(pinned: Any, staged: Any, parts: list[_Part]) -> None:
    """Copy blocks to a slot; run on the stream."""
    for part in parts:
        torch.ops.aten.index.Tensor_out(part.plane, [part.blocks], out=part.memory)
    pinned.copy_(staged, non_blocking=True)


def _spread(pinned: Any, staged: Any, parts: list[_Part]) -> None:
    """Copy a slot to blocks; run on the stream."""
    staged.copy_(pinned, non_blocking=True)
    for part in parts:
        part.plane.index_put_((part.blocks,), part.memory)


def _said(error: BaseException) -> str:
    """The first line of an error of torch."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
