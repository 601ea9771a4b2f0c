"""What caches hold at which time, by their own KV events: nobody else is asked."""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.events import zmtp
from kvstore.events.publisher import EventBatch, RemovedEvent, StoredEvent
from kvstore.index.channel import EventConnection

_CONNECT_S: Final = 10.0
_BATCH: Final = msgspec.msgpack.Decoder(EventBatch)


class HeldPages:
    """The pages of one node or engine, and when they came and went."""

    def __init__(self) -> None:
        self._times: dict[bytes, list[tuple[float, int]]] = defaultdict(list)
        self._media: dict[bytes, set[str]] = defaultdict(set)

    async def follow(self, endpoint: str, ready: asyncio.Event) -> None:
        """Take the events of an endpoint until cancelled.

        Args:
            endpoint: of a publisher.
            ready: set when it is connected.

        Raises:
            OSError: the connection broke.
        """
        channel = await EventConnection.open(endpoint, zmtp.SUB, "", _CONNECT_S)
        try:
            await channel.send([b"\x01"])
            ready.set()
            while True:
                for message in await channel.receive():
                    self.take(_BATCH.decode(message[2]))
        finally:
            channel.close()

    def take(self, batch: EventBatch) -> None:
        """Note what came and went."""
        for event in batch.events:
            if isinstance(event, StoredEvent):
                for key in map(_key, event.block_hashes):
                    self._media[key].add(event.medium)
                    self._times[key].append((batch.ts, 1))
            elif isinstance(event, RemovedEvent):
                for key in map(_key, event.block_hashes):
                    self._media[key].discard(event.medium)
                    if not self._media[key]:
                        self._times[key].append((batch.ts, 0))

    def has(self, key: bytes, at: float) -> bool:
        """Whether it had a page at a time, in seconds since the epoch."""
        times = self._times.get(key, [])
        before = bisect_right(times, (at, 1))
        return before > 0 and times[before - 1][1] == 1


def prefix(caches: Sequence[HeldPages], keys: Sequence[bytes], at: float) -> int:
    """How many leading pages of these were each in some of the caches."""
    missing = (n for n, key in enumerate(keys) if not any(one.has(key, at) for one in caches))
    return next(missing, len(keys))


def _key(value: object) -> bytes:
    assert isinstance(value, bytes), "pages are named by their keys"
    return value
