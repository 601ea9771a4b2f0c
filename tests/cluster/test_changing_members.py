"""Goal: nodes that come, go and move while pages are read from them leave nothing behind."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import pytest

from kvstore.cluster.records import NodeRecord
from kvstore.protocol.errors import PeerUnreachable
from kvstore.transport.base import TransferSettled
from tests.cluster.fake_transport import Network
from tests.cluster.whole_node import KEYS, WholeNode, local, reading, serving, whole_node
from tests.loops import eventually, in_loop


class Members:
    """A membership that a test changes."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[Mapping[str, NodeRecord]] = asyncio.Queue()
        self.tell()

    def tell(self, **endpoints: str) -> None:
        own = NodeRecord(name="b", boot=local("b").boot, endpoint="127.0.0.1:1")
        others = {name: NodeRecord(name=name, endpoint=at) for name, at in endpoints.items()}
        self._told.put_nowait({"b": own, **others})

    async def join(self, record: NodeRecord) -> None:
        raise AssertionError

    async def leave(self) -> None:
        raise AssertionError

    async def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        while True:
            yield await self._told.get()


class Scene(NamedTuple):
    """a with its service at ``place``, b with a session."""

    a: WholeNode
    b: WholeNode
    members: Members
    place: str


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with AsyncExitStack() as undo:
        network, members = Network(), Members()
        a = await undo.enter_async_context(whole_node("a", network))
        b = await undo.enter_async_context(whole_node("b", network))
        place = (await undo.enter_async_context(serving(a))).endpoint
        tasks = asyncio.all_tasks()
        async with reading(b, members):
            members.tell(a=place)
            await eventually(b.up)
            yield Scene(a, b, members, place)
        await eventually(lambda: not a.pinned_bytes(), "a leaves no lease behind")
        left = {one for one in asyncio.all_tasks() - tasks if "link" in repr(one)}
        assert not left
        assert b.peers.transfers == 0


@pytest.mark.parametrize("moves", [False, True], ids=["leaves", "moves"])
@in_loop
async def test_a_fetch_from_a_node_that_leaves_or_moves_ends_at_once(moves: bool):
    async with scene() as (a, b, members, _):
        a.store()
        b.transport.held = []
        b.transport.lingers = True
        number = b.fetch(b.room(KEYS))
        await eventually(lambda: b.transport.held)

        members.tell(**({"a": "127.0.0.1:9"} if moves else {}))
        await eventually(lambda: b.end(number))

        end = b.end(number)
        assert isinstance(end.error, PeerUnreachable)
        assert (end.digests, end.settled) == (b"", False), "bytes may still land"
        await eventually(lambda: not a.pinned_bytes(), "its lease is gone")
        peers = b.peers.sessions()
        assert {name: one.endpoint for name, one in peers.items()} == (
            {"a": "127.0.0.1:9"} if moves else {}
        )
        b.transport.tell(TransferSettled(number))
        await eventually(lambda: b.settled == [number])


@in_loop
async def test_a_fetch_whose_lease_is_not_there_yet_ends_when_its_node_leaves(monkeypatch):
    async with scene() as (_a, b, members, _):
        monkeypatch.setattr("kvstore.server.served.ServedPeer.receive", lambda *_: None)
        number = b.fetch(b.room(KEYS))
        members.tell()
        await eventually(lambda: b.end(number))
        assert isinstance(b.end(number).error, PeerUnreachable)
        assert b.end(number).settled


@in_loop
async def test_a_node_that_comes_back_is_read_from_again():
    async with scene() as (a, b, members, place):
        pages = a.store()
        for turn in range(3):
            members.tell()
            await eventually(lambda: not b.peers.sessions())
            members.tell(a=place)
            await eventually(b.up)
            slots = b.room(KEYS, f"t{turn}")
            number = b.fetch(slots)
            await eventually(lambda number=number: b.end(number))
            assert b.content(slots) == pages


async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say nothing until the other side closes."""
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()


@in_loop
async def test_a_node_that_nobody_reaches_may_leave_while_it_is_connected_to():
    async with scene() as (_, b, members, place):
        silent = await asyncio.start_server(listen, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        for _ in range(5):
            members.tell(a=place, c=f"127.0.0.1:{port}", d="127.0.0.1:9")
            await eventually(lambda: set(b.peers.sessions()) == set("acd"))
            members.tell(a=place)
            await eventually(lambda: set(b.peers.sessions()) == {"a"})
        assert b.up(), "the session with a is the same"
        assert b.faults() == {}
        silent.close()
        await silent.wait_closed()
