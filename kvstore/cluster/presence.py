"""Asks at the address in a record whether its node is running."""

import asyncio
import ssl

from kvstore.cluster.claiming import Presence
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.records import NodeRecord
from kvstore.config.addresses import read_address
from kvstore.process.connecting import open_connection
from kvstore.protocol import wire
from kvstore.protocol.errors import ProtocolError

ASK_S = 2.0
"""Time limit of one question."""
_READ_BYTES = 64 << 10


class PresenceCheck:
    """Finds out whether the process of a record lives, by greeting it like a node.

    Args:
        local: this node; it has the name of the records in question.
        tls: its certificate, and the authority of its peers; None = plain TCP.
    """

    def __init__(self, local: LocalNode, tls: ssl.SSLContext | None) -> None:
        self._local = local
        self._tls = tls

    async def __call__(self, record: NodeRecord) -> Presence:
        """Ask; takes at most :data:`ASK_S`.

        A live node refuses this one, because both have the same name. One that welcomes it has
        another name, or is a later process: then the process of the record has ended.
        """
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._answer(record)
        except ConnectionRefusedError:
            return Presence.DEAD
        except (TimeoutError, OSError, ProtocolError, ValueError):
            return Presence.SILENT
        return _meaning(answer, record)

    async def _answer(self, record: NodeRecord) -> object:
        where = read_address(record.endpoint)
        reader, writer = await open_connection(where.host, where.port, tls=self._tls)
        try:
            if writer.is_closing():  # uvloop's write raises a RuntimeError
                raise ConnectionResetError("reset at once")
            writer.write(wire.encode(self._local.hello(1)))
            frames = wire.FrameReader()
            while data := await reader.read(_READ_BYTES):
                for body in frames.feed(data):
                    return wire.decode_answer(body)
        finally:
            writer.transport.abort()
        raise ConnectionResetError("closed without an answer")


def _meaning(answer: object, record: NodeRecord) -> Presence:
    """Conclude from the answer to a greeting whether the node of a record lives."""
    if isinstance(answer, wire.PeerWelcome):
        return Presence.LIVE if answer.boot == record.boot else Presence.DEAD
    if isinstance(answer, wire.Failure) and answer.field == "cluster":
        return Presence.DEAD
    if isinstance(answer, wire.Failure) and answer.field == "node":
        return Presence.LIVE
    return Presence.SILENT
