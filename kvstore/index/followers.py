"""Follows KV events: one subscription per engine or node, with replay and restart detection.

Each follower is a task with one connection for live batches and another one for each replay. It
connects to the publisher, or the publisher to it. The pages of a worker count only while its
connection is up, so a dead or suspended worker (detected by heartbeats) attracts no requests. After
a gap that a replay cannot fill, a node's snapshot is read; all pages of an engine are dropped. Long
bursts and long batches yield to the event loop every few milliseconds.

Faults of a publisher (an unreadable batch, an invalid message, an endless replay) cost at most the
index entries of that worker. They are counted by cause.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing
from typing import Final, Generic, TypeVar

from kvstore.events import zmtp
from kvstore.events.publisher import wall_clock
from kvstore.index.channel import CONNECT_S, EventConnection, EventListener
from kvstore.index.control import Source, SourceBounds
from kvstore.index.event_feed import EventFeed
from kvstore.index.feed import PageFeeds, WorkerFeed
from kvstore.index.reading import UnreadableError
from kvstore.index.replay import TOPIC_BYTES_MAX, NoReplayError, read_replay
from kvstore.index.sampled import SampledPages
from kvstore.index.sequence import BatchVerdict, Sequence
from kvstore.index.snapshot import (
    SnapshotEnd,
    SnapshotError,
    SnapshotHead,
    SnapshotPages,
    read_snapshot,
)
from kvstore.process.faults import Faults

_log = logging.getLogger(__name__)

_TURN_S: Final = 0.002
"""Seconds for which batches are applied before yielding to the event loop."""
_BEAT_S: Final = 1.0
_BEATS_MISSED_MAX: Final = 3
_RESYNCS_MAX: Final = 3
"""Times that everything is read again before the connection is given up."""
_REPLAY_S_MAX: Final = 60.0
"""Maximum duration of a replay; the publisher keeps a live connection for that long."""
_AGAIN_S_MIN: Final = 0.1
_AGAIN_S_MAX: Final = 1.0
"""Pause before reconnecting; it grows from the first value to the second."""


_FULL_S: Final = 0.01
"""Pause before checking again whether a feed accepts more."""


FeedT = TypeVar("FeedT", bound=EventFeed)


class _ResyncNeededError(Exception):
    """The known state of a node has a gap: its snapshot must be read again."""


class Follower(Generic[FeedT]):
    """Follows one worker.

    Args:
        source: what to follow.
        feed: applies the events.
        bounds: limits.

    Attributes:
        connected: the connection is up.
        current: connected, and all earlier batches are applied: its pages count.
        why: why they do not count; empty if they do.
        lag_s: time from the publication of the newest batch to its application.
        snapshots: snapshots that were read.
        snapshot_at: time of the last one, on the loop's clock; 0 = none.
        resyncs: times that everything was read again because of a gap or an audit.
        has_snapshots: it follows a node; False once that has answered that it has none.
        sampled: some of the pages that the events of a node named.
        faults: faults of its publisher, by cause.
    """

    def __init__(
        self,
        source: Source,
        feed: FeedT,
        bounds: SourceBounds,
    ) -> None:
        self.source = source
        self.connected = False
        self.current = False
        self.why = "not connected yet"
        self.lag_s = 0.0
        self.snapshots = 0
        self.snapshot_at = 0.0
        self.resyncs = 0
        self.sequence = Sequence()
        self.feed = feed
        self.sampled = SampledPages(feed.workspace)
        self.faults = Faults(_log, f"events of {source.worker}")
        self._bounds = bounds
        self._turn_ends = 0.0
        self._is_asked = source.is_node and source.replay_endpoint is not None
        self.has_snapshots = self._is_asked
        self._counts_from = 0  # number of the batch after those that tell whether all is right
        self._drifted = False
        self._applying = False
        self._applied = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        pause_s = _AGAIN_S_MIN
        listener = EventListener(self.source.endpoint) if self.source.bind else None
        try:
            while True:
                try:
                    await self._follow(listener)
                except OSError as error:
                    self._broke("connection", _said(error))
                except zmtp.PeerError as error:
                    self._broke(error.cause, str(error))
                finally:
                    was_current = self.current
                    self._is_current(now=False)
                    self.connected = False
                pause_s = _AGAIN_S_MIN if was_current else min(2 * pause_s, _AGAIN_S_MAX)
                await asyncio.sleep(pause_s)
        finally:
            if listener is not None:
                listener.close()

    def _broke(self, cause: str, what: str) -> None:
        self.why = f"{self.source.endpoint}: {what}"
        if self.source.peer is not None and cause in ("connection", "refused"):
            self.faults.count(cause)  # the session with that node logs it, once
        else:
            self.faults.note(cause, self.why)

    def _is_current(self, *, now: bool) -> None:
        self.current = now
        self.feed.live(counts=now)
        if now:
            self.why = ""

    async def reached(self, number: int) -> None:
        """Wait, without a limit, until all batches before this one are applied."""
        while self._applying or self.sequence.next < number:
            self._applied.clear()
            await self._applied.wait()

    @property
    def may_lack_pages(self) -> bool:
        """Whether pages were left out since its snapshot, because something was full."""
        return self.feed.left_out > 0

    def drifted(self) -> None:
        """An audit found that the known state of a node is wrong: read everything again."""
        self._drifted = True
        self._is_current(now=False)
        self.why = "an audit found wrong entries: its snapshot is read again"

    async def _follow(self, listener: EventListener | None) -> None:
        """Follow over one connection until it breaks.

        Raises:
            OSError: it broke, or the publisher does not answer.
            PeerError: the peer is not a publisher.
        """
        source = self.source
        if listener is not None:
            await listener.start(CONNECT_S)
            channel = await listener.accept(CONNECT_S)
        else:
            channel = await EventConnection.open(
                source.endpoint, zmtp.SUB, source.credentials, CONNECT_S
            )
        try:
            await channel.send([b"\x01"])
            self.connected = True
            self.why = "its earlier batches are being read"
            await self._catch_up()
            if source.replay_endpoint is None and self.sequence.known:
                self._counts_from = self.sequence.next + 1
                self.why = "it may have restarted, and has no replay: its next batch will tell"
            await self._listen(channel)
        finally:
            channel.close()

    async def _listen(self, channel: EventConnection) -> None:
        loop = asyncio.get_running_loop()
        heard_at, missed = loop.time(), 0
        wait_s = min(_BEAT_S, self._bounds.verify_s)
        while True:
            if self._drifted:
                await self._resync()
            elif not self.current and self.sequence.next >= self._counts_from:
                self._is_current(now=True)
            try:
                async with asyncio.timeout(wait_s):
                    messages = await channel.receive()
            except TimeoutError:
                messages = []
                missed += channel.beats
                if missed > _BEATS_MISSED_MAX * _BEAT_S / wait_s:
                    raise OSError("it does not answer") from None
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
            elif loop.time() - heard_at >= self._bounds.verify_s:
                await self._verify()
                heard_at = loop.time()

    async def _verify(self) -> None:
        """Compare the last batch, and get those that were missed.

        Raises:
            OSError: batches that a snapshot needs do not come, or the publisher does not answer.
            PeerError: the peer is not a publisher.
        """
        try:
            await self._replay()
        except _ResyncNeededError:
            await self._resync()
        if self.has_snapshots and self.sequence.next < self._counts_from:
            self.sequence.forget()  # the publisher dropped them: another snapshot has them
            raise OSError("batches that its snapshot needs do not come")

    async def _live(self, message: zmtp.Message) -> None:
        """Apply a live message, after the missed ones.

        Raises:
            OSError: replay or snapshot do not fit the connection's messages; or it broke.
            PeerError: the peer is not a publisher.
        """
        if len(message) != 3 or len(message[1]) != 8 or len(message[0]) > TOPIC_BYTES_MAX:
            self.faults.note("frames", "a message that is not a batch")
            return
        topic, number_frame, payload = message
        number = int.from_bytes(number_frame, "big")
        if self.sequence.met_live(topic, number):
            self._restarted()
        try:
            if self.sequence.needs_replay(number):
                if self.has_snapshots and not self.sequence.known:
                    raise _ResyncNeededError
                await self._replay()
            if self.sequence.is_of(topic):
                await self._take(number, payload)
        except _ResyncNeededError:
            await self._resync()
        if not self.sequence.is_of(topic):
            raise OSError("it has restarted")
        if self.has_snapshots and self.sequence.next <= number:
            raise OSError("its snapshot lacks what it published before")

    async def _catch_up(self) -> None:
        """Get everything that was published before: from a snapshot if nothing is known.

        Raises:
            OSError: that fails again and again, or the publisher does not answer.
            PeerError: the peer is not a publisher.
        """
        for _ in range(_RESYNCS_MAX):
            try:
                if self.has_snapshots and not self.sequence.known:
                    await self._read_snapshot()
                await self._replay()
            except _ResyncNeededError:
                self.sequence.forget()
            else:
                return
        raise OSError("its batches have gaps again and again")

    async def _resync(self) -> None:
        """Read everything again; raises the same as :meth:`_catch_up`."""
        self._is_current(now=False)
        self._drifted = False
        self.why = self.why or "its snapshot is read again, after a gap"
        self.resyncs += 1
        self._clear()
        self.sequence.forget()
        await self._catch_up()

    async def _read_snapshot(self) -> None:
        """Read all pages of the node, replacing its known state.

        Raises:
            OSError: it does not answer as it should, or the connection broke.
            PeerError: the peer is not a publisher.
        """
        endpoint = self.source.replay_endpoint
        assert endpoint is not None
        try:
            async with aclosing(read_snapshot(endpoint, self.source.credentials)) as parts:
                async for part in parts:
                    match part:
                        case SnapshotHead(boot, first):
                            self._clear()
                            self.sequence.begin(boot.encode(), first)
                        case SnapshotPages(space, shard, medium, keys):
                            self.feed.add(space, shard, medium, keys)
                        case SnapshotEnd(sequence_end):
                            self._counts_from = sequence_end
                    await self._let_others()
        except SnapshotError as error:
            self.sequence.forget()
            if error.cause != "unsupported":
                raise OSError(f"its snapshot: {error}") from error
            self.has_snapshots = False  # an older node
        except BaseException:
            self.sequence.forget()
            raise
        else:
            self.snapshots += 1
            self.snapshot_at = asyncio.get_running_loop().time()

    async def _take(self, number: int, payload: bytes) -> bool:
        """Apply a batch according to the sequence; returns True if the publisher has restarted."""
        verdict = self.sequence.take(number, payload)
        if verdict is BatchVerdict.SKIP:
            return False
        if verdict is not BatchVerdict.APPLY:
            if self.has_snapshots:
                raise _ResyncNeededError
            self._clear()
        if verdict is BatchVerdict.RESTARTED:
            return True
        self._applying = True
        try:
            for _ in self.feed.apply(payload):
                await self._let_others()
            if self.has_snapshots:
                self.sampled.note(payload)
        except UnreadableError as error:
            # It may contain removals: everything known of the worker is invalid.
            self.faults.note("batch", f"batch {number} cannot be read: {error}")
            self._clear()
            if self.has_snapshots:
                raise _ResyncNeededError from error
        else:
            lag_s = max(0.0, wall_clock() - self.feed.published)
            self.lag_s = lag_s if lag_s < float("inf") else 0.0  # a strange clock is no lag
        finally:
            self._applying = False
            self._applied.set()
        return False

    def _clear(self) -> None:
        """Drop all index entries of the worker."""
        self._counts_from = 0
        self.feed.clear()

    def _restarted(self) -> None:
        """Another life of the publisher, perhaps of another version."""
        self._clear()
        self.has_snapshots = self._is_asked

    async def _let_others(self) -> None:
        """Yield to the event loop if this turn was long; wait while the feed is full."""
        loop = asyncio.get_running_loop()
        while self.feed.full:  # noqa: ASYNC110 -- feeds are pure
            await asyncio.sleep(_FULL_S)
        now = loop.time()
        if now >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = loop.time() + _TURN_S

    async def _replay(self) -> None:
        """Request the last batch and everything after it; after a restart from the beginning.

        Raises:
            _ResyncNeededError: the snapshot must be read instead.
            OSError: a node does not answer as it should.
        """
        endpoint = self.source.replay_endpoint
        if endpoint is None:
            return
        try:
            async with asyncio.timeout(_REPLAY_S_MAX):
                if await self._replay_once(endpoint):
                    if self.has_snapshots:  # not all of its batches need be left
                        raise _ResyncNeededError
                    await self._replay_once(endpoint)
        except TimeoutError:
            self._not_replayed("replay", "it did not end in time")
        except OSError as error:
            self._not_replayed("connection", f"replay: {_said(error)}")
        except zmtp.PeerError as error:
            self._not_replayed(error.cause, f"replay: {error}")
        except NoReplayError as error:
            self._not_replayed(error.cause, str(error))

    def _not_replayed(self, cause: str, what: str) -> None:
        self.faults.note(cause, what)
        self._clear()
        self.sequence.forget()
        if self.has_snapshots:
            raise OSError(what)

    async def _replay_once(self, endpoint: str) -> bool:
        """Run one replay; returns True if it shows a restart, so that a full replay is needed.

        Raises:
            TimeoutError: no message in time.
            OSError: the connection broke.
            PeerError: the peer is not a publisher.
            NoReplayError: it is not a valid replay.
        """
        found = False
        replay = read_replay(
            endpoint, self.source.credentials, self.sequence.replay_from, self._bounds.replay_s
        )
        async with aclosing(replay) as messages:
            async for topic, number, payload in messages:
                if self.sequence.met(topic):
                    self._restarted()
                    return True
                if number is not None:
                    found = True
                    if await self._take(number, payload):
                        return True
        if not found and self.sequence.replay_was_empty():
            self._clear()
        return False


def _said(error: OSError) -> str:
    return str(error) or type(error).__name__


class Followers:
    """One follower for each source.

    Args:
        pages: the table to update.
        bounds: limits of each source.
    """

    def __init__(self, pages: PageFeeds, bounds: SourceBounds) -> None:
        self._pages = pages
        self._bounds = bounds
        self._followers: dict[str, Follower[WorkerFeed]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def __iter__(self) -> Iterator[Follower[WorkerFeed]]:
        return iter(self._followers.values())

    def follow(self, source: Source) -> None:
        """Follow a source, if it is not followed yet.

        Entries of the same worker from another source are dropped.
        """
        known = self._followers.get(source.worker)
        if known is not None and known.source == source:
            return
        self.drop(source.worker)
        feed = self._pages.feed(source, self._bounds.foreign_blocks)
        self._followers[source.worker] = Follower(source, feed, self._bounds)
        self._wake.set()

    def drop(self, worker: str) -> None:
        """Stop following a worker and drop its entries, if it is followed."""
        task = self._tasks.pop(worker, None)
        if task is not None:
            task.cancel()
        follower = self._followers.pop(worker, None)
        if follower is not None:
            follower.feed.end()

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                for worker, follower in self._followers.items():
                    if worker not in self._tasks:
                        self._tasks[worker] = tasks.create_task(follower.run(), name=worker)
                await self._wake.wait()
