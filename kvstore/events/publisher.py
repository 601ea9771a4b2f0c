"""KV events: pages stored in and removed from the cache of a node or an engine.

The frames are those of vLLM and SGLang, so that followers of engines can also follow a node::

    PUB topic | sequence, 8 bytes big-endian | msgpack [ts, [event, ...], data_parallel_rank]
    request "" | first sequence wanted, 8 bytes big-endian (DEALER or REQ to our ROUTER) replay "" |
    topic | sequence | payload for each kept batch,
             "" | topic | -1 | "" at the end

:mod:`kvstore.events.questions` has the frames of questions, which the node itself answers.

An event is a map whose ``type`` is ``BlockStored``, ``BlockRemoved`` or ``AllBlocksCleared``. A
block of an engine is a page here, and its hash is the 32-byte prefix key.

One :class:`EventPublisher` has one sequence that starts at 0 with the process (put the boot id into
the topic). If the queue is full, a batch is dropped *visibly*: its number is used, so every
subscriber sees the gap, and replay cannot fill it. The publisher never blocks its caller.

Threads: any thread may call :meth:`EventPublisher.publish`; one thread owns the sockets and the
replay buffer (:mod:`kvstore.events.server`). ``_lock`` protects the queue, the sequence and the
counters, and is never held while sending or encoding.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec
from msgspec import UNSET, UnsetType

from kvstore.events import zmtp
from kvstore.events.kept import Bounds
from kvstore.events.questions import OpenQuestion, Questions
from kvstore.events.server import END_OF_REPLAY as END_OF_REPLAY
from kvstore.events.server import EventServer
from kvstore.process.listeners import Listener, parse_endpoint
from kvstore.protocol.counts import EventCounts
from kvstore.protocol.errors import InvalidArgument, TransferTimeout

BlockHash = bytes | int
"""32 bytes (ours, and vLLM's long form) or the low 64 bits of them (vLLM's default)."""

_BATCH_BYTES: Final = 512 << 10
"""Approximate maximum size of a batch; longer ones are split."""
_HASH_BYTES: Final = 34
_TOKEN_BYTES: Final = 5
_SEND_BURST: Final = 256
"""Batches sent before followers are served again."""
_POLL_S: Final = 1.0
"""Maximum wait; normally the wake-up descriptor ends it at once."""
_GATHER_S: Final = 0.002
"""How long a first batch waits for others, so that they are sent together: otherwise this thread
would take the GIL from a busy node after every put."""
_CLOSE_GRACE_S: Final = 1.0
"""Extra time for the thread to close its sockets, after the timeout of ``close``."""

_log = logging.getLogger(__name__)


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockStored"):
    """Pages were stored.

    Attributes:
        block_hashes: their keys, in chain order.
        parent_block_hash: key of the page before the first; None if the first starts its chain.
        token_ids: token ids of the stored pages; empty if unknown.
        block_size: tokens in a page.
        medium: ``GPU``, ``CPU`` or ``STORAGE``: the tier they were stored in; other tiers may have
            them too.
        lora_id: always None, because a LoRA is part of the chain's seed. Followers of engines
            require the field.
        lora_name: as ``lora_id``.
        space: hex digest of the space; our extension, not used by engines.
        shard: index of the shard in its space, which differs from node to node; our extension.
        shard_digest: first 16 hex digits of the shard's digest, equal on all nodes; our extension.
        group: name of the shard's KV group; our extension. Pages of all groups of a space have the
            same keys, and a hit needs pages of each group.
        window_pages: how many pages of this group a hit needs: the last n; 0 = all; our extension.
        boot: hex boot id of the publisher; our extension.
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
    shard_digest: str | UnsetType = UNSET
    group: str | UnsetType = UNSET
    window_pages: int | UnsetType = UNSET
    boot: str | UnsetType = UNSET


class RemovedEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BlockRemoved"):
    """Pages were removed from ``medium``; published before their memory is reused.

    Attributes:
        block_hashes: their keys, in any order.
        medium: ``GPU``, ``CPU`` or ``STORAGE``: the tier they left; other tiers may still have
            them.
        space: hex digest of the space; our extension, not used by engines.
        shard: index of the shard in its space, which differs from node to node; our extension.
        shard_digest: first 16 hex digits of the shard's digest, equal on all nodes; our extension.
        group: name of the shard's KV group; our extension.
        boot: hex boot id of the publisher; our extension.
    """

    block_hashes: Sequence[BlockHash]
    medium: str
    space: str | UnsetType = UNSET
    shard: int | UnsetType = UNSET
    shard_digest: str | UnsetType = UNSET
    group: str | UnsetType = UNSET
    boot: str | UnsetType = UNSET


class ClearedEvent(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="AllBlocksCleared"
):
    """Everything that this publisher announced was removed.

    Attributes:
        space: hex digest if only one space was cleared; our extension.
        boot: hex boot id of the publisher; our extension.
    """

    space: str | UnsetType = UNSET
    boot: str | UnsetType = UNSET


Event = StoredEvent | RemovedEvent | ClearedEvent


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The payload of one message.

    Attributes:
        ts: time of publication, seconds since the epoch.
        events: the events, in order.
        data_parallel_rank: an engine's rank; None from a node.
    """

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


class _Queued(NamedTuple):
    sequence: int
    batch: EventBatch


class FollowerAccess(NamedTuple):
    """Access control of a publisher.

    Attributes:
        token: password (ZMTP's mechanism PLAIN) that followers over TCP must send; empty = none.
        mode: mode of the files of ``ipc`` endpoints.
    """

    token: bytes = b""
    mode: int = 0o600


OWNER: Final = FollowerAccess()
"""Only the user of this process over Unix sockets; every client over TCP."""


def wall_clock() -> float:
    """Seconds since the epoch."""
    return datetime.now(UTC).timestamp()


class EventPublisher:
    """Publishes batches of events from a separate thread.

    The creator must close it, because its thread keeps the process alive.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None = None,
        *,
        topic: bytes = b"",
        access: FollowerAccess = OWNER,
        queue_max: int = 1_024,
        replay_max: int = 10_000,
        replay_bytes_max: int = 64 << 20,
        clock: Callable[[], float] = wall_clock,
    ) -> None:
        """Bind the sockets and start the thread.

        Args:
            endpoint: where batches are published: ``ipc:///path`` or ``tcp://127.0.0.1:*``;
                :attr:`bound_endpoint` has the actual port. The socket of a dead process is
                replaced. None = nowhere: only for connections of :meth:`serve`.
            replay_endpoint: where followers request missed batches; None = no replay but for
                connections of :meth:`serve`.
            topic: first frame of every message.
            access: who may follow.
            queue_max: maximum batches waiting for the thread, at least 1; also the maximum waiting
                for one slow subscriber.
            replay_max: batches kept for replay.
            replay_bytes_max: payload bytes kept for replay; the oldest batches are removed first.
            clock: seconds since the epoch, for ``ts``.

        Raises:
            InvalidArgument: an endpoint cannot be bound, or a limit is not positive; names it.
        """
        bounds = {"queue_max": queue_max, "replay_max": replay_max}
        for field, bound in (bounds | {"replay_bytes_max": replay_bytes_max}).items():
            if bound < 1:
                raise InvalidArgument(field, f"{bound} is not positive")
        if len(access.token) > zmtp.TOKEN_BYTES_MAX:
            raise InvalidArgument("access", f"a token has {zmtp.TOKEN_BYTES_MAX} bytes at most")
        self._queue_max = queue_max
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: deque[_Queued] = deque()
        self._sequence_next = 0
        self._closing = False
        self._close_deadline = 0.0
        self._counts = dict.fromkeys(("sent", "dropped"), 0)
        live, replay = _listeners(endpoint, replay_endpoint, access.mode)
        self._questions = Questions(self._wake)
        self.bound_endpoint = str(live.endpoint) if live else None
        self.bound_replay_endpoint = str(replay.endpoint) if replay else None
        self._server = EventServer(
            live,
            replay,
            topic=topic,
            token=access.token,
            waiting_max=queue_max,
            kept=Bounds(replay_max, replay_bytes_max),
            questions=self._questions,
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._server.watch(self._wake_fd)
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=False)
        self._thread.start()

    def publish(self, events: Sequence[Event]) -> None:
        """Queue events; never blocks, never fails.

        Long lists are split into several batches. If the queue is full or the publisher is closed,
        a batch and its sequence number are lost.

        Args:
            events: the events, in order; must not be changed afterwards. An empty list makes no
                batch.
        """
        for batch in _batches(events):
            self._enqueue(EventBatch(self._clock(), batch))

    def _enqueue(self, batch: EventBatch) -> None:
        with self._lock:
            sequence = self._sequence_next
            self._sequence_next += 1
            if self._closing or len(self._queue) >= self._queue_max:
                self._counts["dropped"] += 1
                return
            self._queue.append(_Queued(sequence, batch))
            if len(self._queue) == 1:
                os.eventfd_write(self._wake_fd, 1)

    def _wake(self) -> None:
        """Wake the thread: an answer continues."""
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._wake_fd, 1)

    def serve(self, raw: socket.socket, *, replay: bool) -> None:
        """Serve a follower through a connection that exists already; never blocks.

        It needs no token. If the publisher is closed, or has as many followers as it may have, the
        connection is closed.

        Args:
            raw: a connected stream socket; the publisher owns it from now on.
            replay: the follower requests missed batches and asks questions; otherwise it gets live
                batches.
        """
        with self._lock:
            if self._closing:
                raw.close()
                return
            self._server.handed.append((raw, zmtp.ROUTER if replay else zmtp.PUB))
            os.eventfd_write(self._wake_fd, 1)

    @property
    def sequence_next(self) -> int:
        """Number of the next batch."""
        with self._lock:
            return self._sequence_next

    def answer_with(self, answer: Callable[[OpenQuestion], None] | None) -> None:
        """Set the function that answers questions; before, and after None, questions are refused.

        Args:
            answer: called on the publisher's thread: starts to answer, or raises
                :class:`~kvstore.events.questions.RefusedError`.
        """
        self._questions.answer = answer

    def stats(self) -> EventCounts:
        """One consistent snapshot."""
        questions, answered = self._questions, self._questions.counts
        with self._lock:
            return EventCounts(
                sequence_next=self._sequence_next,
                batches_sent=self._counts["sent"],
                batches_dropped=self._counts["dropped"],
                batches_queued=len(self._queue),
                batches_lost=self._server.counts["lost"],
                followers=len(self._server),
                followers_cut=self._server.faults.counts.total(),
                replays_served=self._server.counts["served"],
                replays_cut=self._server.counts["cut"],
                snapshots_s=questions.snapshot_s,
                snapshots_served=answered["snapshots_served"],
                snapshots_cut=answered["snapshots_cut"],
                snapshots_refused=answered["snapshots_refused"],
                audits_served=answered["audits_served"],
                audits_cut=answered["audits_cut"],
                audits_refused=answered["audits_refused"],
            )

    def close(self, timeout_s: float = 2.0) -> None:
        """Send queued batches, close the sockets, end the thread; a second call only waits.

        Args:
            timeout_s: maximum time; batches that a slow subscriber has not read by then are lost.

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
        busy = False
        try:
            while True:
                woken = self._server.turn(0.0 if busy else _POLL_S)
                if woken:
                    os.eventfd_read(self._wake_fd)
                    if not self._closing:
                        time.sleep(_GATHER_S)
                busy = self._send_burst()
                waiting = self._server.flush()
                if self._closing:
                    left_s = self._close_deadline - time.monotonic()
                    if left_s <= 0 or not (busy or waiting):
                        return
        finally:
            self._release()

    def _release(self) -> None:
        """Release everything; set ``_closing`` first, so that no thread uses the wake-up."""
        with self._lock:
            self._closing = True
            self._counts["dropped"] += len(self._queue)
            self._queue.clear()
            os.close(self._wake_fd)
        self._server.close()

    def _send_burst(self) -> bool:
        """Send up to ``_SEND_BURST`` batches; returns True if there are more."""
        for _ in range(_SEND_BURST):
            with self._lock:
                if not self._queue:
                    return False
                queued = self._queue.popleft()
            payload = _encode(queued.batch)
            if payload is not None:
                self._server.send(queued.sequence, payload)
            with self._lock:
                self._counts["sent" if payload is not None else "dropped"] += 1
        return True


def _listeners(
    endpoint: str | None, replay_endpoint: str | None, mode: int
) -> tuple[Listener | None, Listener | None]:
    """Bind both endpoints, or none."""
    listeners: dict[str, Listener] = {}
    try:
        for field, where in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
            if where is not None:
                listeners[field] = Listener(field, parse_endpoint(field, where), mode)
    except InvalidArgument:
        for listener in listeners.values():
            listener.close()
        raise
    return listeners.get("endpoint"), listeners.get("replay_endpoint")


def _batches(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Split events into batches of limited size."""
    batch: list[Event] = []
    size = 0
    for event in events:
        for piece in _pieces(event):
            if batch and size + _size(piece) > _BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += _size(piece)
    if batch:
        yield batch


def _size(event: Event) -> int:
    """Approximate size of an event in bytes."""
    if isinstance(event, ClearedEvent):
        return _HASH_BYTES
    tokens = len(event.token_ids) if isinstance(event, StoredEvent) else 0
    return (len(event.block_hashes) + 4) * _HASH_BYTES + tokens * _TOKEN_BYTES


def _pieces(event: Event) -> Iterator[Event]:
    """Split a long event."""
    if isinstance(event, ClearedEvent) or _size(event) <= _BATCH_BYTES:
        yield event
        return
    hashes = event.block_hashes
    step = max(1, len(hashes) * (_BATCH_BYTES // 2) // _size(event))
    for start in range(0, len(hashes), step):
        some = hashes[start : start + step]
        if isinstance(event, RemovedEvent):
            yield msgspec.structs.replace(event, block_hashes=some)
            continue
        size = event.block_size if event.token_ids else 0
        yield msgspec.structs.replace(
            event,
            block_hashes=some,
            parent_block_hash=hashes[start - 1] if start else event.parent_block_hash,
            token_ids=event.token_ids[start * size : (start + step) * size],
        )


_ENCODER: Final = msgspec.msgpack.Encoder()


def _encode(batch: EventBatch) -> bytes | None:
    """The payload; None (a gap, and a log line) if an event cannot be encoded."""
    try:
        return _ENCODER.encode(batch)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
        _log.exception("a batch of %d events cannot be encoded", len(batch.events))
        return None
