"""Goal: whoever asks at the endpoint of a record takes nobody for dead who may live."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvstore.cluster import presence
from kvstore.cluster.claiming import Presence
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.presence import PresenceCheck
from kvstore.cluster.records import NodeRecord
from kvstore.protocol import wire
from tests.cluster.fake_transport import Network
from tests.cluster.whole_node import SCHEME, context, local, serving, whole_node
from tests.loops import in_loop

OWN = LocalNode("blue", "a", b"z" * 16, SCHEME)


def record(endpoint: str, boot: bytes) -> NodeRecord:
    return NodeRecord(name="a", boot=boot, endpoint=endpoint)


@asynccontextmanager
async def answering(*chunks: bytes) -> AsyncIterator[str]:
    """A listener that says something to whoever connects, and keeps the connection."""
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for one in chunks:
            writer.write(one)
        await ended.wait()
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        ended.set()
        server.close()
        await server.wait_closed()


def welcome(boot: bytes) -> bytes:
    return wire.encode(wire.PeerWelcome(1, 1, 5, "b", boot, {}))


def failure(field: str) -> bytes:
    return wire.encode(wire.Failure(1, "invalid_argument", "no", field))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (welcome(b"y" * 16), Presence.DEAD), (welcome(b"x" * 16), Presence.LIVE),
        (failure("node"), Presence.LIVE), (failure("cluster"), Presence.DEAD),
        (failure("scheme"), Presence.SILENT), (failure("protocol"), Presence.SILENT),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Presence.SILENT),
        (wire.encode(wire.Pong(1)), Presence.SILENT),
    ],
)  # fmt: skip
@in_loop
async def test_an_answer_says_whether_that_process_lives(said: bytes, found: Presence) -> None:
    async with answering(said) as endpoint:
        assert await PresenceCheck(OWN, None)(record(endpoint, b"x" * 16)) is found


@in_loop
async def test_where_nobody_listens_the_node_is_dead() -> None:
    async with answering() as endpoint:
        pass
    assert await PresenceCheck(OWN, None)(record(endpoint, b"x" * 16)) is Presence.DEAD


@pytest.mark.parametrize("endpoint", ["nowhere.invalid:1", "no endpoint", ":", "[::1"])
@in_loop
async def test_an_endpoint_that_cannot_be_connected_to_proves_nothing(endpoint: str) -> None:
    assert await PresenceCheck(OWN, None)(record(endpoint, b"x" * 16)) is Presence.SILENT


@in_loop
async def test_who_does_not_answer_in_time_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "ASK_S", 0.05)
    async with answering() as endpoint:
        assert await PresenceCheck(OWN, None)(record(endpoint, b"x" * 16)) is Presence.SILENT


@in_loop
async def test_a_real_node_that_lives_is_found_live_by_who_shows_a_certificate() -> None:
    tls = context(ssl.PROTOCOL_TLS_SERVER)
    async with AsyncExitStack() as undo:
        node = await undo.enter_async_context(whole_node("a", Network()))
        service = await undo.enter_async_context(serving(node, tls))
        there = record(service.endpoint, local("a").boot)
        shown = context(ssl.PROTOCOL_TLS_CLIENT)
        assert await PresenceCheck(OWN, shown)(there) is Presence.LIVE
        stranger = context(ssl.PROTOCOL_TLS_CLIENT, "stranger")
        assert await PresenceCheck(OWN, stranger)(there) is Presence.SILENT
        elsewhere = LocalNode("red", "a", b"z" * 16, SCHEME)
        assert await PresenceCheck(elsewhere, shown)(there) is Presence.DEAD


@in_loop
async def test_a_real_node_of_another_name_has_taken_the_address_of_the_dead() -> None:
    async with AsyncExitStack() as undo:
        node = await undo.enter_async_context(whole_node("b", Network()))
        service = await undo.enter_async_context(serving(node))
        there = record(service.endpoint, b"x" * 16)
        assert await PresenceCheck(OWN, None)(there) is Presence.DEAD
