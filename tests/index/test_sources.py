"""Goal: whatever one source of events sends, or does not send, costs what is known of it alone."""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.events import server as eventserver
from kvstore.events import zmtp
from kvstore.events.publisher import EventPublisher, FollowerAccess
from kvstore.index import channel, followers
from kvstore.index.channel import MESSAGE_BYTES_MAX, EventConnection
from kvstore.index.control import Source
from kvstore.index.payload import EVENTS_MAX
from kvstore.process.listeners import Listener
from tests.index.publishers import KEYS, SPACE, as_node, following, node, stored, with_fake
from tests.loops import WAIT_S, eventually, in_loop

WITH_NOBODY = 5
"""Tasks: the test, the publisher's replays, the index, its followers, its audits."""
UNREADABLE = {
    "no UTF-8 in a type": b"\x81\xa4type\xa2\xff\xfe",
    "no UTF-8 in a medium": msgspec.msgpack.encode(
        {"type": "BlockRemoved", "block_hashes": [], "medium": "xx"}
    ).replace(b"\xa2xx", b"\xa2\xff\xfe"),
    "nested without end": b"\x91" * 100_000,
    "a map that is cut off": b"\x8f",
    "a long space": msgspec.msgpack.encode(
        {"type": "BlockRemoved", "block_hashes": [], "space": "x" * 65}
    ),
    "keys that are none": msgspec.msgpack.encode(
        {"type": "BlockRemoved", "block_hashes": [5], "space": SPACE}
    ),
    "a shard beyond all": msgspec.msgpack.encode(
        {"type": "BlockRemoved", "block_hashes": [], "shard": 2**63}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNREADABLE)
@in_loop
async def test_an_event_that_cannot_be_read_costs_that_source_what_was_known_of_it(
    kind: str,
) -> None:
    async with with_fake() as (it, publisher):
        await publisher.send(0, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        await publisher.subscribed()
        assert it.prefix() == 2
        publisher.kept[1] = b"\x93\xcb" + bytes(8) + b"\x91" + UNREADABLE[kind] + b"\xc0"
        await publisher.send_raw([publisher.topic, (1).to_bytes(8, "big"), publisher.kept[1]])
        await eventually(lambda: it.prefix() == 0)
        assert it.node.faults == {"batch": 1}
        await publisher.send(2, stored(KEYS[:3]))
        await eventually(lambda: it.prefix() == 3, "it is followed on")


@in_loop
async def test_a_batch_of_too_many_events_is_not_taken_apart() -> None:
    async with with_fake() as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()
        many = [{"type": "x"}] * (EVENTS_MAX + 1)
        await publisher.send(0, *many)
        await eventually(lambda: it.node.faults == {"batch": 1})
        assert it.node.skipped == 0


@in_loop
async def test_a_topic_that_is_too_long_is_no_topic() -> None:
    async with with_fake() as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()
        for size in (followers.TOPIC_BYTES_MAX + 1, followers.TOPIC_BYTES_MAX):
            publisher.topic = b"t" * size
            await publisher.send(0, stored(KEYS[:2]))
        await eventually(lambda: it.prefix() == 2)
        assert it.node.faults == {"frames": 1}
        await eventually(lambda: it.node.batches == 1)


@in_loop
async def test_a_message_that_is_too_long_ends_its_connection_which_is_made_again() -> None:
    async with with_fake() as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()
        await publisher.send_raw([publisher.topic, bytes(8), bytes(MESSAGE_BYTES_MAX)])
        await eventually(lambda: it.faults["too_long"] == 1)
        await publisher.subscribed()
        await publisher.send(0, stored(KEYS[:2]))
        await eventually(lambda: it.prefix() == 2)


@in_loop
async def test_a_failed_assertion_of_ours_is_no_fault_of_a_source() -> None:
    async with with_fake() as (it, publisher):
        await it.follow(publisher.endpoint, None)
        await publisher.subscribed()

        def broken(*_: object) -> None:
            raise AssertionError("a bug")

        it.index._service._pages.flush = broken  # type: ignore[method-assign]
        await publisher.send(0, stored(KEYS[:2]))
        await eventually(lambda: it.running.done())
        assert isinstance(it.running.exception(), BaseExceptionGroup)
        it.expected = True


@in_loop
async def test_a_replay_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "_REPLAY_S_MAX", 0.1)
    async with with_fake() as (it, publisher):
        publisher.endless = True
        it.index.follow(node(publisher.endpoint, publisher.replay_endpoint))
        await eventually(lambda: it.faults["replay"] >= 1)
        await eventually(lambda: it.node.batches > 10)
        publisher.endless = False
        await eventually(lambda: it.node.current)


@in_loop
async def test_a_replay_whose_numbers_do_not_grow_is_none() -> None:
    async with with_fake() as (it, publisher):
        publisher.stuck = True
        await publisher.send(3, stored(KEYS[:2]), live=False)
        await it.follow(publisher.endpoint, publisher.replay_endpoint)
        assert it.faults["replay"] >= 1
        assert it.prefix() == 0


@in_loop
async def test_a_publisher_that_gives_no_sign_of_life_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "_BEAT_S", 0.02)
    alive = asyncio.Event()
    alive.set()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = zmtp.ZmtpPeer(zmtp.PUB, zmtp.MessageLimits(1 << 20, 8), server=True)
        with contextlib.suppress(OSError):
            while True:
                writer.write(peer.outgoing())
                if not (data := await reader.read(1 << 16)):
                    break
                await alive.wait()
                peer.feed(data)
        writer.close()

    server = await asyncio.start_unix_server(speak, tmp_path / "s")
    async with following() as it:
        await it.follow(f"ipc://{tmp_path}/s", None)
        alive.clear()
        await eventually(lambda: not it.node.current, "seen to be stopped")
        assert it.faults["connection"] == 1
        alive.set()
        await eventually(lambda: it.node.current, "and back")
    server.close()


@pytest.mark.parametrize("token", ["the token of this node", "another token, as long", None])
@in_loop
async def test_a_node_over_tcp_is_followed_with_its_token_only(token: str | None) -> None:
    where = "tcp://127.0.0.1:*"
    access = FollowerAccess(b"the token of this node")
    async with following() as it:
        with EventPublisher(where, where, topic=b"kvstore@n@aa", access=access) as publisher:
            publisher.publish([stored(KEYS[:4])])
            ends = (publisher.bound_endpoint, publisher.bound_replay_endpoint)
            it.index.follow(node(*ends, token=token or ""))
            if token == "the token of this node":
                await eventually(lambda: it.prefix() == 4)
            else:
                cause = "refused" if token else "mechanism"
                await eventually(lambda: it.faults[cause] >= 2)
                assert not it.node.connected
                assert it.prefix() == 0


SAYING: dict[str, Callable[[EventConnection], Coroutine[Any, Any, object]]] = {
    "send": lambda channel: channel.send([b"\x01"]),
    "ping": lambda channel: channel.ping(),
    "receive a PING": lambda channel: channel.receive(),
}


@pytest.mark.parametrize("then", SAYING)
@in_loop
async def test_what_is_said_on_a_connection_that_was_reset_meanwhile_is_an_error_of_it(
    then: str,
) -> None:
    with EventPublisher("tcp://127.0.0.1:*", None, topic=b"kvstore@n@aa") as publisher:
        channel = await EventConnection.open(publisher.bound_endpoint, zmtp.SUB, "", 5.0)
    channel._reader.feed_data(zmtp.PING)
    channel._writer.transport.abort()  # as a reset does
    await channel._writer.wait_closed()
    with pytest.raises(ConnectionResetError):
        await SAYING[then](channel)


@in_loop
async def test_who_is_followed_no_longer_holds_nothing_any_more() -> None:
    async with with_fake() as (it, publisher):
        await eventually(lambda: len(asyncio.all_tasks()) == WITH_NOBODY)
        for _ in range(20):
            await it.follow(publisher.endpoint, publisher.replay_endpoint)
            await publisher.subscribed()
            it.index.unfollow("node/n")
        await eventually(lambda: len(asyncio.all_tasks()) == WITH_NOBODY)
        assert it.index.present().report.workers == []
        assert len(it.table.holders().holders) == 0


class GatedListener(Listener):
    """A listener whose name server, or file system, does not answer before the test says so.

    Attributes:
        begun: how many were begun.
        made: those that are.
    """

    gate: threading.Event
    begun: int
    made: list[Listener]

    def __init__(self, *args: Any) -> None:
        type(self).begun += 1
        assert self.gate.wait(WAIT_S), "nobody else had a turn"
        super().__init__(*args)
        self.made.append(self)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> type[GatedListener]:
    class Gated(GatedListener):
        gate, begun, made = threading.Event(), 0, []

    monkeypatch.setattr(channel, "Listener", Gated)
    return Gated


def bound_at(path: Path) -> Source:
    return Source(worker="engine/e", domain="d", endpoint=f"ipc://{path}", bind=True)


@in_loop
async def test_an_endpoint_that_cannot_be_bound_for_long_delays_no_other_source(
    gated: type[GatedListener], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "CONNECT_S", 0.05)
    async with with_fake() as (it, publisher):
        it.index.follow(bound_at(tmp_path / "events"))
        await eventually(lambda: gated.begun)
        await publisher.send(0, stored(KEYS[:2]), live=False)
        it.index.follow(node(publisher.endpoint, publisher.replay_endpoint))
        await eventually(lambda: it.prefix() == 2)
        await eventually(lambda: it.worker("engine/e").faults.get("connection", 0) >= 2)
        assert "cannot listen" in it.worker("engine/e").why
        assert gated.begun == 1, "one thread, however long it takes"
        gated.gate.set()
        await eventually((tmp_path / "events").exists)


@in_loop
async def test_an_endpoint_that_is_bound_too_late_is_closed(
    gated: type[GatedListener], tmp_path: Path
) -> None:
    async with following() as it:
        it.index.follow(bound_at(tmp_path / "events"))
        await eventually(lambda: gated.begun)
        it.index.unfollow("engine/e")
        await asyncio.sleep(0)
        gated.gate.set()
        await eventually(lambda: gated.made and gated.made[0].socket.fileno() < 0)
        assert not (tmp_path / "events").exists()


@in_loop
async def test_listening_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tries = asyncio.start_server, 0

    async def first_fails(*args: Any, **options: Any) -> asyncio.Server:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "start_server", first_fails)
    async with following() as it:
        it.index.follow(bound_at(tmp_path / "events"))
        await eventually(lambda: tries == 2)
        assert it.worker("engine/e").faults == {"connection": 1}
        reader, writer = await asyncio.open_unix_connection(tmp_path / "events")
        assert await reader.readexactly(1) == b"\xff", "somebody shakes hands"
        writer.transport.abort()


@in_loop
async def test_a_socket_that_cannot_be_removed_ends_no_other_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove, path = Path.unlink, tmp_path / "events"

    def read_only(self: Path, **options: bool) -> None:
        if self == path:
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        remove(self, **options)

    async with following() as it:
        it.index.follow(bound_at(path))
        await eventually(path.exists)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", read_only)
            it.index.unfollow("engine/e")
            await eventually(lambda: "stays behind" in caplog.text or it.running.done())
        assert not it.running.done()


@in_loop
async def test_an_older_node_that_is_upgraded_is_asked_for_its_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with following() as it:
        with monkeypatch.context() as older:
            older.setattr(eventserver, "ASK", b"an older node does not know the word")
            first = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic=b"kvstore@n@aa")
            ends = (first.bound_endpoint, first.bound_replay_endpoint)
            try:
                first.publish([stored(KEYS[:5])])
                it.index.follow(msgspec.structs.replace(node(*ends), is_node=True))
                await eventually(lambda: it.node.current)
                assert (it.prefix(), it.node.snapshots) == (5, 0)
            finally:
                await asyncio.to_thread(first.close)
        with as_node(EventPublisher(*ends, topic=b"kvstore@n@bb"), "bb") as second:
            second.publish([stored(KEYS[:3])])
            await eventually(lambda: it.node.snapshots == 1 and it.prefix() == 3)
