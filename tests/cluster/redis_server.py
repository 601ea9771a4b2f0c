"""A real Redis server for tests, on a port of its own."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.cluster.page_store import PageStore
from kvstore.cluster.redis_pages import RedisPages

PROGRAM = os.environ.get("KVSTORE_REDIS_SERVER") or shutil.which("redis-server")


def needs_redis() -> pytest.MarkDecorator:
    return pytest.mark.skipif(PROGRAM is None, reason="no redis-server: see docs/cluster.md")


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *options: str) -> None:
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--dir", str(self.folder), *options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

        async def answers() -> bool:
            async with self.client() as client:
                try:
                    return bool(await client.ping())
                except Exception:  # it is starting
                    return False

        async with asyncio.timeout(20):
            while not await answers():
                await asyncio.sleep(0.02)

    def client(self) -> "Redis":
        return Redis(
            port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=2.0,
            socket_connect_timeout=2.0,
        )  # fmt: skip

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class OpenedRedis:
    """See :class:`kvstore.testing.directory.OpenedDirectory`."""

    def __init__(self, server: RedisServer, *, kill: bool) -> None:
        self.server = server
        self.stores: list[RedisPages] = []
        self._kill = kill

    def store(self) -> PageStore:
        self.stores.append(RedisPages(self.server.client, "c", entry_ms=60_000, number_ms=1_500))
        return self.stores[-1]

    async def empty(self) -> None:
        async with self.server.client() as client:
            await client.flushall()

    async def stop(self) -> None:
        if self._kill:
            self.server.end()
        else:
            self.server.signal(signal.SIGSTOP)

    async def go_on(self) -> None:
        if self._kill:
            await self.server.start()
        else:
            self.server.signal(signal.SIGCONT)

    async def expire(self) -> None:
        """Nothing to do: it has a clock of its own, and what is waited for comes."""


@asynccontextmanager
async def opened_redis(folder: Path, *, kill: bool = False) -> AsyncIterator[OpenedRedis]:
    server = RedisServer(folder)
    await server.start()
    opened = OpenedRedis(server, kill=kill)
    try:
        yield opened
    finally:
        for store in opened.stores:
            await store.close()
        server.end()
