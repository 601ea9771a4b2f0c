"""Goal: a node whose answers and events contradict each other costs what is known of it alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from kvstore.events.publisher import END_OF_REPLAY
from kvstore.events.questions import AUDIT, END, HEAD, KEYS_MAX, PAGES, SAMPLE, SNAPSHOT, TIERS
from kvstore.index.control import Source
from kvstore.index.followers import Follower
from kvstore.index.sequence import Sequence
from kvstore.protocol.page import KEY_BYTES
from tests.index.publishers import (
    KEYS,
    SPACE,
    FakePublisher,
    Following,
    following,
    stored,
)
from tests.loops import eventually, in_loop

TOPIC = b"kvstore@n@aa"
SHARD = "cd" * 8
ENTRIES_MAX = 4096
"""Of the index that follows."""


class FakeNode(FakePublisher):
    """A node whose every answer the test decides about.

    Attributes:
        boot: boot id in its answers and replays.
        first: number of the first batch that its snapshot does not contain.
        end: number of the first batch that was not published when its snapshot ended.
        pages: payloads of its snapshot and samples, each with one list of keys.
        snapshots: snapshots that it was asked for.
    """

    def __init__(self, it: Following) -> None:
        super().__init__(it.context, TOPIC)
        self.boot = "aa"
        self.first = self.end = self.snapshots = 0
        self.pages: list[list[bytes]] = []

    async def answer(self) -> None:
        while True:
            client, _, *frames = await self._router.recv_multipart()
            topic = b"kvstore@n@" + self.boot.encode()
            if frames[0] != b"ask":
                first = int.from_bytes(frames[0], "big")
                parts = [(n.to_bytes(8, "big"), p) for n, p in sorted(self.kept.items())]
                parts = [one for one in parts if int.from_bytes(one[0], "big") >= first]
                parts.append((END_OF_REPLAY, b""))
            else:
                encode = msgspec.msgpack.encode
                parts = [(word, encode(told)) for word, told in self._told(frames)]
            for word, payload in parts:
                await self._router.send_multipart([client, b"", topic, word, payload])

    def _told(self, frames: list[bytes]) -> list[tuple[bytes, object]]:
        head = {"boot": self.boot, "sequence_first": self.first}
        count = sum(map(len, self.pages))
        pages: list[tuple[bytes, object]] = [
            (PAGES, [1.0, [_event(keys)], None]) for keys in self.pages
        ]
        match frames[1]:
            case kind if kind == AUDIT:
                tiers = bytes([1]) * (len(frames[4]) // KEY_BYTES)
                pages = [(TIERS, {"media": ["CPU", "STORAGE"], "tiers": tiers})]
            case kind if kind == SNAPSHOT:
                self.snapshots += 1
            case kind:
                assert kind == SAMPLE
        return [(HEAD, head), *pages, (END, {"sequence_end": self.end, "pages": count})]


def _event(hashes: object) -> dict[str, object]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": [],
        "block_size": 4, "medium": "CPU", "space": SPACE, "shard": 0, "shard_digest": SHARD,
    }  # fmt: skip


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "little") for number in range(count)]


@asynccontextmanager
async def with_node() -> AsyncIterator[tuple[Following, FakeNode]]:
    """An index that follows one node; it must still run at the end."""
    async with following() as it:
        node = FakeNode(it)
        answering = asyncio.create_task(node.answer())
        try:
            yield it, node
            assert not it.running.done(), it.running.exception()
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
            node.close()


def follow(it: Following, node: FakeNode, *, replay: bool = True) -> None:
    it.index.follow(
        Source(
            worker="node/n",
            domain="node/n",
            endpoint=node.endpoint,
            is_node=True,
            replay_endpoint=node.replay_endpoint if replay else None,
        )
    )


def follower(it: Following) -> Follower:
    [found] = it.index._service._followers
    return found


def knows(it: Following, pages: int) -> bool:
    return it.running.done() or it.prefix() == pages


async def audit(it: Following) -> None:
    await it.index._service._auditor.audit(follower(it))


@in_loop
async def test_a_snapshot_that_lacks_what_was_published_before_ends_the_connection_only() -> None:
    async with with_node() as (it, node):
        follow(it, node)
        await eventually(lambda: it.node.current)
        await node.subscribed()
        await node.send(10, stored(KEYS[:2]), keep=False)
        await eventually(lambda: it.running.done() or it.faults["connection"] == 1)
        assert it.prefix() == 0
        await eventually(lambda: it.node.current, "it is followed on")


@in_loop
async def test_no_batch_of_a_node_is_applied_to_what_its_next_start_told() -> None:
    async with with_node() as (it, node):
        node.pages = [keys(2)]
        node.first = node.end = 1
        await node.send(0, stored(KEYS[:2]), live=False)
        follow(it, node)
        await eventually(lambda: it.node.current)
        await node.subscribed()
        # The node has started again, and has published 5 batches, while its last ones arrive.
        node.boot, node.first, node.end = "bb", 5, 5
        node.kept.clear()
        await node.send(5, stored(KEYS[:4]), keep=False)
        await eventually(lambda: it.faults["connection"] == 1)
        await eventually(lambda: it.node.current)
        assert it.node.pages == {"CPU": 2}, "what its snapshot has"


@in_loop
async def test_a_node_that_has_started_again_is_read_from_its_snapshot() -> None:
    async with with_node() as (it, node):
        await node.send(0, stored(KEYS[:2]), live=False)
        follow(it, node)
        await eventually(lambda: it.node.current)
        # Only its newest batches are kept for replay.
        node.boot, node.first, node.end, node.pages = "bb", 7, 8, [keys(3)]
        node.kept = {7: msgspec.msgpack.encode([1.0, [], None])}
        await eventually(lambda: it.node.pages == {"CPU": 3}, "its earlier pages are known")
        assert node.snapshots == 2


@in_loop
async def test_batches_that_were_dropped_at_the_end_of_a_snapshot_are_not_waited_for() -> None:
    async with with_node() as (it, node):
        node.end, node.pages = 3, [keys(3)]  # 0 to 2 were numbered, and dropped
        follow(it, node)
        await eventually(lambda: node.snapshots == 1)
        await eventually(lambda: it.faults["connection"] == 1)
        node.first = 3
        await eventually(lambda: it.node.current, "the next snapshot has them")
        assert it.node.pages == {"CPU": 3}


@in_loop
async def test_a_snapshot_with_too_many_keys_in_one_event_is_none() -> None:
    async with with_node() as (it, node):
        node.pages = [keys(70_000)]
        follow(it, node)
        await eventually(lambda: it.running.done() or it.faults["connection"] >= 1)
        assert "too many" in it.node.why


@pytest.mark.parametrize(
    "hashes", [msgspec.Raw(b"\x91\xc5\x00\x20" + bytes(32)), []], ids=["long form", "none"]
)
@in_loop
async def test_keys_of_events_that_cannot_be_asked_about_are_left_out_of_audits(
    monkeypatch: pytest.MonkeyPatch, hashes: object
) -> None:
    monkeypatch.setattr("kvstore.index.sampled.EVERY", 1)
    async with with_node() as (it, node):
        follow(it, node)
        await eventually(lambda: it.node.current)
        await node.subscribed()
        node.end = 1
        await node.send(0, _event(hashes))
        await eventually(lambda: it.running.done() or it.node.batches == 1)
        await audit(it)
        assert it.node.audited == 0
        await node.send(1, _event(keys(2)))
        await eventually(lambda: it.node.batches == 2)


@in_loop
async def test_a_sample_with_more_keys_than_may_be_asked_about_is_compared_in_part() -> None:
    async with with_node() as (it, node):
        follow(it, node)
        await eventually(lambda: it.node.current)
        node.pages = [keys(KEYS_MAX + 1)]
        await audit(it)
        assert it.node.missing == KEYS_MAX
        await eventually(lambda: it.node.current and it.node.resyncs == 1)
        assert it.node.pages == {"CPU": ENTRIES_MAX}


@in_loop
async def test_pages_that_have_no_room_are_not_read_again_and_again() -> None:
    async with with_node() as (it, node):
        node.pages = [keys(ENTRIES_MAX + 1)]
        follow(it, node)
        await eventually(lambda: it.node.current)
        await audit(it)
        assert (it.node.missing, it.faults["drift"]) == (1, 1)
        assert it.node.current
        assert not follower(it)._drifted


@in_loop
async def test_a_node_without_replays_is_not_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.index.audit.AUDIT_S", 0.01)
    async with with_node() as (it, node):
        follow(it, node, replay=False)
        await eventually(lambda: it.node.current)
        await node.subscribed()
        for number in range(5):
            await node.send(number, stored(KEYS[: number + 1]))
            await eventually(partial(knows, it, number + 1))
            await asyncio.wait([it.running], timeout=0.03)


@in_loop
async def test_what_a_batch_tells_is_reached_when_all_of_it_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.index.apply._WORK", 1)  # a step for each event
    async with with_node() as (it, node):
        follow(it, node)
        await eventually(lambda: it.node.current)
        await node.subscribed()
        one, gate, at_gate = follower(it), asyncio.Event(), asyncio.Event()

        async def held() -> None:
            if one.sequence.next == 1:
                at_gate.set()
                await gate.wait()

        one._let_others = held  # type: ignore[method-assign]
        await node.send(0, stored(KEYS[:2]))
        await at_gate.wait()
        reached = asyncio.create_task(one.reached(1))
        assert not (await asyncio.wait([reached], timeout=0.01))[0]
        gate.set()
        await reached


def test_a_start_that_a_replay_or_a_snapshot_has_shown_is_no_other_one_live() -> None:
    sequence = Sequence()
    assert not sequence.met_live(b"kv@n@a", 1000)
    sequence.take(1000, b"")
    assert sequence.met(b"kv@n@b")
    sequence.take(0, b"")
    assert not sequence.met_live(b"kv@n@b", 1)
    sequence.take(1, b"")
    sequence.begin(b"c", 1)
    assert not sequence.met_live(b"kv@n@c", 1)
    assert sequence.restarts == 1
    assert sequence.met_live(b"kv@n@c", 1), "numbers increase"
