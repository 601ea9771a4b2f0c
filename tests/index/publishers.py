"""Publishers whose every message the test decides about, and followers of them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from kvstore.events.publisher import (
    END_OF_REPLAY,
    EventPublisher,
    RemovedEvent,
    StoredEvent,
)
from kvstore.events.questions import END, HEAD, OpenQuestion
from kvstore.index.control import FollowedWorker, IndexSettings, Source, SourceBounds
from kvstore.index.runs import PartNeed, PrefixNeeds
from kvstore.index.scope import key_chains, scope_seed
from kvstore.index.table import IndexReader
from kvstore.protocol.page import PrefixKeys, page_keys
from tests.local_index import LocalIndex
from tests.loops import eventually

SPACE = "ab" * 32
KEYS = page_keys(np.arange(64), 4)


def stored(keys: PrefixKeys, medium: str = "CPU") -> StoredEvent:
    return StoredEvent(
        block_hashes=[bytes(key) for key in keys],
        parent_block_hash=keys.parent or None,
        token_ids=[],
        block_size=4,
        medium=medium,
        space=SPACE,
        shard=0,
    )


def removed(keys: PrefixKeys, medium: str = "CPU") -> RemovedEvent:
    hashes = [bytes(key) for key in keys]
    return RemovedEvent(block_hashes=hashes, medium=medium, space=SPACE, shard=0)


class FakePublisher:
    """PUB and ROUTER whose every message the test decides about.

    Attributes:
        kept: what replay gives: number → payload.
    """

    def __init__(self, context: zmq.asyncio.Context, topic: bytes = b"kvstore@n@aa") -> None:
        self.topic = topic
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.silent = False
        self.endless = False
        self.stuck = False
        self._context = context
        self._pub = self._bound("tcp://127.0.0.1:*")
        self._router = context.socket(zmq.ROUTER)
        self._router.bind("tcp://127.0.0.1:*")
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT)

    def _bound(self, endpoint: str) -> zmq.asyncio.Socket:
        pub = self._context.socket(zmq.XPUB)  # a PUB that hears of subscriptions
        pub.set(zmq.XPUB_VERBOSE, 1)
        try:
            pub.bind(endpoint)
        except zmq.ZMQError:
            pub.close(linger=0)
            raise
        return pub

    async def reconnected(self) -> None:
        """Break the connections, and wait for the next subscription."""
        self._pub.close(linger=0)

        def bound() -> bool:
            with contextlib.suppress(zmq.ZMQError):  # the port is not free yet
                self._pub = self._bound(self.endpoint)
            return not self._pub.closed

        await eventually(bound)
        await self.subscribed()

    async def answer(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if self.silent:
                continue
            number = 0
            while self.endless:
                payload = msgspec.msgpack.encode([1.0, [], None])
                frames = [client, b"", self.topic, number.to_bytes(8, "big"), payload]
                await self._router.send_multipart(frames)
                await asyncio.sleep(0)
                number += 1
            for number, payload in sorted(self.kept.items()) * (1 + self.stuck):
                if number >= self.asked[-1]:
                    frames = [client, b"", self.topic, number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", self.topic, END_OF_REPLAY, b""])

    async def subscribed(self) -> None:
        """From here on nothing that is sent live is lost."""
        while await self._pub.recv() != b"\x01":
            pass  # somebody left before

    async def send(
        self, number: int, *events: object, live: bool = True, keep: bool = True
    ) -> None:
        payload = msgspec.msgpack.encode([1.0, list(events), None])
        if keep:
            self.kept[number] = payload
        if live:
            await self.send_raw([self.topic, number.to_bytes(8, "big"), payload])

    async def send_raw(self, frames: list[bytes]) -> None:
        await self._pub.send_multipart(frames)

    def close(self) -> None:
        self._pub.close(linger=0)
        self._router.close(linger=0)


def as_node(publisher: EventPublisher, boot: str) -> EventPublisher:
    """Let a publisher answer as a node that has published everything that it has."""

    def answer(question: OpenQuestion) -> None:
        question.put(HEAD, {"boot": boot, "sequence_first": 0})
        question.put(END, {"sequence_end": 0, "pages": 0})

    publisher.answer_with(answer)
    return publisher


def node(
    endpoint: str, replay_endpoint: str | None = None, *, name: str = "n", token: str = ""
) -> Source:
    """A source of prefix keys; the publishers here answer no questions."""
    return Source(
        worker=f"node/{name}", domain=f"node/{name}", endpoint=endpoint,
        replay_endpoint=replay_endpoint, token=token,
    )  # fmt: skip


def usable(table: IndexReader, worker: str, chains: np.ndarray) -> int:
    """Leading blocks of which the worker has every part that it has of any."""
    directory = table.holders()
    parts: dict[tuple[str, int], list] = {}
    for holder in directory.by_worker.get(worker, ()):
        parts.setdefault((holder.shard, holder.group), []).append(holder)
    needs = PrefixNeeds([[PartNeed(holders) for holders in parts.values()]])
    return int(table.match([chains], needs)[0, 0])


class Following:
    """An index in this loop, and what it knows."""

    def __init__(self) -> None:
        bounds = SourceBounds(replay_s=10.0, verify_s=0.05, foreign_blocks=200_000)
        self.index = LocalIndex(IndexSettings(4096, bounds))
        self.context = zmq.asyncio.Context()
        self.running: asyncio.Task[None]
        self.expected = False  # that it ends by itself

    @property
    def table(self) -> IndexReader:
        table = self.index.present().table
        assert table is not None
        return table

    def worker(self, name: str = "node/n") -> FollowedWorker:
        [found] = [one for one in self.index.present().report.workers if one.worker == name]
        return found

    @property
    def node(self) -> FollowedWorker:
        return self.worker()

    @property
    def faults(self) -> Counter[str]:
        return Counter(self.node.faults)

    def malformed(self) -> int:
        """Faults of what was sent, not of the connection."""
        return sum(n for cause, n in self.node.faults.items() if cause != "connection")

    def prefix(self, keys: PrefixKeys = KEYS, worker: str = "node/n", domain: str = SPACE) -> int:
        seed = scope_seed(self.table.secret, "keys", domain)
        return usable(self.table, worker, key_chains(keys.packed, seed))

    async def follow(self, endpoint: str | None, replay_endpoint: str | None) -> None:
        assert endpoint is not None
        self.index.follow(node(endpoint, replay_endpoint))
        await eventually(lambda: self.node.current, "connected")


@asynccontextmanager
async def following() -> AsyncIterator[Following]:
    it = Following()
    async with asyncio.timeout(30):
        it.running = asyncio.create_task(it.index.run())
        try:
            yield it
        finally:
            it.running.cancel()
            await asyncio.wait([it.running])
            it.context.destroy(linger=0)
            assert it.running.cancelled() or it.expected, it.running.exception()


@asynccontextmanager
async def with_fake(
    topic: bytes = b"kvstore@n@aa",
) -> AsyncIterator[tuple[Following, FakePublisher]]:
    async with following() as it:
        publisher = FakePublisher(it.context, topic)
        answering = asyncio.create_task(publisher.answer())
        try:
            yield it, publisher
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
            publisher.close()
