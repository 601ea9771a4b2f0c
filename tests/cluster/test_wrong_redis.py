"""Goal: whatever Redis answers its caller is told so, and goes on; one that is cancelled ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import hiredis
import pytest

from kvstore.cluster.access import StoreServers
from kvstore.cluster.page_store import DirectoryFault
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.cluster.redis_records import RedisStore
from kvstore.protocol.errors import PeerUnreachable
from tests.loops import in_loop

NAME = b"n" * 13


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[StoreServers]:
    """A server that answers all calls but the first check in the same way."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls = hiredis.Reader()  # several come in one piece, on some versions of Python
        try:
            while piece := await reader.read(1 << 16):
                calls.feed(piece)
                while calls.gets() is not False:
                    writer.write(answer)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield StoreServers((f"{host}:{port}",))
    finally:
        server.close()


async def watch(store: RedisStore) -> object:
    async with aclosing(store.watch()) as changes:
        return await anext(changes)


RECORDS: dict[str, Callable[[RedisStore], Coroutine[Any, Any, object]]] = {
    "settings": lambda store: store.settings(b"{}"),
    "claim": lambda store: store.claim("a", b"{}", None),
    "watch": watch,
}
PAGES: dict[str, Callable[[RedisPages], Coroutine[Any, Any, object]]] = {
    "claim": lambda store: store.claim("a", b"b" * 16, "token"),
    "change": lambda store: store.change(1, "token", 1, []),
    "renew": lambda store: store.renew({}),
    "find": lambda store: store.find([NAME]),
}
NUMBER, LARGE, NULL, TEXT = b":5\r\n", b":99999999999999\r\n", b"$-1\r\n", b"$3\r\nabc\r\n"
ONE, NUMBERS = b"*1\r\n$1\r\na\r\n", b"*2\r\n:1\r\n:2\r\n"
MORE_THAN_ASKED = b"*2\r\n*0\r\n*1\r\n*2\r\n:999999999999\r\n$1\r\n7\r\n"
FEWER_SHARDS = b"*2\r\n*0\r\n*0\r\n"
NO_HOLDER = b"*2\r\n*1\r\n*2\r\n:1\r\n$1\r\na\r\n*1\r\n*2\r\n:1\r\n$1\r\n1\r\n"


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        *(("settings", answer) for answer in (NUMBER, LARGE, NULL, ONE, NUMBERS)),
        *(("claim", answer) for answer in (NUMBER, LARGE, ONE, NUMBERS)),
        *(("watch", answer) for answer in (NUMBER, NULL, TEXT, ONE, NUMBERS)),
    ],
)
@in_loop
async def test_a_store_of_records_that_answers_otherwise_is_one_that_is_away(call, answer):
    async with answering(answer) as servers:
        store = RedisStore(servers, "blue")
        await store.open()
        try:
            with pytest.raises(PeerUnreachable, match="Redis: its answer is not what was asked"):
                await RECORDS[call](store)
        finally:
            await store.close()


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        *(("claim", answer) for answer in (NULL, TEXT, ONE, b":0\r\n", b":-1\r\n")),
        *(("change", answer) for answer in (NULL, TEXT, ONE)),
        *(("renew", answer) for answer in (NUMBER, NULL, TEXT, ONE)),
        *(("find", answer) for answer in (NUMBER, NULL, TEXT, ONE, NUMBERS)),
        *(("find", answer) for answer in (MORE_THAN_ASKED, FEWER_SHARDS, NO_HOLDER)),
    ],
)
@in_loop
async def test_a_directory_that_answers_otherwise_refuses(call, answer):
    async with answering(answer) as servers:
        store = RedisPages(redis_clients(servers, CALL_S), "blue")
        try:
            with pytest.raises(DirectoryFault) as caught:
                await PAGES[call](store)
        finally:
            await store.close()
    assert caught.value.cause == "refused"


NO_ANSWERS = {
    "moved": b"-MOVED x\r\n", "asked": b"-ASK x\r\n", "an empty push": b">0\r\n",
    "a list as a key": b"%1\r\n*1\r\n:1\r\n:2\r\n", "no protocol": b"HTTP/1.1 400\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
@in_loop
async def test_what_the_client_cannot_read_is_a_fault_like_any_other(answer):
    async with answering(answer) as servers:
        store = RedisStore(servers, "blue")
        try:
            with pytest.raises(PeerUnreachable, match="Redis: "):
                await store.open()
            with pytest.raises(PeerUnreachable, match="Redis: "):
                await store.check()
        finally:
            await store.close()
        pages = RedisPages(redis_clients(servers, CALL_S), "blue")
        try:
            for call in PAGES.values():
                with pytest.raises(DirectoryFault) as caught:
                    await call(pages)
                assert caught.value.cause in ("refused", "away")
        finally:
            await pages.close()


TURNS = 40
"""More turns of the loop than a call takes whose answer is there at once."""


@in_loop
async def test_a_call_that_is_cancelled_ends_wherever_it_is():
    # wait_for of Python 3.11 loses a cancellation that comes when what it waits for has just ended.
    async with answering(NUMBER) as servers:
        store = RedisPages(redis_clients(servers, CALL_S), "blue")
        try:
            for turns in range(TURNS):
                assert await PAGES["claim"](store) == 5  # connected
                task = asyncio.create_task(PAGES["claim"](store))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if task.cancel():
                    await asyncio.wait([task], timeout=CALL_S)
                    assert task.cancelled(), f"it went on after {turns} turns"
        finally:
            await store.close()
