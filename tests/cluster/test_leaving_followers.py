"""Goal: a follower of events that leaves at any moment ends itself only, and never the node."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.cluster import serving
from kvstore.cluster.serving import EventTunnels
from kvstore.protocol import wire
from tests.cluster.raw_peer import FOLLOW, Scene, scene
from tests.loops import eventually, in_loop


class Met:
    """The peer service of a node whose followers are served once the test says so.

    Attributes:
        alarms: what the loop was told: it ends a node.
        clients: the followers' ends, which the loop does not watch.
        given: sockets that the publisher got.
    """

    def __init__(self) -> None:
        self.alarms: list[dict[str, Any]] = []
        self.clients: list[socket.socket] = []
        self.given: list[socket.socket] = []
        self.waiting: list[asyncio.StreamWriter] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.tunnels = EventTunnels(self)
        asyncio.get_running_loop().set_exception_handler(lambda _, one: self.alarms.append(one))

    def serve(self, raw: socket.socket, *, replay: bool) -> None:
        assert replay == FOLLOW.replay
        self.given.append(raw)

    async def follow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.FollowEvents
    ) -> None:
        self.waiting.append(writer)
        if self.error is not None:
            raise self.error
        await self.go.wait()
        await self.tunnels.serve_events(reader, writer, hello)

    def connect(self, made: Scene) -> None:
        host, port = made.service.endpoint.split(":")
        client = socket.create_connection((host, int(port)))
        client.sendall(wire.encode(FOLLOW))
        self.clients.append(client)

    def reset(self) -> None:
        for one in self.clients:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        self.clients.clear()

    async def serves_another(self, made: Scene) -> None:
        served = len(self.given)
        self.connect(made)
        await eventually(lambda: len(self.given) > served)


@asynccontextmanager
async def met(**options: Any) -> AsyncIterator[tuple[Met, Scene]]:
    it = Met()
    try:
        async with asyncio.timeout(30), scene(follow=it.follow, **options) as made:
            yield it, made
            it.reset()
            for one in it.given:
                one.close()
            await eventually(lambda: not made.service.stats().followers)
    finally:
        it.reset()
        for one in it.given:
            one.close()
    assert it.alarms == [], "each would have ended the node"


@pytest.mark.parametrize("when", ["before", "while"])
@in_loop
async def test_a_follower_that_is_reset_while_it_is_taken_over_ends_itself_only(when: str) -> None:
    async with met() as (it, made):
        it.connect(made)
        await eventually(lambda: it.waiting)
        it.reset()
        if when == "before":
            await eventually(it.waiting[0].transport.is_closing)
        it.go.set()
        await eventually(lambda: it.tunnels.stats().faults == {"connection": 1})
        await eventually(lambda: not made.service.stats().followers)
        assert not it.given
        await it.serves_another(made)


@in_loop
async def test_a_follower_that_is_replaced_while_it_is_taken_over_ends_itself_only() -> None:
    async with met() as (it, made):
        for _ in range(serving.NAME_MAX + 1):
            it.connect(made)
        await eventually(lambda: len(it.waiting) == serving.NAME_MAX + 1)
        it.go.set()
        await eventually(lambda: len(it.given) == serving.NAME_MAX)
        assert it.tunnels.stats().faults == {"replaced": 1}
        await it.serves_another(made)


@in_loop
async def test_whatever_a_follower_makes_fail_is_counted_and_ends_its_connection_only() -> None:
    async with met() as (it, made):
        it.error = RuntimeError("the handler is closed")
        it.connect(made)
        await eventually(lambda: made.service.stats().refused == {"events": 1})
        it.error = None
        it.go.set()
        await it.serves_another(made)
