"""Asks a publisher for the batches that it keeps, from a number on."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY
from kvstore.index.channel import CONNECT_S, EventConnection
from kvstore.index.credentials import PeerCredentials

TOPIC_BYTES_MAX: Final = 256


class NoReplayError(Exception):
    """A replay was not as requested.

    Attributes:
        cause: a fixed word for counters.
    """

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause = cause


async def read_replay(
    endpoint: str, credentials: str | PeerCredentials, first: int, silence_s: float
) -> AsyncGenerator[tuple[bytes, int | None, bytes], None]:
    """Topic, number and payload of each batch; at the end only the topic (number None).

    Args:
        endpoint: the publisher's endpoint for replays.
        credentials: see :meth:`EventConnection.open`.
        first: number of the first batch that is wanted.
        silence_s: maximum time between two messages.

    Raises:
        TimeoutError: no message in time.
        OSError: the connection broke.
        PeerError: the peer is not a publisher.
        NoReplayError: it is not a valid replay.
    """
    channel = await EventConnection.open(endpoint, zmtp.DEALER, credentials, CONNECT_S)
    try:
        await channel.send([b"", first.to_bytes(8, "big")])
        before = -1
        while True:
            messages: list[zmtp.Message] = []
            async with asyncio.timeout(silence_s):
                while not messages:
                    messages = await channel.receive()
            for message in messages:
                if len(message) != 4 or len(message[2]) != 8:
                    raise NoReplayError("frames", "a message of the replay is not a batch")
                _, topic, number, payload = message
                if len(topic) > TOPIC_BYTES_MAX:
                    raise NoReplayError("frames", "a topic that is too long")
                if number == END_OF_REPLAY:
                    yield topic, None, b""
                    return
                if int.from_bytes(number, "big") <= before:
                    raise NoReplayError("replay", "its numbers do not increase")
                before = int.from_bytes(number, "big")
                yield topic, before, payload
    finally:
        channel.close()
