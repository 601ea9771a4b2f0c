"""Connections with the publisher of another node through its peer service.

They start with one frame of :mod:`kvstore.protocol.wire`, FollowEvents. Then they carry the
protocol of KV events; the node passes it on to its publisher. A node that refuses answers with a
frame instead.
"""

import asyncio
import ssl
from typing import Final

from kvstore.events import zmtp
from kvstore.index.credentials import PeerCredentials
from kvstore.process.connecting import open_connection
from kvstore.protocol import wire
from kvstore.protocol.errors import InvalidArgument, KVStoreError, printable

SCHEME: Final = "peer://"
"""Beginning of the endpoints of peer services: ``peer://10.0.0.2:7400``."""
_REFUSAL_BYTES_MAX: Final = 4 << 10
_REFUSAL_HEAD: Final = 4


async def open_tunnel(
    endpoint: str, credentials: PeerCredentials, *, replay: bool, limit_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Connect to a node's publisher; also returns the data received so far.

    Args:
        endpoint: ``peer://host:port``.
        credentials: shown to the node.
        replay: for missed batches and questions; otherwise for live batches.
        limit_bytes: received bytes that may wait to be read.

    Raises:
        OSError: no connection, or TLS failed: a certificate is wrong, or cannot be read.
        PeerError: the node refuses; the message says why.
    """
    host, _, port = endpoint.removeprefix(SCHEME).rpartition(":")
    try:
        context = credentials.files.connecting() if credentials.files is not None else None
        bare = host.removeprefix("[").removesuffix("]")
        reader, writer = await open_connection(
            bare, int(port), tls=context, limit_bytes=limit_bytes
        )
    except ssl.SSLError as error:
        raise OSError(f"TLS: {error.reason or error}") from error
    except (InvalidArgument, ValueError) as error:  # a host name that IDNA cannot encode
        raise OSError(str(error)) from error
    try:
        if writer.is_closing():  # uvloop's write raises a RuntimeError
            raise ConnectionResetError("the node has reset the connection")
        hello = wire.FollowEvents(credentials.cluster, credentials.node, credentials.scheme, replay)
        writer.write(wire.encode(hello))
        first = await reader.read(1)
        if not first:
            # TLS 1.3 tells who connects nothing if its certificate is refused.
            hint = "" if context is None else "; does it accept this node's certificate?"
            raise ConnectionResetError(f"the node has closed the connection{hint}")
        if first != zmtp.GREETING_FIRST:
            raise zmtp.PeerError("refused", await _refusal(reader, first))
    except ssl.SSLError as error:  # TLS 1.3 refuses our certificate after its handshake
        writer.transport.abort()
        raise OSError(f"TLS: {error.reason or error}") from error
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer, first


async def _refusal(reader: asyncio.StreamReader, first: bytes) -> str:
    """Why a node refuses, as it says."""
    try:
        size = int.from_bytes(
            first + await reader.readexactly(_REFUSAL_HEAD - len(first)), "little"
        )
        if size > _REFUSAL_BYTES_MAX:
            return "it does not speak the protocol of nodes"
        answer = wire.decode_answer(await reader.readexactly(size))
    except (EOFError, KVStoreError):
        return "it does not speak the protocol of nodes"
    if isinstance(answer, wire.Failure):
        return f"it refuses to be followed: {printable(answer.message)}"
    return "it does not speak the protocol of nodes"
