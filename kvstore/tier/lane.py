"""One direction between host memory and a device: a stream, a pinned ring, and staging. No torch.

Other processes can write to the node's memory, so a device never copies from it or to it. Pages go
through a **ring**: private pinned memory of some slices. On the way in, threads of the mover fill
slices, verifying in the same pass; the device copies from a slice while others are filled. On the
way out, the device fills slices, and threads digest and copy them to the node's memory.

A device works asynchronously. Its work is ordered by **streams**, and the host knows that work is
done only by an **event**. :class:`Device` is the interface that this module needs;
:mod:`kvstore.tier.gpu` implements it for CUDA and for host memory, and
:mod:`kvstore.testing.device` for tests, late and out of order.
"""

import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.protocol.errors import DeviceCause, DeviceUnavailable
from kvstore.protocol.page import DIGEST_BYTES

SLICE_BYTES = 4 << 20
"""Size of a slice of the ring, or one page if that is larger: enough to keep a device busy, small
enough that a slice is still in the processor's cache when it is copied the second time."""
AT_DEVICE: Final = 2
"""Slices of a ring that the device copies, while the threads work on the others."""
SLICES_MIN: Final = AT_DEVICE + 1
RING_BYTES_MAX: Final = 128 << 20
"""Of a ring with more than :data:`SLICES_MIN` slices."""
_RINGS: Final = 8
"""Rings that should fit into the memory that a process may lock: two for each device and slab."""
THREADS_MAX: Final = 8
DEADLINE_S = 30.0
"""How long the device may take for a copy before the job fails. Its blocks stay in use until the
device has really finished."""


class DeviceEvent(Protocol):
    """A point on a stream."""

    def done(self) -> bool:
        """Whether the device has reached it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait on the host until the device has reached it; False on timeout."""


class DeviceStream(Protocol):
    """Work of a device that is done in the order in which it is queued."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue work; it may be done at any time after this."""

    def record(self) -> DeviceEvent:
        """An event after everything that was queued here so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Make all work that is queued here from now on wait for an event; does not block."""


class Device(Protocol):
    """A device, its streams and memory. Memory is given as torch tensors of bytes.

    Attributes:
        name: ``cuda:N`` or ``cpu:N``.
        staging_bytes: how much of a job is gathered or spread at a time, or one plane of a page if
            that is more; at least 1.
    """

    name: str
    staging_bytes: int

    def stream(self) -> DeviceStream:
        """Create a new stream."""

    def current(self) -> DeviceStream:
        """The stream on which the calling thread's engine queues its work."""

    def pinned(self, size: int) -> Any:
        """Private host memory that the device copies from and to.

        Raises:
            DeviceUnavailable: the process may not lock so much; names the limit.
        """

    def memory(self, size: int, stream: DeviceStream) -> Any:
        """Memory of the device for work on ``stream``.

        Raises:
            RuntimeError: the device has not enough.
        """

    def view(self, address: int, size: int) -> Any:
        """The engine's memory at an address of the device, as a tensor."""


class PagesInHost(NamedTuple):
    """Pages in host memory; see :func:`kvstore.mover.scatter`."""

    sources: mover.Addresses
    size: int
    digests: mover.Digests
    seeds: npt.NDArray[np.uint64]


class DeviceCopy:
    """The device's unfinished work for one job of an engine; thread-safe.

    The engine must not reuse the job's blocks before :meth:`idle`.
    """

    def __init__(self) -> None:
        self._events: list[DeviceEvent] = []
        self._layers: list[DeviceEvent] = []
        self._queued = threading.Event()

    def note(self, event: DeviceEvent) -> None:
        """The job's work until now is done when the device reaches this event."""
        assert not self._queued.is_set(), "nobody would wait for it"
        self._events.append(event)

    def note_layers(self, events: list[DeviceEvent]) -> None:
        """Layer i is in the engine's blocks at event i; valid if the job ends normally."""
        assert not self._queued.is_set(), "nobody would wait for it"
        self._layers = events

    def end(self) -> None:
        """The job queues nothing more; wakes threads that wait for layers."""
        self._queued.set()

    def idle(self) -> bool:
        """Whether the device has finished all work of this job. False if that is unknown.

        It never raises, so that its callers can wait for it.
        """
        try:
            return all(event.done() for event in self._events)
        except RuntimeError:
            return False

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until :meth:`idle`; False on timeout."""
        deadline = perf_counter() + timeout_s
        try:
            return all(event.wait(max(0.0, deadline - perf_counter())) for event in self._events)
        except RuntimeError:
            return False

    def wait_layer(self, layer: int, timeout_s: float, engine: DeviceStream) -> bool:
        """Let the engine's stream wait for a layer, or for the last one if all come together.

        Blocks only until the layer is queued, not until the device has copied it.

        Returns:
            Whether it was queued; False on timeout, or if the job ended without it.
        """
        if not self._queued.wait(timeout_s) or not self._layers:
            return False
        engine.wait(self._layers[min(layer, len(self._layers) - 1)])
        return True


class Lane:
    """One direction between the node's memory and a device; one job at a time uses it.

    Its memory is allocated by the first copy.

    Args:
        device: the device.

    Attributes:
        stream: its own stream on that device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream = device.stream()
        self._using = threading.Lock()
        self._ring: Any = None
        self._slice_bytes = self._slices = 0
        self._staging: Any = None
        self._last = _End()
        self._last.reached_at(self.stream.record())
        self._late = False
        self._threads = _Threads()

    @contextmanager
    def turn(self, copy: DeviceCopy) -> Iterator[None]:
        """Use the lane for one job.

        Raises:
            DeviceUnavailable: the device fails, or has not finished the job before.
        """
        if not self._using.acquire(timeout=DEADLINE_S):
            raise DeviceUnavailable(f"{self._device.name}: other copies take too long", "deadline")
        try:
            # A job that returned when its layers were queued may still use the ring.
            if not self._last.wait(0.0 if self._late else DEADLINE_S):
                self._late = True
                raise DeviceUnavailable(
                    f"{self._device.name} has not finished an earlier copy: see its errors"
                    " (nvidia-smi, dmesg); if it does not recover, restart the engine",
                    "deadline",
                )
            self._late = False
            self._last = _End()
            copy.note(self._last)
            try:
                yield
            finally:
                self._last.reached_at(self.stream.record())
        except (RuntimeError, MemoryError) as error:
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise DeviceUnavailable(
                f"{self._device.name} failed to copy: {what}", cause_of(error)
            ) from error
        finally:
            self._using.release()

    def staging(self, size: int) -> Any:
        """Memory of the device for this job, at least ``size`` bytes; kept for the next one.

        Raises:
            RuntimeError: the device has not enough, even without what torch keeps unused: torch has
                freed that and tried again. The next job asks anew.
        """
        if self._staging is None or len(self._staging) < size:
            self._staging = None
            self._staging = self._device.memory(1 << (size - 1).bit_length(), self.stream)
        assert len(self._staging) >= size
        return self._staging[:size]

    def bring(
        self, pages: PagesInHost, deliver: Callable[[int, int, Any], None],
        progress: mover.Progress | None,
    ) -> int:  # fmt: skip
        """Bring pages to the device, up to the first that fails verification.

        Args:
            pages: the pages.
            deliver: ``deliver(first, count, memory)`` is run on the stream, in order: it copies
                verified pages ``first`` to ``first + count`` from the ring.
            progress: for cancellation.

        Returns:
            Number of verified pages; the device may still be copying them.

        Raises:
            DeviceUnavailable: the device does not finish.
        """
        each, total = self._arrange(pages.size), len(pages.sources)
        copying: dict[int, DeviceEvent] = {}
        filling: deque[tuple[int, int, Future[int]]] = deque()
        good = 0

        def hand_over() -> bool:
            """The oldest slice goes to the device; returns whether all its pages were verified."""
            nonlocal good
            first, at, future = filling.popleft()
            count = future.result()
            if count:
                memory = self._slice(at, count * pages.size)
                self.stream.run(lambda: deliver(first, count, memory))
                copying[at] = self.stream.record()
                good += count
            return count == min(each, total - first)

        try:
            whole = True
            for number, first in enumerate(range(0, total, each)):
                at = number % self._slices
                while whole and len(filling) == max(AT_DEVICE, self._slices - AT_DEVICE):
                    whole = hand_over()
                if not whole:
                    break
                if at in copying:
                    self.reached(copying.pop(at))
                task = self._threads.submit(self._fill, pages, first, each, at, progress)
                filling.append((first, at, task))
            while whole and filling:
                whole = hand_over()
        finally:
            wait([future for _, _, future in filling])  # they read memory that is leased for them
        return good

    def take(
        self, fetch: Callable[[int, int, Any], None], targets: mover.Addresses, size: int,
        seeds: npt.NDArray[np.uint64],
    ) -> mover.Digests:  # fmt: skip
        """Take pages from the device to host memory.

        Args:
            fetch: ``fetch(first, count, memory)`` is run on the stream, in order: it copies pages
                ``first`` to ``first + count`` to the ring.
            targets: start address of each page in host memory, shape (n,), uint64.
            size: bytes of a page.
            seeds: seed of each page's digest, shape (n,), uint64.

        Returns:
            The digests of the copied bytes, shape (n, 16), uint8.

        Raises:
            DeviceUnavailable: the device does not finish.
        """
        each, total = self._arrange(size), len(targets)
        digests = np.zeros((total, DIGEST_BYTES), dtype=np.uint8)
        coming: deque[tuple[int, int, DeviceEvent]] = deque()
        going: dict[int, Future[None]] = {}

        def empty(first: int, at: int) -> None:
            part = slice(first, min(first + each, total))
            source = mover.Pieces.contiguous(self._addresses(at, part, size), size)
            digests[part] = mover.gather(targets[part], size, source, seeds[part])

        def take_over() -> None:
            first, at, event = coming.popleft()
            self.reached(event)
            going[at] = self._threads.submit(empty, first, at)

        try:
            for number, first in enumerate(range(0, total, each)):
                at, count = number % self._slices, min(each, total - first)
                if len(coming) == AT_DEVICE:
                    take_over()
                if at in going:
                    going.pop(at).result()
                memory = self._slice(at, count * size)
                self.stream.run(_bound(fetch, first, count, memory))
                coming.append((first, at, self.stream.record()))
            while coming:
                take_over()
            for future in going.values():
                future.result()
        finally:
            wait(going.values())  # they write to the caller's slots
        return digests

    def reached(self, event: DeviceEvent) -> None:
        """Wait until the device has reached an event.

        Raises:
            DeviceUnavailable: it has not after :data:`DEADLINE_S`.
        """
        if not event.wait(DEADLINE_S):
            self._late = True
            raise DeviceUnavailable(
                f"{self._device.name} has not finished a copy after {DEADLINE_S:.0f} s", "deadline"
            )

    def speed(self, size: int, *, inwards: bool) -> float:
        """Copy the whole ring once; returns bytes per second.

        Args:
            size: bytes of the pages that will be copied.
            inwards: to the device, else from it.

        Raises:
            DeviceUnavailable: the device cannot do it; the message says why.
        """
        copy = DeviceCopy()
        with self.turn(copy):
            self._arrange(size)
            there = self.staging(self._slice_bytes)

            def every_slice() -> None:
                for at in range(self._slices):
                    here = self._slice(at, self._slice_bytes)
                    target, source = (there, here) if inwards else (here, there)
                    target.copy_(source, non_blocking=True)

            for _ in range(2):  # the first time, memory is touched
                began = perf_counter()
                self.stream.run(every_slice)
                self.reached(self.stream.record())
                seconds = perf_counter() - began
            return float(len(self._ring) / max(seconds, 1e-9))

    def close(self) -> bool:
        """Free the memory, unless the device still uses it; nothing may be copied afterwards.

        Does not raise: of a device that fails, the memory stays until the process ends.

        Returns:
            Whether the device has finished all work of this lane.
        """
        self._threads.end()
        try:
            idle = self._last.wait(0.0 if self._late else DEADLINE_S)
        except RuntimeError:
            return False
        if idle:
            self._ring = self._staging = None
        return idle

    # ---- internal ---------------------------------------------------------------------------

    def _arrange(self, size: int) -> int:
        """Give the ring slices of whole pages; returns the pages of a slice."""
        each = _slice_pages(size)
        if self._slice_bytes < each * size:
            self._ring, self._slice_bytes = None, 0
            self._slices = slice_count(each * size)
            self._ring = self._device.pinned(self._slices * each * size)
            self._slice_bytes = each * size
        assert self._slices * each * size <= len(self._ring)
        return each

    def _slice(self, at: int, size: int) -> Any:
        start = at * self._slice_bytes
        return self._ring[start : start + size]

    def _addresses(self, at: int, part: slice, size: int) -> mover.Addresses:
        first = self._ring.data_ptr() + at * self._slice_bytes
        count = part.stop - part.start
        return np.arange(count, dtype=np.uint64) * np.uint64(size) + np.uint64(first)

    def _fill(
        self, pages: PagesInHost, first: int, each: int, at: int, progress: mover.Progress | None
    ) -> int:
        """Copy pages to a slice; returns how many verified before the first that failed."""
        part = slice(first, min(first + each, len(pages.sources)))
        target = mover.Pieces.contiguous(self._addresses(at, part, pages.size), pages.size)
        ok = mover.scatter(
            pages.sources[part], pages.size, pages.digests[part], pages.seeds[part], target,
            progress,
        )  # fmt: skip
        return len(ok) if ok.all() else int(np.argmin(ok))


class _End:
    """The end of a job on the device; never reached if the device could not record it."""

    def __init__(self) -> None:
        self._event: DeviceEvent | None = None

    def reached_at(self, event: DeviceEvent) -> None:
        assert self._event is None, "a job ends once"
        self._event = event

    def done(self) -> bool:
        return self._event is not None and self._event.done()

    def wait(self, timeout_s: float) -> bool:
        return self._event is not None and self._event.wait(timeout_s)


def _bound(
    fetch: Callable[[int, int, Any], None], first: int, count: int, memory: Any
) -> Callable[[], None]:
    return lambda: fetch(first, count, memory)


def cause_of(error: Exception) -> DeviceCause:
    """Why an operation of a device failed; torch names a full device in words only."""
    full = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
    return "memory" if full else "copy"


def _slice_pages(size: int) -> int:
    return max(1, SLICE_BYTES // size)


def thread_count() -> int:
    """Threads of a lane: half as many as this process has processors, but all of up to four."""
    processors = len(os.sched_getaffinity(0))
    return min(THREADS_MAX, max(min(processors, 4), processors // 2))


def slice_count(slice_bytes: int) -> int:
    """Slices of a ring: one for each thread, and those that the device copies meanwhile.

    Fewer if slices are large, or if the process may not lock enough memory.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    most = RING_BYTES_MAX
    if limit != resource.RLIM_INFINITY:
        most = min(most, limit // _RINGS)
    return min(max(SLICES_MIN, most // slice_bytes), thread_count() + AT_DEVICE)


class _Threads:
    """The threads of a lane, started with its first work.

    Unlike a ``ThreadPoolExecutor``, it queues no work before there is a thread: if none can be
    started, queued work would be done later, when the ring has another owner. If only some threads
    can be started, they do all the work.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[..., Any], Any] | None] = SimpleQueue()
        self._running: list[threading.Thread] = []
        self._most = thread_count()

    def submit(self, work: Callable[..., Any], *given: Any) -> "Future[Any]":
        """Let a thread do some work.

        Raises:
            RuntimeError: no thread can be started, or all were ended.
            MemoryError: likewise.
        """
        if len(self._running) < self._most:
            thread = threading.Thread(target=self._run, name="kvstore-device", daemon=True)
            try:
                thread.start()
                self._running.append(thread)
            except (RuntimeError, MemoryError):
                if not self._running:
                    raise
        if not self._running:
            raise RuntimeError("the lane is closed")
        future: Future[Any] = Future()
        self._work.put((future, work, given))
        return future

    def end(self) -> None:
        """End the threads when they have done all work; none is started anymore."""
        self._most = 0
        for _ in self._running:
            self._work.put(None)
        while self._running:
            self._running.pop().join()

    def _run(self) -> None:
        while (found := self._work.get()) is not None:
            future, work, given = found
            try:
                future.set_result(work(*given))
            except BaseException as error:
                future.set_exception(error)
            del found, future, work, given  # what they refer to ends with the work
