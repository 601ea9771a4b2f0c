"""Ranges of memory that are sent and received over a connection: ``_ranges.c``, or Python.

The ranges of one call are scattered over a pool, each with its digest (the xxh3_128 of its bytes,
seeded). They are received straight into their memory and digested while they are in the cache.
Memory is passed as addresses: the caller keeps it mapped until the call returns. A descriptor is
that of a connected socket without TLS; who shuts it down ends the call.
"""

import ctypes
import errno
import os
import select
import socket
import time
from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.mover.binary import LIBRARY, load
from kvstore.protocol.errors import InvalidArgument, PeerUnreachable, TransferTimeout
from kvstore.protocol.page import DIGEST_BYTES

Places = Sequence[tuple[int, int]]
"""Address and bytes of each range."""
STEP_BYTES: Final = 256 * 1024
"""Bytes that must come within the silence, as in ``_ranges.c``."""
_BUFFERS: Final = 64
_HALF: Final = np.uint64(32)
_MIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_MIX_END: Final = np.uint64(31)


class FrameBuffer:
    """Memory for the frames of one connection.

    Args:
        room: bytes.

    Attributes:
        memory: of so many bytes.
    """

    __slots__ = ("memory",)

    def __init__(self, room: int) -> None:
        self.memory = ctypes.create_string_buffer(room)

    def read(self, size: int) -> bytes:
        """A copy of the first bytes."""
        assert 0 <= size <= len(self.memory)
        return ctypes.string_at(self.memory, size)


class NativeRanges:
    """``_ranges.c``, called through ctypes.

    Args:
        library: the built library.
        isa: as of :class:`~kvstore.mover.native.Native`.
    """

    def __init__(self, library: ctypes.CDLL, isa: int | None = None) -> None:
        number, size, memory = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        word = ctypes.c_uint64
        self._seeds = library.kv_range_seeds
        self._seeds.restype = None
        self._seeds.argtypes = [word, size, memory, memory]
        self._digest = library.kv_digest_ranges
        self._digest.restype = size
        self._digest.argtypes = [number, size, memory, memory, memory]
        self._receive = library.kv_receive_ranges
        self._receive.restype = size
        self._receive.argtypes = [number, number, size, memory, memory, memory, size]
        self._send = library.kv_send_ranges
        self._send.restype = size
        self._send.argtypes = [number, memory, word, size, memory, size]
        self._frame = library.kv_receive_frame
        self._frame.restype = size
        self._frame.argtypes = [number, memory, size, ctypes.c_uint32, size]
        self._isa = library.kv_best_isa() if isa is None else isa

    def seeds(self, of_room: int, ranges: bytes) -> bytes:
        """See :func:`range_seeds`."""
        count = len(ranges) // 12
        found = ctypes.create_string_buffer(8 * count)
        self._seeds(of_room, count, ranges, found)
        return found.raw

    def digest(self, places: Places, seeds: bytes) -> bytes:
        """See :func:`digest_ranges`."""
        found = ctypes.create_string_buffer(DIGEST_BYTES * len(places))
        _check(self._digest(self._isa, len(places), _packed(places), seeds, found))
        return found.raw

    def receive(self, descriptor: int, places: Places, seeds: bytes, silence_s: float) -> bytes:
        """See :func:`receive_ranges`."""
        found = ctypes.create_string_buffer(DIGEST_BYTES * len(places)) if seeds else None
        silence_ns = int(silence_s * 1e9)
        arrays = (_packed(places), seeds or None, found)
        _check(self._receive(descriptor, self._isa, len(places), *arrays, silence_ns))
        return found.raw if found is not None else b""

    def send(self, descriptor: int, head: bytes, places: Places, limit_s: float) -> None:
        """See :func:`send_ranges`."""
        limit_ns = int(limit_s * 1e9)
        _check(self._send(descriptor, head, len(head), len(places), _packed(places), limit_ns))

    def receive_frame(
        self, descriptor: int, frame: FrameBuffer, tail_bytes: int, silence_s: float
    ) -> int:
        """See :func:`receive_frame`."""
        room, silence_ns = len(frame.memory), int(silence_s * 1e9)
        size: int = self._frame(descriptor, frame.memory, room, tail_bytes, silence_ns)
        _check(min(size, 0))
        return size


class PlainRanges:
    """The same without the library, slower."""

    def seeds(self, of_room: int, ranges: bytes) -> bytes:
        """See :func:`range_seeds`."""
        numbers = np.frombuffer(ranges, dtype="<u4").astype(np.uint64).reshape(-1, 3)
        place = np.uint64(of_room) ^ (numbers[:, 0] << _HALF | numbers[:, 1])
        return _mixed(_mixed(place) ^ numbers[:, 2]).tobytes()

    def digest(self, places: Places, seeds: bytes) -> bytes:
        """See :func:`digest_ranges`."""
        numbers = np.frombuffer(seeds, dtype=np.uint64).tolist()
        return b"".join(
            xxhash.xxh3_128_digest(_memory(address, size), seed) if size else bytes(DIGEST_BYTES)
            for (address, size), seed in zip(places, numbers, strict=True)
        )

    def receive(self, descriptor: int, places: Places, seeds: bytes, silence_s: float) -> bytes:
        """See :func:`receive_ranges`."""
        left = [_memory(*place) for place in places if place[1]]
        until, fresh = time.monotonic() + silence_s, 0
        with _Borrowed(descriptor) as connection:
            while left:
                try:
                    size = connection.recvmsg_into(left[:_BUFFERS], 0, socket.MSG_DONTWAIT)[0]
                except OSError as error:
                    _wait_again(error, descriptor, select.POLLIN, until)
                    continue
                if not size:
                    _check(-errno.EPIPE)
                left, fresh = _behind(left, size), fresh + size
                if fresh >= STEP_BYTES:
                    until, fresh = time.monotonic() + silence_s, 0
        return self.digest(places, seeds) if seeds else b""

    def send(self, descriptor: int, head: bytes, places: Places, limit_s: float) -> None:
        """See :func:`send_ranges`."""
        left = [memoryview(head), *[_memory(*place) for place in places if place[1]]]
        until = time.monotonic() + limit_s
        with _Borrowed(descriptor) as connection:
            while left:
                try:
                    size = connection.sendmsg(left[:_BUFFERS], [], socket.MSG_DONTWAIT)
                except OSError as error:
                    _wait_again(error, descriptor, select.POLLOUT, until)
                    continue
                left = _behind(left, size)

    def receive_frame(
        self, descriptor: int, frame: FrameBuffer, tail_bytes: int, silence_s: float
    ) -> int:
        """See :func:`receive_frame`."""
        length = ctypes.create_string_buffer(4)
        self.receive(descriptor, [(ctypes.addressof(length), 4)], b"", silence_s)
        size = int.from_bytes(length.raw, "little") + tail_bytes
        if size <= len(frame.memory):
            self.receive(descriptor, [(ctypes.addressof(frame.memory), size)], b"", silence_s)
        return size


class _Borrowed:
    """A socket of somebody else's descriptor, which stays open."""

    def __init__(self, descriptor: int) -> None:
        try:
            self._socket = socket.socket(fileno=descriptor)
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"the connection broke: {error}") from error

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def range_seeds(of_room: int, ranges: bytes) -> bytes:
    """The seeds of the digests of ranges.

    With M, the last step of SplitMix64 (https://prng.di.unimi.it/splitmix64.c), the seed of a range
    is M(M(of_room ^ (plane << 32 | first)) ^ size). All numbers have 64 bits.

    Args:
        of_room: 64 bits.
        ranges: plane, first position and size of each, 3 x 4 bytes, little-endian.

    Returns:
        8 bytes of each, in the machine's order.
    """
    return _chosen.seeds(of_room, ranges)


def digest_ranges(places: Places, seeds: bytes) -> bytes:
    """16 bytes of digest of each range; zeros if it has no bytes.

    Args:
        places: of the ranges.
        seeds: as :func:`range_seeds` returns them.
    """
    _check_seeds(places, seeds)
    return _chosen.digest(places, seeds)


def receive_ranges(descriptor: int, places: Places, seeds: bytes, silence_s: float) -> bytes:
    """Fill ranges from a connection; returns digests as :func:`digest_ranges`.

    Args:
        descriptor: of the connection; only this call reads from it.
        places: where the bytes belong, in order.
        seeds: as :func:`range_seeds` returns them; empty = compute no digests.
        silence_s: :data:`STEP_BYTES` must come within it, each time.

    Raises:
        TransferTimeout: they did not; nothing is written afterwards.
        PeerUnreachable: the connection broke.
    """
    if seeds:
        _check_seeds(places, seeds)
    return _chosen.receive(descriptor, places, seeds, silence_s)


def receive_frame(descriptor: int, frame: FrameBuffer, tail_bytes: int, silence_s: float) -> int:
    """Receive a frame: its length in 4 bytes, little-endian, its body and a tail.

    Args:
        descriptor: of the connection; only this call reads from it.
        frame: gets body and tail.
        tail_bytes: that follow the body.
        silence_s: the length must come within it, and then the rest.

    Returns:
        Bytes of body and tail; if they are more than ``frame`` has room for, they are not read.

    Raises:
        TransferTimeout: they did not come.
        PeerUnreachable: the connection broke.
    """
    return _chosen.receive_frame(descriptor, frame, tail_bytes, silence_s)


def send_ranges(descriptor: int, head: bytes, places: Places, limit_s: float) -> None:
    """Send bytes, and ranges behind them.

    Args:
        descriptor: of the connection; only this call writes to it.
        head: sent first, at least one byte.
        places: of the ranges.
        limit_s: for all of it.

    Raises:
        TransferTimeout: it took longer; how much was sent is not known.
        PeerUnreachable: the connection broke.
    """
    _chosen.send(descriptor, head, places, limit_s)


def _check_seeds(places: Places, seeds: bytes) -> None:
    if len(seeds) != 8 * len(places):
        raise InvalidArgument("seeds", f"{len(seeds)} bytes for {len(places)} ranges")


def _check(answer: int) -> None:
    """Raise what a call of the library has told."""
    if answer == 0:
        return
    if answer == -errno.EINVAL:
        raise InvalidArgument("places", "an address or the number of ranges is invalid")
    if answer == -errno.ETIMEDOUT:
        raise TransferTimeout("the peer made no progress before the deadline")
    if answer == -errno.EPIPE:
        raise PeerUnreachable("the peer has closed the connection")
    raise PeerUnreachable(f"the connection broke: {os.strerror(-answer)}")


def _wait_again(error: OSError, descriptor: int, event: int, until: float) -> None:
    """After a call that has failed: wait until it may be tried again."""
    if not isinstance(error, BlockingIOError):
        _check(-(error.errno or errno.EIO))
    poller = select.poll()
    poller.register(descriptor, event)
    left_s = until - time.monotonic()
    if left_s <= 0:
        _check(-errno.ETIMEDOUT)
    poller.poll(left_s * 1e3)


def _packed(places: Places) -> bytes:
    """The addresses of all ranges, then their lengths."""
    numbers = np.fromiter(chain.from_iterable(places), np.uint64, 2 * len(places))
    return numbers.reshape(-1, 2).T.tobytes()


def _memory(address: int, size: int) -> memoryview:
    if size and not address:
        _check(-errno.EINVAL)
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first ``done`` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The last step of SplitMix64: each bit of a word changes half of the bits of the result."""
    for shift, factor in _MIX:
        words = (words ^ (words >> shift)) * factor
    return words ^ (words >> _MIX_END)


_library = load(LIBRARY)
_chosen: NativeRanges | PlainRanges = PlainRanges() if _library is None else NativeRanges(_library)
