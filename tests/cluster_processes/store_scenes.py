"""Real servers of etcd and Redis for tests; skipped where they cannot be had, never in CI."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from bench.store_programs import NoProgramError
from bench.store_servers import EtcdServer, RedisServer, ServerTls
from kvstore.cluster.access import StoreServers
from kvstore.cluster.etcd import EtcdStore
from kvstore.cluster.redis_records import RedisStore
from kvstore.cluster.store import RecordStore

CERTIFICATES = Path(__file__).resolve().parent.parent / "cluster" / "certificates"
TLS = ServerTls(
    CERTIFICATES / "store.pem", CERTIFICATES / "store.key", CERTIFICATES / "store-authority.pem"
)
CLUSTER = "blue"
LEASE_S = 5.0
KINDS = ("etcd", "redis")


class HarmedServer:
    """A server with one cluster's records; see :class:`kvstore.testing.leased.HarmedStore`."""

    def __init__(self, server: EtcdServer | RedisServer, access: StoreServers) -> None:
        self.server = server
        self.access = access
        self.lease_s = LEASE_S

    def connect(self) -> RecordStore:
        kind = EtcdStore if isinstance(self.server, EtcdServer) else RedisStore
        return kind(self.access, CLUSTER, LEASE_S)

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self.server.stop)

    async def go_on(self) -> None:
        await asyncio.to_thread(self.server.go_on)

    async def empty(self) -> None:
        await asyncio.to_thread(self.server.empty)

    async def put(self, name: str, value: bytes) -> None:
        await asyncio.to_thread(self._put, name, value)

    def _put(self, name: str, value: bytes) -> None:
        if isinstance(self.server, RedisServer):
            self.server.index(f"kvstore:{{{CLUSTER}}}:nodes", name, LEASE_S)
        self.server.put(self.key(name), value, LEASE_S)

    def key(self, name: str) -> str:
        """Of a node's record."""
        if isinstance(self.server, RedisServer):
            return f"kvstore:{{{CLUSTER}}}:node:{name}"
        return f"/kvstore/{CLUSTER}/nodes/{name}"


def start_server(
    kind: str, folder: Path, tls: ServerTls | None = None, login: tuple[str, str] | None = None
) -> EtcdServer | RedisServer:
    """A server that answers; skips the test where there is none, and fails it in CI."""
    try:
        return {"etcd": EtcdServer, "redis": RedisServer}[kind](folder, tls, login)
    except NoProgramError as error:
        if "CI" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))


def opening(kind: str, folder: Path) -> Callable[[], AbstractAsyncContextManager[HarmedServer]]:
    """Opens an empty store of a kind, as a contract wants it."""

    @asynccontextmanager
    async def open_store() -> AsyncIterator[HarmedServer]:
        server = start_server(kind, folder / secrets.token_hex(4))
        with server:
            yield HarmedServer(server, StoreServers((server.endpoint,)))

    return open_store
