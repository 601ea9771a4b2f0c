"""Following KV events over ZeroMQ: one subscription an engine or node, replay, restarts.

Each follower is a task on the Conductor's loop: a SUB socket with a monitor that tells when the
connection comes and goes, and a DEALER for each replay. What a worker holds counts only while its
connection stands (``is_current``): a daemon that is gone, or stopped (ZMTP heartbeats), attracts no
requests. Long bursts give the loop back every few batches, so that a replay delays no stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from conductor.config import EventsConfig, IndexConfig, NodeEntry
from conductor.engines import EngineInfo
from conductor.foreign import ForeignBlocks
from conductor.index import PrefixIndex
from conductor.ingest import WorkerIngest
from conductor.prefixes import engine_worker, node_worker
from conductor.sequence import Sequence, Verdict
from kvstore.events import END_OF_REPLAY, wall_clock

_log = logging.getLogger(__name__)

_BURST: Final = 8
"""Batches applied before others get the loop; one takes 0.1 to 0.5 ms."""
_MESSAGE_BYTES_MAX: Final = 64 << 20
_REPLAY_BATCHES_MAX: Final = 1_000_000
_HEARTBEAT_MS: Final = 1_000
_HEARTBEAT_TIMEOUT_MS: Final = 3_000
_AGAIN_S: Final = 1.0
"""Pause before a socket that cannot be made is tried again."""
_WATCHED: Final = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)


class _Source(NamedTuple):
    """Where a worker's events come from."""

    worker: str
    domain: str
    page_tokens: int
    endpoint: str
    replay_endpoint: str | None


class Follower:
    """Follows one worker."""

    def __init__(
        self,
        source: _Source,
        ingest: WorkerIngest,
        config: EventsConfig,
        changed: Callable[[], None],
    ) -> None:
        self.source = source
        self.connected = False
        self.current = False
        self.batches = 0
        self.malformed = 0
        self.lag_s = 0.0
        self.sequence = Sequence()
        self.ingest = ingest
        self._config = config
        self._changed = changed
        self._since_pause = 0

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow(context)
            except zmq.ZMQError as error:
                _log.warning("events of %s: %s", self.source.worker, error)
                await asyncio.sleep(_AGAIN_S)
            finally:
                self.connected = self.current = False

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        with _socket(context, zmq.SUB) as sub:
            sub.set(zmq.RCVHWM, self._config.queue_max)
            sub.set(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
            sub.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            sub.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            sub.set(zmq.RECONNECT_IVL_MAX, 1_000)
            sub.subscribe(b"")
            monitor = sub.get_monitor_socket(_WATCHED)
            try:
                sub.connect(self.source.endpoint)
                poller = zmq.asyncio.Poller()
                poller.register(sub, zmq.POLLIN)
                poller.register(monitor, zmq.POLLIN)
                while True:
                    ready = dict(await poller.poll(int(self._config.verify_s * 1_000)))
                    if monitor in ready:
                        await self._heard_of_connection(context, await monitor.recv_multipart())
                    if sub in ready:
                        await self._drain(context, sub)
                    if not ready and self.connected:
                        await self._replay(context)
            finally:
                sub.disable_monitor()

    async def _heard_of_connection(
        self, context: zmq.asyncio.Context, message: list[bytes]
    ) -> None:
        event = parse_monitor_message(message)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.connected = True
            await self._replay(context)
            self.current = True
            self._changed()
        else:
            self.connected = self.current = False

    async def _drain(self, context: zmq.asyncio.Context, sub: zmq.asyncio.Socket) -> None:
        """Take what has arrived, a bounded number of messages."""
        for _ in range(_BURST):
            try:
                message = await sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            await self._live(context, message)
        self._changed()
        await asyncio.sleep(0)

    async def _live(self, context: zmq.asyncio.Context, message: list[bytes]) -> None:
        if len(message) != 3 or len(message[1]) != 8:
            self.malformed += 1
            return
        topic, number_frame, payload = message
        number = int.from_bytes(number_frame, "big")
        if self.sequence.met_live(topic, number):
            self.ingest.clear()
        if self.sequence.needs_replay(number):
            await self._replay(context)
        await self._take(number, payload)

    async def _take(self, number: int, payload: bytes) -> bool:
        """Apply a batch as the sequence allows; True when the publisher turns out restarted."""
        verdict = self.sequence.take(number, payload)
        if verdict is Verdict.SKIP:
            return False
        if verdict is not Verdict.APPLY:
            self.ingest.clear()
        if verdict is Verdict.RESTARTED:
            return True
        try:
            published = self.ingest.apply(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            # What it took away is not known: nothing that was there before can be believed.
            _log.warning("events of %s: batch %d: %s", self.source.worker, number, error)
            self.malformed += 1
            self.ingest.clear()
        else:
            self.lag_s = max(0.0, wall_clock() - published)
        self.batches += 1
        self._since_pause += 1
        if self._since_pause >= _BURST:
            self._since_pause = 0
            await asyncio.sleep(0)
        return False

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Ask for the last batch and everything after it; again from the start after a restart."""
        if self.source.replay_endpoint is None:
            return
        for _ in range(2):
            try:
                if not await self._replay_once(context, self.source.replay_endpoint):
                    return
            except TimeoutError:
                _log.warning("events of %s: the replay was cut", self.source.worker)
                self.ingest.clear()
                self.sequence.forget()
                return

    async def _replay_once(self, context: zmq.asyncio.Context, endpoint: str) -> bool:
        """One replay; True when it shows a restart, so that another one from the start is due.

        Raises:
            TimeoutError: it was silent too long.
        """
        found = False
        async with aclosing(self._replayed(context, endpoint)) as messages:
            async for topic, number, payload in messages:
                if self.sequence.met(topic):
                    self.ingest.clear()
                    return True
                if number is not None:
                    found = True
                    if await self._take(number, payload):
                        return True
        if not found and self.sequence.replay_was_empty():
            self.ingest.clear()
        return False

    async def _replayed(
        self, context: zmq.asyncio.Context, endpoint: str
    ) -> AsyncGenerator[tuple[bytes, int | None, bytes], None]:
        """Topic, number and payload of each batch; at the end the topic alone (number None)."""
        with _socket(context, zmq.DEALER) as dealer:
            dealer.set(zmq.RCVHWM, self._config.queue_max)
            dealer.set(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
            dealer.connect(endpoint)
            first = self.sequence.replay_from.to_bytes(8, "big")
            async with asyncio.timeout(self._config.replay_s):
                await dealer.send_multipart([b"", first])
            for _ in range(_REPLAY_BATCHES_MAX):
                async with asyncio.timeout(self._config.replay_s):
                    message = await dealer.recv_multipart()
                if len(message) != 4 or len(message[2]) != 8:
                    self.malformed += 1
                    raise TimeoutError("not a replay")
                _, topic, number, payload = message
                if number == END_OF_REPLAY:
                    yield topic, None, b""
                    return
                yield topic, int.from_bytes(number, "big"), payload


class EventFollowers:
    """One follower for each engine and node whose events are known where to find."""

    def __init__(
        self,
        index: PrefixIndex,
        index_config: IndexConfig,
        events_config: EventsConfig,
        changed: Callable[[], None],
    ) -> None:
        """Follow nobody yet.

        Args:
            index: changed in place.
            index_config: page size and bounds for engines with hashes of their own.
            events_config: bounds and deadlines.
            changed: called after batches were applied and when a connection comes.
        """
        self._index = index
        self._index_config = index_config
        self._events_config = events_config
        self._changed = changed
        self._followers: dict[str, Follower] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def follow_engine(self, info: EngineInfo) -> None:
        """Follow an engine's events from now on; it is not followed yet."""
        if info.events is not None:
            worker = engine_worker(info.id)
            self._follow(
                _Source(worker, info.domain, info.page_tokens, info.events, info.events_replay)
            )

    def follow_node(self, node: NodeEntry) -> None:
        """Follow a node's events from now on; it is not followed yet."""
        worker = node_worker(node.id)
        page_tokens = self._index_config.page_tokens
        source = _Source(worker, worker, page_tokens, node.events, node.events_replay)
        self._follow(source)

    def _follow(self, source: _Source) -> None:
        assert source.worker not in self._followers, source.worker
        foreign = ForeignBlocks(source.page_tokens, self._index_config.foreign_blocks_max)
        ingest = WorkerIngest(self._index, source.worker, source.domain, foreign)
        self._followers[source.worker] = Follower(
            source, ingest, self._events_config, self._changed
        )
        self._wake.set()

    def drop_engine(self, engine_id: str) -> None:
        """Forget what an engine holds, and follow it no longer."""
        self._drop(engine_worker(engine_id))

    def drop_node(self, node_id: str) -> None:
        """Forget what a node holds, and follow it no longer."""
        self._drop(node_worker(node_id))

    def _drop(self, worker: str) -> None:
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        follower = self._followers.pop(worker, None)
        if follower is not None:
            follower.ingest.clear()  # its task applies nothing more: it is cancelled at its await

    def is_current(self, worker: str) -> bool:
        """Whether a worker's events arrive, so that what it is said to hold is true."""
        follower = self._followers.get(worker)
        return follower is not None and follower.current

    def get(self, worker: str) -> Follower | None:
        """The follower of a worker."""
        return self._followers.get(worker)

    async def run(self) -> None:
        """Follow everybody until cancelled."""
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._wake.clear()
                    for worker, follower in self._followers.items():
                        if worker not in self._tasks:
                            run = follower.run(context)
                            self._tasks[worker] = tasks.create_task(run, name=worker)
                    await self._wake.wait()
        finally:
            context.destroy(linger=0)

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """State of the index and of every follower, for the metrics."""
        gauges: dict[str, dict[tuple[str, ...], float]] = {
            "index_entries": {(): float(len(self._index))},
            "index_dropped": {(): float(self._index.dropped)},
            "index_worker_pages": {
                holder: float(pages) for holder, pages in self._index.pages().items()
            },
        }
        each = list(self._followers.items())
        gauges["events_connected"] = {(w,): float(f.connected) for w, f in each}
        gauges["events_batches"] = {(w,): float(f.batches) for w, f in each}
        gauges["events_restarts"] = {(w,): float(f.sequence.restarts) for w, f in each}
        gauges["events_unmapped"] = {(w,): float(f.ingest.unmapped) for w, f in each}
        gauges["events_malformed"] = {(w,): float(f.malformed) for w, f in each}
        gauges["events_lag_seconds"] = {(w,): f.lag_s for w, f in each}
        gauges["events_gaps"] = {
            (worker, outcome): float(count)
            for worker, f in each
            for outcome, count in (("seen", f.sequence.gaps), ("lost", f.sequence.gaps_lost))
        }
        return gauges


@contextmanager
def _socket(context: zmq.asyncio.Context, kind: int) -> Iterator[zmq.asyncio.Socket]:
    socket = context.socket(kind)
    try:
        yield socket
    finally:
        socket.close(linger=0)
