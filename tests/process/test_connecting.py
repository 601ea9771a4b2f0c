"""Goal: a connection is made to whichever address of a host accepts, and fails as it should."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvstore.process.connecting import open_connection
from tests.loops import in_loop

FILES = Path(__file__).parent.parent / "cluster" / "certificates"
REFUSES, ACCEPTS, NO_ROUTE = "127.0.0.2", "127.0.0.1", "255.255.255.255"
Resolve = Callable[..., None]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """``resolve("store", "127.0.0.1")``: this name only, and nothing else, has these addresses."""

    def to(name: str, *addresses: str) -> None:
        async def found(_loop: Any, host: str, port: int, **_options: Any) -> list[Any]:
            assert host == name
            kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
            return [(*kind, (one, port)) for one in addresses]

        monkeypatch.setattr(uvloop.Loop, "getaddrinfo", found)

    return to


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A listener that closes what connects to it."""

    async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(accepted, ACCEPTS, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def peer(host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
    """The address of whoever has accepted."""
    async with asyncio.timeout(30):
        _, writer = await open_connection(host, port, tls=tls)
    address: str = writer.get_extra_info("peername")[0]
    writer.transport.abort()
    return address


@in_loop
async def test_an_address_is_not_looked_up(resolve: Resolve) -> None:
    resolve("nothing")
    async with listening() as port:
        assert await peer(ACCEPTS, port) == ACCEPTS


@pytest.mark.parametrize("addresses", [[ACCEPTS], [REFUSES, NO_ROUTE, ACCEPTS], [ACCEPTS, REFUSES]])
@in_loop
async def test_the_first_address_that_accepts_is_taken(
    addresses: list[str], resolve: Resolve
) -> None:
    resolve("store", *addresses)
    async with listening() as port:
        assert await peer("store", port) == ACCEPTS


@in_loop
async def test_a_host_has_refused_if_all_its_addresses_refuse(resolve: Resolve) -> None:
    async with listening() as port:
        pass
    resolve("store", REFUSES, ACCEPTS)
    with pytest.raises(ConnectionRefusedError):
        await peer("store", port)

    resolve("store", REFUSES, NO_ROUTE)
    with pytest.raises(OSError, match="refused") as both:
        await peer("store", port)
    assert not isinstance(both.value, ConnectionRefusedError)
    assert both.value.errno != errno.ECONNREFUSED

    resolve("store")
    with pytest.raises(OSError, match="store has no address"):
        await peer("store", port)


@in_loop
async def test_what_has_no_address_is_an_error_of_its_name() -> None:
    with pytest.raises(socket.gaierror):
        await peer("nowhere.invalid", 1)
    with pytest.raises(ValueError, match="idna"):
        await peer("a..b", 1)


@in_loop
async def test_a_certificate_is_compared_with_the_name_and_not_with_the_address(
    resolve: Resolve,
) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(FILES / "store.pem", FILES / "store.key")
    client = ssl.create_default_context(cafile=str(FILES / "store-authority.pem"))
    async with listening(server) as port:
        resolve("localhost", ACCEPTS)
        assert await peer("localhost", port, client) == ACCEPTS

        resolve("elsewhere", ACCEPTS, REFUSES)
        with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
            await peer("elsewhere", port, client)
