"""Goal: a node that follows another one gets its events; one that does not read stalls nobody."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvstore.cluster import serving
from kvstore.cluster.serving import EventTunnels
from kvstore.config import EventsConfig, SocketConfig
from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY, EventPublisher
from kvstore.index.channel import EventConnection
from kvstore.index.credentials import PeerCredentials
from kvstore.process.tls import CertificateFiles
from kvstore.protocol import wire
from kvstore.protocol.counts import EventTunnelCounts
from kvstore.protocol.page import page_keys
from kvstore.server.publish import Publication
from tests.cluster.nodes import PeerNode, files, nodes, shard
from tests.loops import eventually, in_loop

KEYS = page_keys(np.arange(16 * 512), 16)
ONE = (shard(0),)
HELLO = wire.FollowEvents("c", "self", "s", replay=False)
STALL_S, STALLS_MAX = 10.0, 3
"""A busy machine may add so much, so often; a follower that does not read is there all the time."""


def credentials(show: CertificateFiles | None) -> PeerCredentials:
    return PeerCredentials("c", "self", "s", show)


async def opened(
    node: PeerNode, side: zmtp.Side = zmtp.SUB, show: CertificateFiles | None = None
) -> EventConnection:
    at = f"peer://{node.endpoint}"
    return await EventConnection.open(at, side, credentials(show), 5.0)


async def heard(channel: EventConnection, count: int = 1) -> list[zmtp.Message]:
    found: list[zmtp.Message] = []
    while len(found) < count:
        found += await channel.receive()
    return found


def following(node: PeerNode) -> list[str]:
    names: Any = node.tunnels.stats().following
    return names


@pytest.mark.parametrize("show", [None, files()], ids=["plain", "tls"])
@in_loop
async def test_live_batches_and_replays_come_through_the_peer_service(
    show: CertificateFiles | None,
) -> None:
    async with asyncio.timeout(30), nodes("a", certificates=show) as (a,):
        replay = await opened(a, zmtp.DEALER, show)
        live = await opened(a, zmtp.SUB, show)
        try:
            await live.send([b"\x01"])
            await live.ping()
            assert await live.receive() == []
            await eventually(lambda: following(a) == ["self", "self"])
            a.store(KEYS[:3], *ONE)
            [(topic, number, payload)] = await heard(live)
            assert topic == f"kvstore@a@{a.boot}".encode()
            await replay.send([b"", bytes(8)])
            assert await heard(replay, 2) == [
                [b"", topic, number, payload], [b"", topic, END_OF_REPLAY, b""],
            ]  # fmt: skip
        finally:
            live.close()
            replay.close()
        await eventually(lambda: not following(a))
        await eventually(lambda: a.publisher.stats().followers == 0)


@in_loop
async def test_a_follower_that_does_not_read_loses_batches_and_stalls_nobody() -> None:
    async with asyncio.timeout(50), nodes("a", certificates=files()) as (a,):
        slow, quick = await opened(a, show=files()), await opened(a, show=files())
        try:
            for one in (slow, quick):
                await one.send([b"\x01"])
                await one.ping()
                assert await one.receive() == []
            lags, stores = list[float](), list[float]()
            watching = asyncio.create_task(_watch(lags))
            sent = 0
            while not a.publisher.stats().batches_lost:
                before = time.monotonic()
                a.store(KEYS, *ONE)
                sent += 1
                stores.append(time.monotonic() - before)
                await heard(quick)  # it keeps up, batch by batch
                assert sent < 5_000
            watching.cancel()
            for each in (lags, stores):
                assert max(each) < STALL_S
                assert sum(one > 1 for one in each) <= STALLS_MAX
            assert a.publisher.stats().batches_dropped == 0
            assert a.publisher.stats().batches_lost == 1
            # What waits for it has a bound: the publisher's, and that of sockets and pipes.
            assert sent * len(KEYS) * 32 < 32 << 20
        finally:
            slow.close()
            quick.close()
        await eventually(lambda: not following(a))


async def _watch(lags: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(0)
        lags.append(time.monotonic() - before)


@asynccontextmanager
async def tunnelled(
    hello: wire.FollowEvents = HELLO,
) -> AsyncIterator[tuple[EventTunnels, asyncio.StreamReader, asyncio.StreamWriter, list[Any]]]:
    """A tunnel to a publication that keeps what it is given, and the follower's end of it."""
    given: list[Any] = []

    class Kept:
        def serve(self, raw: socket.socket, *, replay: bool) -> None:
            given.append((raw, replay))

    tunnels = EventTunnels(Kept())
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    at_node = await asyncio.open_connection(sock=theirs)
    task = asyncio.create_task(tunnels.serve_events(*at_node, hello))
    try:
        async with asyncio.timeout(30):
            await eventually(lambda: given or task.done())
            yield tunnels, reader, writer, given
    finally:
        for raw, _ in given:
            raw.close()
        task.cancel()
        await asyncio.wait([task])
        writer.transport.abort()
        await asyncio.sleep(0)


@in_loop
async def test_the_end_of_either_side_ends_the_other() -> None:
    async with tunnelled() as (tunnels, _, writer, given):
        [(raw, replay)] = given
        assert not replay
        assert tunnels.stats().following == ["self"]
        writer.transport.abort()
        await eventually(lambda: not tunnels.stats().following)
        assert raw.recv(10) == b""
    async with tunnelled() as (tunnels, reader, _, given):
        given[0][0].sendall(b"the last")
        given[0][0].close()
        assert await reader.read(8) == b"the last"
        assert await reader.read() == b""
        await eventually(lambda: not tunnels.stats().following)
        given.clear()


@in_loop
async def test_small_live_batches_are_gathered_and_replays_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "_GATHER_S", 0.05)
    async with tunnelled() as (_, reader, _, given):
        began, pieces, left = time.monotonic(), 0, 60
        sending = asyncio.create_task(_trickle(given[0][0], left))
        while left:
            left -= len(await reader.read(1000))
            pieces += 1
        await sending
        assert (
            pieces <= (time.monotonic() - began) / 0.04 + 1
        )  # clocks of loops are in milliseconds
    monkeypatch.setattr(serving, "_GATHER_S", 3_600.0)
    async with tunnelled(wire.FollowEvents("c", "self", "s", replay=True)) as (_, reader, _, given):
        for _ in range(3):
            given[0][0].sendall(b"x")
            assert await reader.readexactly(1) == b"x"


async def _trickle(raw: socket.socket, pieces: int) -> None:
    """Send single bytes, the loop having turned between them."""
    for _ in range(pieces):
        raw.sendall(b"x")
        for _ in range(10):
            await asyncio.sleep(0)


@in_loop
async def test_a_publication_that_fails_leaves_no_connection() -> None:
    given: list[socket.socket] = []

    class Failing:
        def serve(self, raw: socket.socket, *, replay: bool) -> None:
            given.append(raw)
            raise RuntimeError("no room")

    tunnels = EventTunnels(Failing())
    ours, theirs = socket.socketpair()
    at_node = await asyncio.open_connection(sock=theirs)
    with ours:
        with pytest.raises(RuntimeError, match="no room"):
            await tunnels.serve_events(*at_node, HELLO)

        await eventually(lambda: _waiting(ours) == b"", "the follower is told")
        await eventually(lambda: _waiting(given[0]) == b"", "the publisher's end is told")
    given[0].close()
    assert not tunnels.stats().following


def _waiting(raw: socket.socket) -> bytes | None:
    """What a socket has to read; empty if its other end is closed, None if nothing has come."""
    try:
        return raw.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


@in_loop
async def test_more_followers_than_may_be_are_cut_off_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "TUNNELS_MAX", 0)
    async with tunnelled() as (tunnels, reader, _, given):
        assert await reader.read() == b""
        assert not given
        assert tunnels.stats() == EventTunnelCounts(following=[], faults={"full": 1})


@in_loop
async def test_a_node_that_connects_again_and_again_takes_its_own_places_only() -> None:
    async with asyncio.timeout(30), nodes("a") as (a,):
        mine: list[EventConnection] = []
        other = await EventConnection.open(
            f"peer://{a.endpoint}", zmtp.SUB, PeerCredentials("c", "b", "s", None), 5.0
        )
        try:
            await other.send([b"\x01"])
            await eventually(lambda: following(a) == ["b"])
            while len(mine) < serving.NAME_MAX + 3:
                mine.append(await opened(a))
            await eventually(lambda: a.tunnels.faults.counts["replaced"] == 3)
            await eventually(lambda: following(a) == ["b", *["self"] * serving.NAME_MAX])
            for one in (mine[-1], other):
                await one.send([b"\x01"])
                await one.ping()
                assert await one.receive() == []
            a.store(KEYS[:1], *ONE)
            assert await heard(mine[-1])
            assert await heard(other), "nobody else was cut off"
        finally:
            for one in (*mine, other):
                one.close()
            await eventually(lambda: not following(a))


@in_loop
async def test_one_address_does_not_get_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ADDRESS_MAX", 2)
    async with asyncio.timeout(30), nodes("a") as (a,):
        connections = []
        try:
            for name in ("x", "y", "z"):
                shown = PeerCredentials("c", name, "s", None)
                with contextlib.suppress(OSError):
                    connections.append(
                        await EventConnection.open(f"peer://{a.endpoint}", zmtp.SUB, shown, 5.0)
                    )
            await eventually(lambda: a.tunnels.faults.counts["full"] == 1)
            assert following(a) == ["x", "y"]
        finally:
            for one in connections:
                one.close()
            await eventually(lambda: not following(a))


@in_loop
async def test_garbage_of_a_follower_ends_its_connection_only() -> None:
    async with asyncio.timeout(30), nodes("a") as (a,):
        channel = await opened(a)
        host, _, port = a.endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(wire.encode(HELLO) + b"GET / HTTP/1.1\r\n\r\n" * 10)
            while await reader.read(4096):
                pass
            await channel.send([b"\x01"])
            await channel.ping()
            assert await channel.receive() == []
            a.store(KEYS[:1], *ONE)
            assert await heard(channel)
            await eventually(lambda: following(a) == ["self"])
            assert a.publisher.stats().followers_cut == 1
        finally:
            writer.transport.abort()
            channel.close()
            await eventually(lambda: not following(a))


def test_a_publisher_without_endpoints_serves_what_is_handed_over_and_closes_it_at_its_end():
    ours, theirs = socket.socketpair()
    late, refused = socket.socketpair()
    with ours, late:
        ours.settimeout(10)
        late.settimeout(10)
        with EventPublisher(None, topic=b"kvstore@n@aa") as publisher:
            assert publisher.bound_endpoint is None
            publisher.serve(theirs, replay=True)
            assert ours.recv(1) == zmtp.GREETING_FIRST
        while ours.recv(4096):
            pass
        publisher.serve(refused, replay=False)
        assert late.recv(1) == b""


def test_what_was_handed_over_and_not_yet_taken_is_closed_with_the_publisher():
    ours, theirs = socket.socketpair()
    with ours, EventPublisher(None, topic=b"kvstore@n@aa") as publisher:
        publisher.close()
        publisher._server.handed.append((theirs, zmtp.PUB))
        publisher._server.close()
        ours.settimeout(10)
        assert ours.recv(1) == b""


def test_a_node_in_a_cluster_publishes_though_nobody_else_may_follow():
    off, quiet = EventsConfig(endpoint=""), SocketConfig()
    alone = Publication(off, quiet, "n", b"b" * 16)
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        alone.serve(theirs, replay=False)
        assert ours.recv(1) == b""
    publication = Publication(off, quiet, "n", b"b" * 16, to_peers=True)
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(10)
        try:
            assert (publication.endpoint, publication.replay_endpoint) == ("", "")
            publication.serve(theirs, replay=False)
            assert ours.recv(1) == zmtp.GREETING_FIRST
            assert publication.stats().sequence_next == 0
        finally:
            publication.close()
