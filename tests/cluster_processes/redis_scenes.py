"""A directory of pages in a real Redis; skipped where none can be had, never in CI."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.store_programs import NoProgramError
from bench.store_servers import ForgetfulRedisServer
from kvstore.cluster.access import StoreServers
from kvstore.cluster.page_store import PageStore
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages


class OpenedRedis:
    """See :class:`kvstore.testing.directory.OpenedDirectory`."""

    def __init__(self, server: ForgetfulRedisServer, *, kill: bool, entry_ms: int) -> None:
        self.server = server
        self.stores: list[RedisPages] = []
        self._kill = kill
        self._entry_ms = entry_ms

    def store(self) -> PageStore:
        clients = redis_clients(StoreServers((self.server.endpoint,)), CALL_S)
        store = RedisPages(clients, "c", entry_ms=self._entry_ms, number_ms=1_500)
        self.stores.append(store)
        return store

    async def empty(self) -> None:
        self.server.empty()

    async def save(self) -> None:
        self.server.save()

    async def set_back(self) -> None:
        self.server.kill()
        await asyncio.to_thread(self.server.start)

    async def stop(self) -> None:
        if self._kill:
            self.server.kill()
        else:
            self.server.stop()

    async def go_on(self) -> None:
        if self._kill:
            await asyncio.to_thread(self.server.start)
        else:
            self.server.go_on()

    async def expire(self) -> None:
        """Nothing to do: it has a clock of its own, and what is waited for comes."""


@asynccontextmanager
async def opened_redis(
    folder: Path, *, kill: bool = False, entry_ms: int = 60_000
) -> AsyncIterator[OpenedRedis]:
    try:
        server = await asyncio.to_thread(ForgetfulRedisServer, folder / "redis")
    except NoProgramError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    opened = OpenedRedis(server, kill=kill, entry_ms=entry_ms)
    with server:
        try:
            yield opened
        finally:
            for store in opened.stores:
                await store.close()
