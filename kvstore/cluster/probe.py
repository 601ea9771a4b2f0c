"""Asks whether a node of a certain name runs at an address."""

import asyncio
from typing import Final

from kvstore import wire
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.records import NodeRecord
from kvstore.config.addresses import read_address
from kvstore.errors import KVStoreError
from kvstore.process.tls import CertificateFiles

ANSWER_S: Final = 2.0
"""Limit of connecting and of the answer together."""
_READ_BYTES: Final = 4 << 10


async def is_alive(
    record: NodeRecord, local: LocalNode, files: CertificateFiles | None
) -> bool | None:
    """Ask whether a node that has the name of this one runs where its record says.

    A peer service refuses whoever says its own name, and names the field ``node``: so it has that
    name. Any other answer comes from a node of another name, or of another cluster.

    Args:
        record: of the node, of the same name as this one.
        local: this node.
        files: this node's certificate, and the authority of its peers; None = plain TCP.

    Returns:
        None if that cannot be said: nobody answers in time, or not as a node does.
    """
    host, port = read_address(record.endpoint)
    try:
        tls = files.connecting() if files is not None else None
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=tls, server_hostname=host if tls is not None else None
            )
            try:
                return _says(await _answer(reader, writer, local), record)
            finally:
                writer.transport.abort()
    except ConnectionRefusedError:
        return False
    except (OSError, KVStoreError):  # TimeoutError and ssl.SSLError are OSErrors
        return None


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, local: LocalNode
) -> wire.Answer | None:
    """The answer to a greeting; None = the connection was closed without one."""
    writer.write(wire.encode(local.hello(1)))
    frames = wire.FrameReader()
    while data := await reader.read(_READ_BYTES):
        for body in frames.feed(data):
            return wire.decode_answer(body)
    return None


def _says(answer: wire.Answer | None, record: NodeRecord) -> bool | None:
    match answer:
        case wire.PeerWelcome():
            return answer.node == record.name and answer.boot == record.boot
        case wire.Failure(field="node"):
            return True
        case wire.Failure(field="cluster"):
            return False
    return None
