"""Goal: whatever a node answers and publishes, the index goes on, and others are followed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from kvstore.events.questions import AUDIT, END, HEAD, PAGES, SAMPLE, SNAPSHOT, TIERS
from kvstore.index import sampled
from kvstore.index.control import Source
from kvstore.index.followers import Follower
from tests.index.publishers import KEYS, SPACE, FakePublisher, Following, following
from tests.loops import eventually, in_loop

PACK = msgspec.msgpack.encode
TOPIC = b"kvstore@n@aa"
SHARD = "cd" * 32
Answer = Callable[[list[bytes]], Sequence[tuple[bytes, object]]]


def held(keys: Sequence[object], **fields: object) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": list(keys), "medium": "CPU", "space": SPACE}
    return {**event, "shard_digest": SHARD, "token_ids": [], "block_size": 4,
            "parent_block_hash": None, **fields}  # fmt: skip


def many(count: int, first: int = 0) -> list[bytes]:
    return [(first + number).to_bytes(32, "little") for number in range(count)]


class HostileNode(FakePublisher):
    """A node whose answers the test decides about.

    Attributes:
        answers: what it answers to each kind of question; nothing to others.
    """

    def __init__(self, context: zmq.asyncio.Context) -> None:
        super().__init__(context, TOPIC)
        self.answers: dict[bytes, Answer] = {SNAPSHOT: partial(self.has, ())}

    def has(
        self, events: Sequence[dict[str, Any]], frames: list[bytes]
    ) -> list[tuple[bytes, object]]:
        """An answer of which these are the pages, in one message."""
        pages = sum(len(event["block_hashes"]) for event in events)
        head = (HEAD, {"boot": "aa", "sequence_first": len(self.kept)})
        told_of = (PAGES, [1.0, list(events), None])
        return [head, told_of, (END, {"sequence_end": len(self.kept), "pages": pages})]

    def gives(self, kind: bytes, *events: dict[str, Any]) -> None:
        self.answers[kind] = partial(self.has, events)

    async def answer(self) -> None:
        while True:
            client, _, first, *frames = await self._router.recv_multipart()
            if first != b"ask":
                await self._replay(client, int.from_bytes(first, "big"))
            elif frames[0] in self.answers:
                for word, content in self.answers[frames[0]](frames):
                    await self._router.send_multipart([client, b"", TOPIC, word, PACK(content)])

    async def _replay(self, client: bytes, first: int) -> None:
        for number, payload in sorted(self.kept.items()):
            if number >= first:
                frames = [client, b"", TOPIC, number.to_bytes(8, "big"), payload]
                await self._router.send_multipart(frames)
        await self._router.send_multipart([client, b"", TOPIC, b"\xff" * 8, b""])


@asynccontextmanager
async def followed() -> AsyncIterator[tuple[Following, HostileNode]]:
    async with following() as it:
        node = HostileNode(it.context)
        answering = asyncio.create_task(node.answer())
        try:
            source = Source(
                worker="node/n", domain="node/n", endpoint=node.endpoint,
                replay_endpoint=node.replay_endpoint, is_node=True,
            )  # fmt: skip
            it.index.follow(source)
            yield it, node
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
            node.close()


def follower(it: Following) -> Follower:
    [found] = it.index._service._followers
    return found


@pytest.mark.parametrize(
    "hashes",
    [b"\x91\xc5\x00\x20" + bytes(32), b"\xdc\x00\x01\xc6\x00\x00\x00\x20" + bytes(32), b"\x90"],
    ids=["bin 16", "bin 32", "none"],
)
@in_loop
async def test_keys_in_any_form_do_not_end_who_remembers_some_for_audits(
    monkeypatch: pytest.MonkeyPatch, hashes: bytes
) -> None:
    monkeypatch.setattr(sampled, "EVERY", 1)
    async with followed() as (it, node):
        await eventually(lambda: it.node.current)
        await node.send(0, held([]) | {"block_hashes": msgspec.Raw(hashes)})
        await eventually(lambda: it.node.batches == 1)
        node.gives(SAMPLE)
        await it.index._service._auditor.audit(follower(it))
        await node.send(1, held([bytes(key) for key in KEYS[:3]]))
        await eventually(lambda: it.prefix() == 3)
        assert not it.running.done()


@in_loop
async def test_a_sample_of_more_pages_than_asked_for_is_no_answer() -> None:
    async with followed() as (it, node):
        await eventually(lambda: it.node.current)
        node.gives(SAMPLE, held(many(5_000)))
        asked: list[int] = []

        def everything(frames: list[bytes]) -> list[tuple[bytes, object]]:
            asked.append(len(frames[-1]) // 32)
            return [
                (HEAD, {"boot": "aa", "sequence_first": 0}),
                (TIERS, {"media": ["CPU"], "tiers": b"\1" * asked[-1]}),
                (END, {"sequence_end": 0, "pages": 0}),
            ]

        node.answers[AUDIT] = everything
        await it.index._service._auditor.audit(follower(it))
        assert asked == [4_096]
        assert (it.node.missing, it.node.faults.get("drift", 0)) == (4_096, 1)
        node.gives(SAMPLE, *[held(many(4_000, 4_000 * n)) for n in range(30)])
        before = it.node.faults.get("audit", 0)
        await eventually(lambda: it.node.current)
        await it.index._service._auditor.audit(follower(it))
        assert it.node.faults["audit"] == before + 1


@in_loop
async def test_a_snapshot_with_more_keys_in_an_event_than_there_is_room_for_is_none() -> None:
    async with followed() as (it, node):
        node.gives(SNAPSHOT, held(many(65_537)))
        await eventually(lambda: it.node.faults.get("connection", 0) > 0)
        node.gives(SNAPSHOT, held([bytes(key) for key in KEYS[:3]]))
        await eventually(lambda: it.node.current)
        assert it.prefix() == 3
