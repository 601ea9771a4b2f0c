"""Memory of a handoff: an engine's pool by ranges, and decode's slots for aux data."""

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.handoff.effects import Landing, PushJob
from kvstore.handoff.messages import RANGES_BYTES_MAX, LandingPlace
from kvstore.handoff.places import (
    AUX_PLANE,
    PLANES_MAX,
    STATE_PLANE,
    PushRange,
    pack_ranges,
    state_of,
)
from kvstore.handoff.ranks import INSTANCE_BYTES, RankGroup, RankPart, Span
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.state_data import StateBuffer
from kvstore.handoff.writing import BlockWrite
from kvstore.mover import Pieces
from kvstore.mover.kvpool import HeadRows, KVPool
from kvstore.mover.push_way import BlockRows, DeviceFence, DeviceMemory
from kvstore.mover.ranges import Places, digest_ranges, range_seeds
from kvstore.protocol.errors import InvalidArgument


class HandoffPool:
    """An engine's pool, as handoffs use it.

    Args:
        pool: in host memory with its blocks adjacent, or on a device; the engine owns the memory
            and keeps it until the manager that uses it was closed.
        block_tokens: tokens of one block.
        generations: one number for each block, shape (block_count,); the engine adds 1 to it
            before it gives the block to another request. None = it has none: then a block that is
            reused too early is detected only if its bytes change while they are sent.
        group: all ranks of the engine, and the number of the rank with this pool, so its layers and
            heads it has. A block has one row per token, and in a row head after head. None = there
            is one rank, here and at the engines that it exchanges KV with.
        states: memory of a request's other data, in the same order at both sides.
        device: where the pool and all state buffers are, if not in host memory, for example a
            :class:`kvstore.tier.push_memory.PushMemory`. A block is then read when the device has
            reached the point at which it was sent, and written when it has reached the one at which
            it was announced.
        fake: move no KV, for tests and warm-up: handoffs go through all states, with their aux
            data, and nothing in the pool is read or written. Both sides must use it.

    Attributes:
        shape: its numbers; a block of a fake pool has 0 bytes, so no other pool fits to it.
        group: as given.
        device: as given.

    Raises:
        InvalidArgument: the pool or a state buffer is not the memory of ``device``, has gaps
            between blocks in host memory, or a number is wrong; or the group does not fit to it.
    """

    def __init__(
        self,
        pool: KVPool,
        block_tokens: int,
        generations: npt.NDArray[np.uint64] | None = None,
        group: RankGroup | None = None,
        *,
        states: Sequence[StateBuffer] = (),
        device: DeviceMemory | None = None,
        fake: bool = False,
    ) -> None:
        there = device.device if device is not None else "cpu"
        if pool.device != there:
            raise InvalidArgument("device", f"the pool is on {pool.device}, not {there}")
        if device is None and pool.block_stride_bytes != pool.block_bytes:
            raise InvalidArgument("block_stride_bytes", "handoffs need blocks without gaps")
        if fake and group is not None:
            raise InvalidArgument("fake", "only possible with one rank")
        if device is not None:
            _check_device(device, pool, states)
        self.device = None if fake else device
        size = 0 if fake else pool.block_bytes
        if group is None:
            whole = RankPart((0, pool.layer_count), (0, 1))
            group = RankGroup.alone(whole, os.urandom(INSTANCE_BYTES))
        group.check(pool.layer_count)
        self.group = group
        part = group.part
        self.shape = PoolShape(
            len(pool.planes),
            pool.planes_per_layer,
            size,
            block_tokens,
            pool.block_count,
            part.layers[0],
            part.heads,
            tuple((one._replace(block_bytes=0) if fake else one).shape for one in states),
        )
        _check_generations("generations", generations, pool.block_count)
        for one in states:
            field = f"states.{one.name}.generations"
            _check_generations(field, one.generations, one.block_count)
            stages = {part.layers for part in group.parts}
            if one.is_alike and one.first_plane is None and len(stages) > 1:
                what = "the ranks have different layers: say which planes this one has"
                raise InvalidArgument(f"states.{one.name}.first_plane", what)
        self._states = [
            StateMemory(one, index, 0 if fake else one.block_bytes)
            for index, one in enumerate(states)
        ]
        self._pool = pool
        self._planes = pool.planes
        self._block_bytes = size
        self._generations = generations

    def generations(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """The generations of blocks now; empty if the pool has none.

        Raises:
            InvalidArgument: a block is not in the pool.
        """
        numbers = np.asarray(blocks, dtype=np.int64)
        if not self.shape.has(numbers):
            raise InvalidArgument("blocks", "a block is not in the pool")
        if self._generations is None:
            return np.zeros(0, dtype=np.uint64)
        return self._generations[numbers]

    def state_generations(self, name: str, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """The generations of blocks of a state buffer now; empty if it has none.

        Raises:
            InvalidArgument: there is no such buffer, or a block is not in it.
        """
        for one in self._states:
            if one.buffer.name == name:
                return one.generations(blocks)
        raise InvalidArgument("states", f"{name[:40]!r} is not a state buffer")

    def is_unchanged(self, job: PushJob) -> bool:
        """Whether the blocks of a job are still those that its KV was written to."""
        index = state_of(job.ranges[0].plane)
        now = self._generations if index < 0 else self._states[index].buffer.generations
        if now is None or not len(job.generations):
            return True
        return bool((now[job.blocks] == job.generations).all())

    def write_of(self, job: PushJob, place: LandingPlace, gathered: Places = ()) -> BlockWrite:
        """A job as blocks to write, where decode has announced them.

        Args:
            job: of a share that is not staged, unless its ranges are gathered.
            place: of the announcement.
            gathered: where each range is, or will be before it is written; empty = in the pool.
        """
        assert len(job.targets) == len(job.ranges)
        size, sizes = job.share.block_bytes, [one.size for one in job.ranges]
        planes = np.frombuffer(place.planes, dtype="<u8").astype(np.uint64)
        there = planes[[one.plane - job.share.planes.start for one in job.ranges]]
        there += np.array(job.targets, dtype=np.uint64) * np.uint64(size)
        places = gathered or self.places(job.ranges, job.sources)
        here = np.array([at for at, _ in places], dtype=np.uint64)
        offsets = np.concatenate([np.arange(one) for one in sizes]).astype(np.uint64)
        offsets *= np.uint64(size)
        return BlockWrite(
            job.number, place.endpoint, np.repeat(here, sizes) + offsets,
            np.repeat(there, sizes) + offsets, size,
        )  # fmt: skip

    def places(self, ranges: Sequence[PushRange], firsts: Sequence[int]) -> Places:
        """Where ranges are in this pool, given the first block of each.

        Either all are of KV, or all are of one state buffer.
        """
        assert self.device is None
        if ranges[0].plane >= STATE_PLANE:
            return self._states[state_of(ranges[0].plane)].places(ranges, firsts)
        size, first_plane = self._block_bytes, self.shape.first_plane
        return [
            (self._planes[one.plane - first_plane] + first * size, one.size * size)
            for one, first in zip(ranges, firsts, strict=True)
        ]

    def fence(self) -> tuple[DeviceFence, ...]:
        """A fence after all work that the calling thread's engine has queued on the device so far.

        Raises:
            DeviceUnavailable: the device has failed.
        """
        return () if self.device is None else (self.device.fence(),)

    def check_transport(self, field: str) -> None:
        """Refuse a transport other than TCP if it cannot read or write the pool.

        Raises:
            InvalidArgument: with ``field``; the pool is on a device.
        """
        if self.device is not None:
            raise InvalidArgument(field, f"a pool on {self.device.device} goes over TCP only")

    @property
    def slot_bytes(self) -> int:
        """Maximum bytes of all ranges of a message, without aux data."""
        states = self.shape.states
        return max(RANGES_BYTES_MAX, self._block_bytes, *[one.block_bytes for one in states])

    @property
    def rows_max(self) -> int:
        """Maximum blocks of all ranges of a message; if heads are gathered, they are smaller."""
        sizes = [self._block_bytes // self.shape.head_count]
        sizes += [one.block_bytes for one in self.shape.states]
        return self.slot_bytes // max(min(sizes), 1) + 1

    def block_rows(
        self, ranges: Sequence[PushRange], firsts: Sequence[int],
        rows: Sequence[npt.NDArray[np.int64]],
    ) -> list[BlockRows]:  # fmt: skip
        """The blocks of ranges, for a device.

        Args:
            ranges: all of KV, or all of one state buffer.
            firsts: first block of each.
            rows: blocks of each; empty = they are neighbours.
        """
        index = state_of(ranges[0].plane)
        before = self.shape.first_plane if index < 0 else self._states[index].first_plane
        blocks = rows or [
            np.arange(first, first + one.size, dtype=np.int64)
            for one, first in zip(ranges, firsts, strict=True)
        ]
        return [
            BlockRows(index + 1, one.plane - before, these)
            for one, these in zip(ranges, blocks, strict=True)
        ]

    def head_rows(self, heads: Span) -> HeadRows:
        """Some heads, of those of this pool, in a block."""
        shape = self.shape
        first, stop = (head - shape.heads[0] for head in heads)
        return HeadRows(shape.block_tokens, shape.head_count, first, stop)

    def head_pieces(
        self, planes: Sequence[int], rows: Sequence[npt.NDArray[np.int64]], heads: Span
    ) -> Pieces:
        """The pieces of some heads of ranges of one length.

        Args:
            planes: plane of each range, among the planes of all ranks.
            rows: blocks of each range.
            heads: first head, and the one after the last, among the heads of this pool.
        """
        return self._pool.head_pieces(
            np.array(planes) - self.shape.first_plane, np.stack(list(rows)), self.head_rows(heads)
        )


def _check_device(device: DeviceMemory, pool: KVPool, states: Sequence[StateBuffer]) -> None:
    """Refuse a device whose memory is not the pool's: its copies would verify with other contents.

    Raises:
        InvalidArgument: ``device``.
    """
    there = [(tuple(one.planes), one.block_bytes, one.block_count) for one in device.pools]
    here = [(tuple(pool.planes), pool.block_bytes, pool.block_count)]
    here += [(tuple(one.planes), one.block_bytes, one.block_count) for one in states]
    if there != here:
        what = "its pools are not this pool and the planes of each state buffer, in their order"
        raise InvalidArgument("device", what)


class StateMemory:
    """A state buffer by ranges.

    Args:
        buffer: of the engine.
        index: of the buffer.
        block_bytes: that are moved of each block; 0 = nothing is.

    Attributes:
        first_plane: number of its first plane in messages.
    """

    def __init__(self, buffer: StateBuffer, index: int, block_bytes: int) -> None:
        self.buffer = buffer
        self.first_plane = STATE_PLANE + index * PLANES_MAX + (buffer.first_plane or 0)
        self._block_bytes = block_bytes

    def generations(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """As :meth:`HandoffPool.state_generations`."""
        numbers = np.asarray(blocks, dtype=np.int64)
        if ((numbers < 0) | (numbers >= self.buffer.block_count)).any():
            raise InvalidArgument(f"states.{self.buffer.name}", "a block is not in the buffer")
        if self.buffer.generations is None:
            return np.zeros(0, dtype=np.uint64)
        return self.buffer.generations[numbers]

    def places(self, ranges: Sequence[PushRange], firsts: Sequence[int]) -> Places:
        """As :meth:`HandoffPool.places`."""
        size, planes = self._block_bytes, self.buffer.planes
        return [
            (planes[one.plane - self.first_plane] + first * size, one.size * size)
            for one, first in zip(ranges, firsts, strict=True)
        ]


class AuxSlots:
    """Memory for aux data at decode, of our own.

    Args:
        count: slots.
        slot_bytes: bytes of one.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self._memory = np.zeros((count, slot_bytes), dtype=np.uint8)

    def place(self, slot: int, size: int) -> tuple[int, int]:
        """Address and bytes of the data in a slot."""
        assert 0 <= slot < self.count
        assert size <= self.slot_bytes
        return int(self._memory.ctypes.data) + slot * self.slot_bytes, size

    def read(self, slot: int, size: int) -> bytes:
        """A copy of the data in a slot."""
        return self._memory[slot, :size].tobytes()


def _check_generations(field: str, numbers: npt.NDArray[np.uint64] | None, count: int) -> None:
    """Refuse generations that are not one for each block."""
    if numbers is not None and numbers.shape != (count,):
        raise InvalidArgument(field, f"{numbers.shape}, not ({count},)")


def landing_places(pool: HandoffPool, aux: AuxSlots, landing: Landing) -> Places:
    """Where the bytes of a landing belong, in order."""
    if AUX_PLANE not in [one.plane for one in landing.ranges]:
        return pool.places(landing.ranges, landing.targets)
    return [
        aux.place(target, one.size) if one.plane == AUX_PLANE else pool.places([one], [target])[0]
        for one, target in zip(landing.ranges, landing.targets, strict=True)
    ]


def seeds_of(seed: int, ranges: Sequence[PushRange]) -> bytes:
    """The seeds of the digests of ranges: other bytes, or the same elsewhere, do not match them.

    They follow from the xxh3_64 of the seed, 8 bytes little-endian; see
    :func:`kvstore.mover.ranges.range_seeds`.

    Args:
        seed: :meth:`kvstore.handoff.shape.LinkShare.seed_of` the room.
        ranges: any number.

    Returns:
        8 bytes of each.
    """
    of_room = xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little"))
    return range_seeds(of_room, pack_ranges(ranges))


def digests_of(seed: int, ranges: Sequence[PushRange], places: Places) -> bytes:
    """16 bytes for each range, of the bytes that are at its place now; zeros if it has none.

    Args:
        seed: :meth:`kvstore.handoff.shape.LinkShare.seed_of` the room.
        ranges: at least one.
        places: where each is.
    """
    return digest_ranges(places, seeds_of(seed, ranges))
