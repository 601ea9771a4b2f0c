"""Opens TCP connections to hosts given by name or address, from an event loop."""

import asyncio
import ipaddress
import socket
import ssl
from typing import Final

BUFFER_BYTES: Final = 64 << 10
"""Received bytes that may wait to be read, unless told otherwise; that of asyncio."""


async def open_connection(
    host: str, port: int, *, tls: ssl.SSLContext | None = None, limit_bytes: int = BUFFER_BYTES
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of a host that accepts; may be cancelled at any moment.

    There is no time limit here: the caller sets one for all addresses together.

    Args:
        host: its name or address, without brackets.
        port: its port.
        tls: None = plain TCP; otherwise ``host`` is the name that the certificate must have, if
            names are compared.
        limit_bytes: received bytes that may wait to be read.

    Raises:
        OSError: no such host, or none of its addresses accepts: ``ConnectionRefusedError`` only if
            all of them refuse. ``ssl.SSLError`` if TLS failed.
        ValueError: a name that no host can have.
    """
    errors: list[OSError] = []
    for address in await _addresses(host, port):
        try:
            return await asyncio.open_connection(
                address, port, limit=limit_bytes, ssl=tls,
                server_hostname=host if tls is not None else None,
            )  # fmt: skip
        except ssl.SSLError:
            raise  # somebody answered there
        except OSError as error:
            errors.append(error)
    if not errors:
        raise OSError(f"{host} has no address")
    if len({(type(one), one.errno) for one in errors}) == 1:
        raise errors[0]
    raise OSError("; ".join(str(one) for one in errors))


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, the preferred one first.

    uvloop's ``create_connection`` leaves its lookup behind when it is cancelled. If that fails
    later, the loop's exception handler is told, which stops a node. A lookup that is awaited here
    is cancelled with its task.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [host]
