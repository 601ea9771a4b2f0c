"""Following KV events: one subscription an engine or node, replay, restarts.

Each follower is a task with one connection for live batches and another one for each replay. What a
worker holds counts only while its connection stands (``is_current``): a daemon that is gone, or
stopped (heartbeats), attracts no requests. Long bursts and long batches give the loop back every
few milliseconds, so that neither delays a stream.

Whatever a publisher sends costs what is known of that worker, at most: a batch that cannot be read,
a message that is none, a replay without an end. Each is counted by its cause.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, NamedTuple

from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY, wall_clock
from kvstore.index.channel import EventConnection
from kvstore.index.foreign import ForeignBlocks
from kvstore.index.holders import PrefixIndex
from kvstore.index.ingest import WorkerIngest
from kvstore.index.reading import UnreadableError
from kvstore.index.sequence import BatchVerdict, Sequence
from kvstore.process.faults import Faults

_log = logging.getLogger(__name__)

TOPIC_BYTES_MAX: Final = 256
_TURN_S: Final = 0.002
"""How long batches are applied before others get the loop."""
_CONNECT_S: Final = 5.0
_BEAT_S: Final = 1.0
_BEATS_MISSED_MAX: Final = 3
_REPLAY_S_MAX: Final = 60.0
"""A replay that goes on for longer is no use; the publisher keeps a live connection that long."""
_AGAIN_S_MIN: Final = 0.1
_AGAIN_S_MAX: Final = 1.0
"""Pause before a lost connection is made again; it grows from the one to the other."""


class Source(NamedTuple):
    """Where a worker's events come from.

    Attributes:
        worker: its name in the index.
        domain: what its pages are indexed under where its events name no space.
        page_tokens: tokens in a page of that domain, at least 1.
        endpoint: of its publisher; ``ipc://`` or ``tcp://``.
        replay_endpoint: where missed batches are asked for; None: nowhere.
        token: what its publisher asks for over TCP; empty for nothing.
    """

    worker: str
    domain: str
    page_tokens: int
    endpoint: str
    replay_endpoint: str | None = None
    token: str = ""


class SourceBounds(NamedTuple):
    """What one source may cost.

    Attributes:
        replay_s: longest silence during a replay.
        verify_s: without a live message for so long, the last batch is asked for again.
        foreign_blocks: blocks with hashes of the source's own that are remembered.
    """

    replay_s: float
    verify_s: float
    foreign_blocks: int


class _NoReplayError(Exception):
    """A replay was not what was asked for."""

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause = cause


class Follower:
    """Follows one worker.

    Attributes:
        connected: the connection stands.
        current: and what was published before it is known.
        faults: what its publisher did that it should not have, by cause.
    """

    def __init__(
        self,
        source: Source,
        ingest: WorkerIngest,
        bounds: SourceBounds,
        changed: Callable[[], None],
    ) -> None:
        self.source = source
        self.connected = False
        self.current = False
        self.batches = 0
        self.lag_s = 0.0
        self.sequence = Sequence()
        self.ingest = ingest
        self.faults = Faults(_log, f"events of {source.worker}")
        self._bounds = bounds
        self._changed = changed
        self._turn_ends = 0.0

    async def run(self) -> None:
        """Follow until cancelled."""
        pause_s = _AGAIN_S_MIN
        while True:
            try:
                await self._follow()
            except OSError as error:
                self.faults.note("connection", f"{self.source.endpoint}: {_said(error)}")
            except zmtp.PeerError as error:
                self.faults.note(error.cause, f"{self.source.endpoint}: {error}")
            finally:
                was_current, self.connected, self.current = self.current, False, False
            pause_s = _AGAIN_S_MIN if was_current else min(2 * pause_s, _AGAIN_S_MAX)
            await asyncio.sleep(pause_s)

    async def _follow(self) -> None:
        """Follow over one connection, as long as it stands.

        Raises:
            OSError: it broke, or the publisher gives no sign of life.
            PeerError: it is no publisher.
        """
        source = self.source
        channel = await EventConnection.open(source.endpoint, zmtp.SUB, source.token, _CONNECT_S)
        try:
            await channel.send([b"\x01"])
            self.connected = True
            await self._replay()
            self.current = True
            self._changed()
            await self._listen(channel)
        finally:
            channel.close()

    async def _listen(self, channel: EventConnection) -> None:
        loop = asyncio.get_running_loop()
        heard_at, missed = loop.time(), 0
        while True:
            try:
                wait_s = min(_BEAT_S, self._bounds.verify_s)
                async with asyncio.timeout(wait_s):
                    messages = await channel.receive()
            except TimeoutError:
                messages = []
                missed += channel.beats
                if missed > _BEATS_MISSED_MAX * _BEAT_S / wait_s:
                    raise OSError("it gives no sign of life") from None
                if channel.beats:
                    await channel.ping()
            else:
                missed = 0
            for message in messages:
                await self._live(message)
                await self._let_others()
            await self._let_others()
            if messages:
                heard_at = loop.time()
                self._changed()
            elif loop.time() - heard_at >= self._bounds.verify_s:
                await self._replay()
                heard_at = loop.time()

    async def _live(self, message: zmtp.Message) -> None:
        if len(message) != 3 or len(message[1]) != 8 or len(message[0]) > TOPIC_BYTES_MAX:
            self.faults.note("frames", "a message that is no batch")
            return
        topic, number_frame, payload = message
        number = int.from_bytes(number_frame, "big")
        if self.sequence.met_live(topic, number):
            await self._clear()
        if self.sequence.needs_replay(number):
            await self._replay()
        await self._take(number, payload)

    async def _take(self, number: int, payload: bytes) -> bool:
        """Apply a batch as the sequence allows; True when the publisher turns out restarted."""
        verdict = self.sequence.take(number, payload)
        if verdict is BatchVerdict.SKIP:
            return False
        if verdict is not BatchVerdict.APPLY:
            await self._clear()
        if verdict is BatchVerdict.RESTARTED:
            return True
        try:
            for _ in self.ingest.apply(payload):
                await self._let_others()
        except UnreadableError as error:
            # What it took away is not known: nothing that was there before can be believed.
            self.faults.note("batch", f"batch {number} cannot be read: {error}")
            await self._clear()
        else:
            self.lag_s = max(0.0, wall_clock() - self.ingest.published)
        self.batches += 1
        return False

    async def _clear(self) -> None:
        """Believe nothing any more of what the worker holds."""
        for _ in self.ingest.clear():
            await self._let_others()

    async def _let_others(self) -> None:
        """Give the loop back when this turn was long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = loop.time() + _TURN_S

    async def _replay(self) -> None:
        """Ask for the last batch and everything after it; again from the start after a restart."""
        endpoint = self.source.replay_endpoint
        if endpoint is None:
            return
        try:
            async with asyncio.timeout(_REPLAY_S_MAX):
                if await self._replay_once(endpoint):
                    await self._replay_once(endpoint)
        except TimeoutError:
            await self._not_replayed("replay", "it did not end in time")
        except OSError as error:
            await self._not_replayed("connection", f"replay: {_said(error)}")
        except zmtp.PeerError as error:
            await self._not_replayed(error.cause, f"replay: {error}")
        except _NoReplayError as error:
            await self._not_replayed(error.cause, str(error))

    async def _not_replayed(self, cause: str, what: str) -> None:
        self.faults.note(cause, what)
        await self._clear()
        self.sequence.forget()

    async def _replay_once(self, endpoint: str) -> bool:
        """One replay; True when it shows a restart, so that another one from the start is due.

        Raises:
            TimeoutError: it was silent too long.
            OSError: it broke off.
            PeerError: it is no publisher.
            _NoReplayError: it is no replay.
        """
        found = False
        async with aclosing(self._replayed(endpoint)) as messages:
            async for topic, number, payload in messages:
                if self.sequence.met(topic):
                    await self._clear()
                    return True
                if number is not None:
                    found = True
                    if await self._take(number, payload):
                        return True
        if not found and self.sequence.replay_was_empty():
            await self._clear()
        return False

    async def _replayed(
        self, endpoint: str
    ) -> AsyncGenerator[tuple[bytes, int | None, bytes], None]:
        """Topic, number and payload of each batch; at the end the topic alone (number None)."""
        channel = await EventConnection.open(endpoint, zmtp.DEALER, self.source.token, _CONNECT_S)
        try:
            await channel.send([b"", self.sequence.replay_from.to_bytes(8, "big")])
            before = -1
            while True:
                async with asyncio.timeout(self._bounds.replay_s):
                    while not (messages := await channel.receive()):
                        await self._let_others()
                for message in messages:
                    if len(message) != 4 or len(message[2]) != 8:
                        raise _NoReplayError("frames", "a replay of something that is no batch")
                    _, topic, number, payload = message
                    if len(topic) > TOPIC_BYTES_MAX:
                        raise _NoReplayError("frames", "a topic that is too long")
                    if number == END_OF_REPLAY:
                        yield topic, None, b""
                        return
                    if int.from_bytes(number, "big") <= before:
                        raise _NoReplayError("replay", "its numbers do not grow")
                    before = int.from_bytes(number, "big")
                    yield topic, before, payload
        finally:
            channel.close()


def _said(error: OSError) -> str:
    return str(error) or type(error).__name__


class Followers:
    """One follower for each source."""

    def __init__(
        self, index: PrefixIndex, bounds: SourceBounds, changed: Callable[[], None]
    ) -> None:
        """Follow nobody yet.

        Args:
            index: changed in place.
            bounds: of each source.
            changed: called after batches were applied and when a connection comes.
        """
        self._index = index
        self._bounds = bounds
        self._changed = changed
        self._followers: dict[str, Follower] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def follow(self, source: Source) -> None:
        """Follow a source from now on; nothing changes when that is done already.

        What is known of its worker from another place is forgotten.
        """
        known = self._followers.get(source.worker)
        if known is not None and known.source == source:
            return
        self.drop(source.worker)
        foreign = ForeignBlocks(source.page_tokens, self._bounds.foreign_blocks)
        ingest = WorkerIngest(self._index, source.worker, source.domain, foreign)
        self._followers[source.worker] = Follower(source, ingest, self._bounds, self._changed)
        self._wake.set()

    def drop(self, worker: str) -> None:
        """Forget what a worker holds, and follow it no longer; nothing to do when it is not."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        follower = self._followers.pop(worker, None)
        if follower is not None:
            for _ in follower.ingest.clear():  # its task does no more: it is cancelled at its await
                pass

    def is_current(self, worker: str) -> bool:
        """Whether a worker's events arrive, so that what it is said to hold is true."""
        follower = self._followers.get(worker)
        return follower is not None and follower.current

    def get(self, worker: str) -> Follower | None:
        """The follower of a worker."""
        return self._followers.get(worker)

    async def run(self) -> None:
        """Follow everybody until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                for worker, follower in self._followers.items():
                    if worker not in self._tasks:
                        self._tasks[worker] = tasks.create_task(follower.run(), name=worker)
                await self._wake.wait()

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
        gauges["events_skipped"] = {(w,): float(f.ingest.skipped) for w, f in each}
        gauges["events_unmapped"] = {(w,): float(f.ingest.unmapped) for w, f in each}
        gauges["events_faults"] = {
            (w, cause): float(count) for w, f in each for cause, count in f.faults.counts.items()
        }
        gauges["events_lag_seconds"] = {(w,): f.lag_s for w, f in each}
        gauges["events_gaps"] = {
            (worker, outcome): float(count)
            for worker, f in each
            for outcome, count in (("seen", f.sequence.gaps), ("lost", f.sequence.gaps_lost))
        }
        return gauges
