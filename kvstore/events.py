"""KV events: what appeared in and disappeared from this node's or engine's cache.

The frames are the ones vLLM and SGLang publish, so that whoever understands an engine's events
understands a node's::

    PUB      topic | sequence, 8 bytes big-endian | msgpack [ts, [event, ...], data_parallel_rank]
    request  "" | first sequence wanted, 8 bytes big-endian          (DEALER or REQ to our ROUTER)
    replay   "" | topic | sequence | payload    for each batch that is still kept,
             "" | topic | -1       | ""         and then the end

An event is a map whose ``type`` is ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared``.
What engines call a block is a page here, and its hash is the 32 bytes of our prefix key.

One :class:`EventPublisher` is one sequence that starts at 0 with the process (the boot id belongs
in the topic). A batch that finds the queue full is lost *visibly*: its number is used up, so every
subscriber sees the gap, and replay cannot fill it. The publisher never makes its caller wait.

Threads: :meth:`EventPublisher.publish` may be called from any; one thread owns the ZMQ sockets and
the replay buffer. ``_lock`` protects the queue, the sequence and the counters, and is never held
while anything is sent or encoded.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec
import zmq
from msgspec import UNSET, UnsetType

from kvstore.errors import InvalidArgument, TransferTimeout

BlockHash = bytes | int
"""32 bytes (ours, and vLLM's long form) or the low 64 bits of them (vLLM's default)."""

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence frame that ends a replay."""

_SEND_BURST: Final = 256
"""Batches sent before replay requests are looked at again."""
_POLL_MS: Final = 1_000
"""Every wait has a deadline; the wake-up descriptor normally ends this one at once."""
_GATHER_S: Final = 0.002
"""How long a first batch waits for others: one turn at the interpreter lock sends them all, so that
a node under load does not share the lock with this thread after every put."""
_CLOSE_GRACE_S: Final = 1.0
"""What the thread gets beyond the timeout of ``close`` to give its sockets back."""
_REPLAY_REQUESTS_MAX: Final = 64
"""Replay requests of one client that may wait in its socket."""
_REQUEST_BYTES_MAX: Final = 1_024
"""A longer frame is no replay request; ZMQ drops the connection it came from."""

_log = logging.getLogger(__name__)


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored"):
    """Pages became readable.

    Attributes:
        block_hashes: their keys, in chain order.
        parent_block_hash: key of the page before the first; None when the first starts its chain.
        token_ids: the tokens of exactly these pages; empty when the writer gave none.
        block_size: tokens in a page.
        medium: ``GPU``, ``CPU`` or ``STORAGE``: the tier they are in, perhaps besides others.
        lora_id: always None: a LoRA seeds the chain instead. Engines' readers require the field.
        lora_name: as ``lora_id``.
        space: hex digest of the space; ours, left out by engines.
        shard: index of the shard in its space; ours.
        boot: hex id of this life of the publisher; ours.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str
    lora_id: int | None = None
    lora_name: str | None = None
    space: str | UnsetType = UNSET
    shard: int | UnsetType = UNSET
    boot: str | UnsetType = UNSET


class RemovedEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved"):
    """Pages are gone from ``medium``; published before their memory is used again.

    Attributes:
        block_hashes: their keys, in any order.
        medium: ``GPU``, ``CPU`` or ``STORAGE``: the tier they left; they may be in another one.
        space: hex digest of the space; ours, left out by engines.
        shard: index of the shard in its space; ours.
        boot: hex id of this life of the publisher; ours.
    """

    block_hashes: Sequence[BlockHash]
    medium: str
    space: str | UnsetType = UNSET
    shard: int | UnsetType = UNSET
    boot: str | UnsetType = UNSET


class ClearedEvent(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="AllBlocksCleared"
):
    """Nothing of what this publisher announced is there any more.

    Attributes:
        space: hex digest when only one space was cleared; ours.
        boot: hex id of this life of the publisher; ours.
    """

    space: str | UnsetType = UNSET
    boot: str | UnsetType = UNSET


Event = StoredEvent | RemovedEvent | ClearedEvent


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The payload of one message.

    Attributes:
        ts: seconds since the epoch when the batch was published.
        events: in the order in which they happened.
        data_parallel_rank: an engine's rank; None from a node.
    """

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


class PublisherStats(msgspec.Struct, frozen=True):
    """One snapshot of a publisher.

    Attributes:
        sequence_next: number of the next batch; so many were published or dropped.
        batches_sent: given to the PUB socket.
        batches_dropped: lost to a full queue, to ``close`` or because they could not be encoded.
        batches_queued: waiting for the thread.
        replays_served: requests answered to the end.
        replays_cut: answers broken off because the client does not read, and malformed requests.
    """

    sequence_next: int
    batches_sent: int
    batches_dropped: int
    batches_queued: int
    replays_served: int
    replays_cut: int


class _Queued(NamedTuple):
    sequence: int
    batch: EventBatch


class _Sent(NamedTuple):
    sequence: int
    payload: bytes


def wall_clock() -> float:
    """Seconds since the epoch."""
    return datetime.now(UTC).timestamp()


class EventPublisher:
    """Publishes batches of events from a thread of its own.

    Whoever makes one closes it: its thread keeps the process alive.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: bytes = b"",
        queue_max: int = 1_024,
        replay_max: int = 10_000,
        replay_bytes_max: int = 64 << 20,
        clock: Callable[[], float] = wall_clock,
    ) -> None:
        """Bind the sockets and start the thread.

        Args:
            endpoint: where the PUB socket binds: ``tcp://127.0.0.1:*`` or ``ipc:///path``; a
                wildcard or port 0 is resolved, see :attr:`bound_endpoint`. The file of an
                ``ipc`` endpoint stays; the next publisher there replaces it.
            replay_endpoint: where the ROUTER for replay binds; None for no replay.
            topic: first frame of every message.
            queue_max: batches that may wait for the thread, at least 1; and messages that may
                wait for one slow subscriber.
            replay_max: batches kept for replay.
            replay_bytes_max: bytes of payload kept for replay; the oldest batches go first.
            clock: seconds since the epoch, stamped on every batch.

        Raises:
            InvalidArgument: an endpoint cannot be bound or a bound is not positive; names it.
        """
        bounds = {"queue_max": queue_max, "replay_max": replay_max}
        for field, bound in (bounds | {"replay_bytes_max": replay_bytes_max}).items():
            if bound < 1:
                raise InvalidArgument(field, f"{bound} is not positive")
        self._topic = topic
        self._queue_max = queue_max
        self._replay_max = replay_max
        self._replay_bytes_max = replay_bytes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[_Queued] = deque()
        self._sequence_next = 0
        self._closing = False
        self._close_deadline = 0.0
        self._counts = dict.fromkeys(("sent", "dropped", "replayed", "cut"), 0)
        self._kept: deque[_Sent] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(queue_max)
            self.bound_endpoint = _bind(self._pub, "endpoint", endpoint)
            self._router: zmq.Socket[bytes] | None = None
            self.bound_replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                # One whole replay fits, whatever the client's speed; a client that asks again
                # without reading gets EAGAIN here instead of messages that silently vanish.
                self._router.set(zmq.SNDHWM, replay_max + 1)
                self._router.set(zmq.RCVHWM, _REPLAY_REQUESTS_MAX)
                self._router.set(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
                self._router.set(zmq.ROUTER_MANDATORY, 1)
                self.bound_replay_endpoint = _bind(self._router, "replay_endpoint", replay_endpoint)
        except InvalidArgument:
            self._context.destroy(linger=0)
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The sockets change hands here: starting a thread is the full fence that ZMQ asks for.
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=False)
        self._thread.start()

    def publish(self, events: Sequence[Event]) -> None:
        """Queue one batch; never blocks, never fails.

        A full queue, or a publisher that is closed, costs the batch and its sequence number.

        Args:
            events: in the order in which they happened; not changed afterwards. None: no batch.
        """
        if not events:
            return
        batch = EventBatch(self._clock(), tuple(events))
        with self._lock:
            sequence = self._sequence_next
            self._sequence_next += 1
            if self._closing or len(self._queue) >= self._queue_max:
                self._counts["dropped"] += 1
                return
            self._queue.append(_Queued(sequence, batch))
            if len(self._queue) == 1:
                os.eventfd_write(self._wake_fd, 1)

    def stats(self) -> PublisherStats:
        """One consistent snapshot."""
        with self._lock:
            return PublisherStats(
                sequence_next=self._sequence_next,
                batches_sent=self._counts["sent"],
                batches_dropped=self._counts["dropped"],
                batches_queued=len(self._queue),
                replays_served=self._counts["replayed"],
                replays_cut=self._counts["cut"],
            )

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, close the sockets, end the thread; a second call only waits.

        Args:
            timeout_s: bound for all of it; what a slow subscriber has not taken by then is lost.

        Raises:
            TransferTimeout: the thread has not ended in time.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                self._close_deadline = time.monotonic() + timeout_s
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout_s + _CLOSE_GRACE_S)
        if self._thread.is_alive():
            raise TransferTimeout(f"the event publisher did not end within {timeout_s} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        more = False
        try:
            while True:
                ready = dict(poller.poll(0 if more else _POLL_MS))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    if not self._closing:
                        time.sleep(_GATHER_S)
                more = self._send_burst()
                if self._router is not None and self._router in ready:
                    self._answer(self._router)
                if self._closing and (not more or time.monotonic() >= self._close_deadline):
                    return
        finally:
            self._release()

    def _release(self) -> None:
        """Give everything back; ``_closing`` is set first so that nobody writes to the wake-up."""
        with self._lock:
            self._closing = True
            self._counts["dropped"] += len(self._queue)
            self._queue.clear()
            os.close(self._wake_fd)
        linger_s = max(0.0, self._close_deadline - time.monotonic())
        self._pub.close(linger=int(linger_s * 1_000))
        if self._router is not None:
            self._router.close(linger=0)  # who has not read its replay asks the next publisher
        self._context.term()

    def _send_burst(self) -> bool:
        """Send up to ``_SEND_BURST`` batches; True when there are more."""
        for _ in range(_SEND_BURST):
            with self._lock:
                if not self._queue:
                    return False
                queued = self._queue.popleft()
            payload = _encode(queued.batch)
            if payload is not None:
                number = queued.sequence.to_bytes(8, "big")
                self._pub.send_multipart((self._topic, number, payload))
                self._keep(_Sent(queued.sequence, payload))
            with self._lock:
                self._counts["sent" if payload is not None else "dropped"] += 1
        return True

    def _keep(self, sent: _Sent) -> None:
        """Remember a batch for replay, within both bounds."""
        if self._router is None:
            return
        self._kept.append(sent)
        self._kept_bytes += len(sent.payload)
        while len(self._kept) > self._replay_max or self._kept_bytes > self._replay_bytes_max:
            self._kept_bytes -= len(self._kept.popleft().payload)

    def _answer(self, router: "zmq.Socket[bytes]") -> None:
        """Serve one replay request; the next poll brings the next one."""
        client, *request = router.recv_multipart(zmq.NOBLOCK)
        wellformed = len(request) == 2 and request[0] == b"" and len(request[1]) == 8
        outcome = "replayed" if wellformed else "cut"
        try:
            if wellformed:
                first = int.from_bytes(request[1], "big")
                for sequence, payload in self._kept:
                    if sequence >= first:
                        self._reply(router, client, sequence.to_bytes(8, "big"), payload)
            self._reply(router, client, END_OF_REPLAY, b"")
        except zmq.ZMQError as error:  # EAGAIN: it does not read. EHOSTUNREACH: it is gone.
            _log.info("replay to a subscriber was cut: %s", error)
            outcome = "cut"
        with self._lock:
            self._counts[outcome] += 1

    def _reply(
        self, router: "zmq.Socket[bytes]", client: bytes, sequence: bytes, payload: bytes
    ) -> None:
        # Copied: pyzmq's zero-copy sends start a thread of its own that never ends.
        router.send_multipart((client, b"", self._topic, sequence, payload), zmq.NOBLOCK)


_ENCODER: Final = msgspec.msgpack.Encoder()


def _encode(batch: EventBatch) -> bytes | None:
    """The payload; None (a gap, and a log line) when a publisher put in what msgpack cannot say."""
    try:
        return _ENCODER.encode(batch)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
        _log.exception("a batch of %d events cannot be encoded", len(batch.events))
        return None


def _bind(socket: "zmq.Socket[bytes]", field: str, endpoint: str) -> str:
    """Bind and return the real endpoint.

    Raises:
        InvalidArgument: the endpoint is malformed, taken or not allowed.
    """
    try:
        socket.bind(endpoint)
    except (zmq.ZMQError, ValueError) as error:
        raise InvalidArgument(field, f"cannot bind {endpoint!r}: {error}") from error
    return socket.get_string(zmq.LAST_ENDPOINT)
