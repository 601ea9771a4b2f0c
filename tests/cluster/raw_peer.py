"""A node's peer service, and connections to it by hand."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

from kvstore.node.describe import describe
from kvstore.protocol import wire
from kvstore.server.peers import PeerService
from tests.cluster.fake_transport import Network
from tests.cluster.whole_node import (
    IDENTITY,
    SCHEME,
    SHARD,
    WholeNode,
    local,
    serving,
    whole_node,
)
from tests.loops import WAIT_S, eventually

HELLO = local("b").hello(1)
FOLLOW = wire.FollowEvents("blue", "b", SCHEME, replay=True)


class Raw:
    """A connection by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = count(10)

    def send(self, *messages: wire.Request | bytes) -> None:
        for one in messages:
            self._writer.write(one if isinstance(one, bytes) else wire.encode(one))

    async def answer(self) -> Any:
        """The next answer; None = the connection is closed."""
        async with asyncio.timeout(WAIT_S):
            try:
                length = wire.frame_length(await self._reader.readexactly(4))
                return wire.decode_answer(await self._reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return None

    async def ask(self, request: Any) -> Any:
        request.id = next(self._ids)
        self.send(request)
        answer = await self.answer()
        assert answer is None or answer.id == request.id
        return answer

    async def greet(self) -> wire.PeerWelcome:
        self.send(HELLO)
        answer = await self.answer()
        assert isinstance(answer, wire.PeerWelcome)
        return answer

    async def open(self) -> wire.SpaceOpened:
        await self.greet()
        opened = await self.ask(wire.OpenSpace(0, IDENTITY, [SHARD]))
        assert isinstance(opened, wire.SpaceOpened)
        return opened

    async def text(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self._reader.read()

    def close(self) -> None:
        self._writer.transport.abort()


class Scene:
    def __init__(self, node: WholeNode, service: PeerService, undo: AsyncExitStack) -> None:
        self.node, self.service = node, service
        self._undo = undo

    async def connect(self, tls: ssl.SSLContext | None = None) -> Raw:
        host, port = self.service.endpoint.split(":")
        raw = Raw(*await asyncio.open_connection(host, int(port), ssl=tls))
        self._undo.callback(raw.close)
        return raw

    def state(self) -> tuple[Any, ...]:
        """What a peer could have changed."""
        stats = describe(self.node.node)
        return (
            stats.sessions, stats.host, len(self.node.node.pages.spaces),
            dict(self.node.transport.tickets), self.node.pinned_bytes(),
        )  # fmt: skip


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as undo:
        node = await undo.enter_async_context(whole_node("a", Network()))
        service = await undo.enter_async_context(serving(node, **options))
        async with AsyncExitStack() as connections:
            yield Scene(node, service, connections)
        await eventually(lambda: not node.node.processes, "nothing is held for who has left")
