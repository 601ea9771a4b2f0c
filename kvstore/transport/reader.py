"""The reader's side of ``tcp``: transfers are carried by a few connections to each peer.

Each connection has a thread, which also checks the digests of received pages. So a peer that does
not answer delays only the transfers from it.
"""

import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import (
    CapacityError,
    InvalidArgument,
    KVStoreError,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)
from kvstore.transport.base import PageArrival, PageTransfer, TransferEnd
from kvstore.transport.frames import (
    ANSWER_BYTES,
    DataKind,
    pack_request,
    read_answer,
)
from kvstore.transport.parts import TransferPart, UnderWay
from kvstore.transport.streams import DataStream, connect, host_and_port, receive_bytes

CONNECTIONS: Final = 3
"""To each peer; a fourth adds nothing (``python -m bench remote``)."""
PEERS_MAX = 64
IDLE_S: Final = 30.0
"""A connection that is unused for this long is closed."""
CONNECT_S: Final = 2.0
"""A peer that does not accept a connection within this time is unreachable."""
GROUP_BYTES: Final = 1 << 20
"""Small pages are received and digested in groups of this size."""
_PAUSES_S: Final = (0.0, 0.01, 0.04)
"""Before a peer is asked again that has closed a connection without an answer."""
_JOIN_S: Final = 5.0


class _Lanes:
    """The waiting parts for one peer, and the number of connections to it."""

    __slots__ = ("came", "idle", "over", "threads", "waiting")

    def __init__(self, lock: threading.Lock) -> None:
        self.came = threading.Condition(lock)
        self.waiting: deque[TransferPart] = deque()
        self.threads = 0
        self.idle = 0
        #: Nobody is given to them any more: their place was needed.
        self.over = False


class PageReader:
    """Carries transfers; ends them by their deadline.

    Args:
        context: for TLS; None = none.
        in_flight_bytes_max: bytes of all transfers that have not ended.
        ended: called with each end, by any thread.
        counts: where it counts.
    """

    def __init__(
        self,
        context: ssl.SSLContext | None,
        in_flight_bytes_max: int,
        ended: Callable[[TransferEnd], None],
        counts: Counter[str],
    ) -> None:
        self._context = context
        self._in_flight_bytes_max = in_flight_bytes_max
        self._ended = ended
        self._counts = counts
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lanes] = {}
        self._threads: set[threading.Thread] = set()
        self._streams: set[DataStream] = set()
        self._under_way: dict[int, UnderWay] = {}
        self._closed = False
        self.in_flight_bytes = 0

    # ---- the owner's thread -----------------------------------------------------------------

    def submit(self, transfer: PageTransfer, kind: DataKind) -> None:
        """Queue a transfer; see :meth:`kvstore.transport.base.Transport.read`."""
        transfer.check(verified=kind == DataKind.READ)
        host_and_port(transfer.endpoint)
        under_way = UnderWay(transfer, kind, CONNECTIONS)
        with self._lock:
            if transfer.number in self._under_way:
                raise InvalidArgument("number", f"transfer {transfer.number} is in progress")
            refusal = self._refusal(transfer)
            if refusal is None:
                self._under_way[transfer.number] = under_way
                self.in_flight_bytes += transfer.total_bytes
                self._queue(under_way)
                return
            self._counts["transfers_refused"] += 1
        missing = bytes(len(transfer.remote))
        self._ended(TransferEnd(transfer.number, missing, refusal, settled=True))

    def cancel(self, number: int) -> None:
        """End a transfer soon."""
        with self._lock:
            found = self._under_way.get(number)
            if found is None:
                return
            error = TransferError("the transfer was cancelled")
            found.cancelled, found.error = True, found.error or error
            for part in found.parts:
                if part.stream is not None:
                    part.stream.shutdown()
            self._give_up(found, error)

    def expire(self, now_ns: int) -> int | None:
        """End transfers that have not started by their deadline; returns the next deadline."""
        with self._lock:
            late = [one for one in self._under_way.values() if one.transfer.deadline_ns <= now_ns]
            for one in late:  # what a connection carries, that connection ends
                self._give_up(one, TransferTimeout("no connection was free before the deadline"))
            left = (one.transfer.deadline_ns for one in self._under_way.values())
            return min((at for at in left if at > now_ns), default=None)

    def close(self) -> None:
        """End everything; nothing arrives afterwards."""
        with self._lock:
            self._closed = True
            numbers = list(self._under_way)
            threads = list(self._threads)
            for stream in self._streams:
                stream.shutdown()
            for lanes in self._lanes.values():
                lanes.came.notify_all()
        for number in numbers:
            self.cancel(number)
        for thread in threads:
            thread.join(_JOIN_S)

    @property
    def connections(self) -> int:
        """Connections to peers, those being made included."""
        return len(self._threads)

    def _refusal(self, transfer: PageTransfer) -> KVStoreError | None:
        if self._closed:
            return TransferError("the transport is closed")
        if transfer.deadline_ns <= time.monotonic_ns():
            return TransferTimeout("the deadline had passed before the transfer began")
        wanted = self.in_flight_bytes + transfer.total_bytes
        if wanted > self._in_flight_bytes_max:
            return CapacityError(
                f"{wanted} bytes in flight, {self._in_flight_bytes_max} at most",
                "in_flight_bytes_max",
            )
        full = transfer.endpoint not in self._lanes and len(self._lanes) >= PEERS_MAX
        if full and not self._end_idle():
            return CapacityError(f"transfers with {PEERS_MAX} peers are in progress", "peers")
        return None

    def _end_idle(self) -> bool:
        """Close the unused connections to a peer; False if there are none.

        A peer reports its endpoint, and may report another one each time.
        """
        for endpoint, lanes in self._lanes.items():
            if lanes.idle == lanes.threads and not lanes.waiting:
                del self._lanes[endpoint]
                lanes.over = True
                lanes.came.notify_all()
                return True
        return False

    def _queue(self, under_way: UnderWay) -> None:
        """Give the parts to the connections of the peer, and make more of those if needed."""
        endpoint = under_way.transfer.endpoint
        lanes = self._lanes.setdefault(endpoint, _Lanes(self._lock))
        lanes.waiting.extend(under_way.parts)
        wanted = min(len(lanes.waiting) - lanes.idle, CONNECTIONS - lanes.threads)
        for _ in range(wanted):
            thread = threading.Thread(
                target=self._run, args=(endpoint, lanes), name="kvstore-data-reader", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no more threads
                self._counts["threads_refused"] += 1
                break
            self._threads.add(thread)
            lanes.threads += 1
        lanes.came.notify(len(under_way.parts))
        if not lanes.threads:
            self._forget_idle(endpoint, lanes)
            self._give_up(under_way, CapacityError("no thread can be started", "threads"))

    def _give_up(self, under_way: UnderWay, error: KVStoreError) -> None:
        """End the parts that no connection carries; under the lock."""
        if under_way.give_up(error):
            self._finish(under_way)
        lanes = self._lanes.get(under_way.transfer.endpoint)
        if lanes is not None:
            lanes.waiting = deque(part for part in lanes.waiting if not part.ended)

    # ---- the thread of a connection ---------------------------------------------------------

    def _run(self, endpoint: str, lanes: _Lanes) -> None:
        stream: DataStream | None = None
        try:
            while (part := self._next(endpoint, lanes)) is not None:
                stream = self._carry(part, stream)
        except BaseException:  # a bug: another thread may take this one's place
            with self._lock:
                lanes.threads -= 1
                self._forget_idle(endpoint, lanes)
            raise
        finally:
            if stream is not None:
                self._close(stream)
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self, endpoint: str, lanes: _Lanes) -> TransferPart | None:
        """Wait for the next part; None = none arrived, and this connection no longer counts."""
        with self._lock:
            while not (self._closed or lanes.over):
                lanes.idle += 1
                came = lanes.came.wait_for(
                    lambda: lanes.waiting or self._closed or lanes.over, IDLE_S
                )
                lanes.idle -= 1
                while lanes.waiting and not self._closed:
                    part = lanes.waiting.popleft()
                    if not part.ended:
                        return part
                if not came:
                    break
            lanes.threads -= 1
            self._forget_idle(endpoint, lanes)
            return None

    def _forget_idle(self, endpoint: str, lanes: _Lanes) -> None:
        if not lanes.threads and self._lanes.get(endpoint) is lanes:
            del self._lanes[endpoint]

    def _carry(self, part: TransferPart, stream: DataStream | None) -> DataStream | None:
        """Move a part; returns the connection if it can be used again.

        A peer that closes a connection before it answers has closed it while it was idle, or has
        needed its place for one of many others: it is asked again.
        """
        try:
            for pause_s in (*_PAUSES_S, None):
                if stream is None:
                    stream = self._connect(part.of.transfer)
                if not self._begin(part, stream):
                    return stream
                try:
                    self._ask(part, stream)
                    break
                except PeerUnreachable:
                    if pause_s is None or part.of.cancelled:
                        raise
                with self._lock:
                    part.stream = None
                self._close(stream)
                stream = None
                time.sleep(pause_s)
            assert stream is not None
            self._move(part, stream)
        except KVStoreError as error:
            if stream is not None:
                self._close(stream)
            self._end(part, error)
            return None
        self._end(part, None)
        return stream

    def _connect(self, transfer: PageTransfer) -> DataStream:
        stream: DataStream | None = None
        connect_ns = min(transfer.deadline_ns, time.monotonic_ns() + int(CONNECT_S * 1e9))
        try:
            stream = connect(*host_and_port(transfer.endpoint), self._context, connect_ns)
            with self._lock:
                if self._closed:
                    raise TransferError("the transport is closed")
                self._streams.add(stream)
            stream.begin(transfer.deadline_ns)
        except TransferError:
            self._count("connects_failed")
            if stream is not None:
                self._close(stream)
            raise
        self._count("connects")
        return stream

    def _close(self, stream: DataStream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def _begin(self, part: TransferPart, stream: DataStream) -> bool:
        """From now on bytes may arrive; False if the part has ended meanwhile.

        Raises:
            TransferError: the transfer was cancelled, and this part has not ended.
        """
        with self._lock:
            if part.ended or self._closed:
                return False
            if part.of.cancelled:
                raise TransferError("the transfer was cancelled")
            part.stream = stream
            return True

    def _ask(self, part: TransferPart, stream: DataStream) -> None:
        """Send the request, and check the answer."""
        transfer = part.of.transfer
        ranges = part.of.packed[part.first : part.stop]
        budget_ms = (transfer.deadline_ns - time.monotonic_ns()) // 1_000_000
        request = pack_request(part.of.kind, transfer.ticket, budget_ms, ranges)
        stream.send([request], transfer.deadline_ns)
        self._check_answer(part, stream)

    def _check_answer(self, part: TransferPart, stream: DataStream) -> None:
        transfer = part.of.transfer
        total = (part.stop - part.first) * transfer.page_bytes
        read_answer(receive_bytes(stream, ANSWER_BYTES, transfer.deadline_ns), total)

    def _move(self, part: TransferPart, stream: DataStream) -> None:
        transfer = part.of.transfer
        if part.of.kind == DataKind.WRITE:
            stream.send(_memory(transfer, part.first, part.stop), transfer.deadline_ns)
            self._check_answer(part, stream)
            found = bytes([PageArrival.RIGHT]) * (part.stop - part.first)
            part.of.good[part.first : part.stop] = found
            self._count("written_bytes", len(found) * transfer.page_bytes)
            return
        step = max(GROUP_BYTES // transfer.page_bytes, 1)
        for first in range(part.first, part.stop, step):
            stop = min(first + step, part.stop)
            stream.receive(_memory(transfer, first, stop), transfer.deadline_ns)
            found = transfer.arrivals(first, stop)
            part.of.good[first:stop] = found
            self._count("read_bytes", len(found) * transfer.page_bytes)
            if PageArrival.WRONG in found:
                self._count("wrong_pages", found.count(PageArrival.WRONG))

    def _end(self, part: TransferPart, error: KVStoreError | None) -> None:
        with self._lock:
            if part.ended:  # its deadline passed while this thread was connecting
                return
            if part.of.end_part(part, error):
                self._finish(part.of)
            elif error is not None:  # the rest would find out one by one
                self._give_up(part.of, error)

    def _finish(self, done: UnderWay) -> None:
        """Say that a transfer has ended; under the lock."""
        end = done.end()
        del self._under_way[end.number]
        self.in_flight_bytes -= done.transfer.total_bytes
        self._counts["transfers_failed" if end.error else "transfers_done"] += 1
        self._ended(end)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


def _memory(transfer: PageTransfer, first: int, stop: int) -> list[memoryview]:
    """Views of local pages, those that touch as one."""
    size = transfer.page_bytes
    runs: list[tuple[int, int]] = []
    for address in transfer.local[first:stop].tolist():
        if runs and runs[-1][0] + runs[-1][1] == address:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((address, size))
    return [memory_at(*run) for run in runs]
