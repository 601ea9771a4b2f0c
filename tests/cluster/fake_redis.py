"""Servers in place of Redis: each answers a call as the test says, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import hiredis

Answer = Callable[[list[bytes]], bytes | None]
"""Of a call; None = silence."""


class FakeRedis:
    """A server.

    Args:
        answer: to each call.

    Attributes:
        calls: their first words.
        endpoint: ``host:port``.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls: list[bytes] = []
        self.endpoint = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls = hiredis.Reader()
        try:
            while piece := await reader.read(1 << 16):
                calls.feed(piece)
                while (call := calls.gets()) is not False:
                    self.calls.append(call[0])
                    if (said := self.answer(call)) is not None:
                        writer.write(said)
        except OSError:
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def fake_redis(answer: Answer) -> AsyncIterator[FakeRedis]:
    fake = FakeRedis(answer)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(fake.serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        fake.endpoint = f"{host}:{port}"
        yield fake
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
