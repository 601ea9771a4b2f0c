"""Goal: events alone show a follower how long a hit is, also with windows beside full attention."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY, EventBatch, RemovedEvent, StoredEvent
from kvstore.events.questions import PAGES, SNAPSHOT, Asked, encode_question
from kvstore.index.channel import EventConnection
from kvstore.protocol.page import PrefixKeys
from tests.client.conftest import FLAT, SIZE, TIMEOUT_S, Daemon, content, new_keys, open_space

FULL = msgspec.structs.replace(FLAT, group="full")
WINDOW = msgspec.structs.replace(FLAT, layers=(2, 4), group="window", window_pages=2)
Event = StoredEvent | RemovedEvent
_BATCH = msgspec.msgpack.Decoder(EventBatch)


class Groups:
    """The pages of one space that has a shard for each group, as its events show them."""

    def __init__(self, space: str) -> None:
        self._space = space
        self.windows: dict[str, int] = {}
        self.pages: dict[str, set[bytes]] = {}

    def apply(self, events: Sequence[object]) -> None:
        for event in events:
            assert isinstance(event, Event)
            if event.space != self._space:
                continue
            assert isinstance(event.group, str)
            pages = self.pages.setdefault(event.group, set())
            named = {bytes(key) for key in event.block_hashes}
            if isinstance(event, StoredEvent):
                assert isinstance(event.window_pages, int)
                self.windows[event.group] = event.window_pages
                pages |= named
            else:
                pages -= named

    def hit(self, keys: PrefixKeys) -> int:
        """Number of leading pages that all groups have what they need of."""

        def has(group: str, count: int) -> bool:
            first = max(0, count - self.windows[group]) if self.windows[group] else 0
            return all(bytes(key) in self.pages[group] for key in keys[first:count])

        counts = range(len(keys), 0, -1)
        return next((n for n in counts if all(has(group, n) for group in self.windows)), 0)


async def ask(daemon: Daemon, question: list[bytes], word: bytes | None) -> list[object]:
    """Events of an answer at the replay endpoint: of a replay (None), or of messages ``word``."""
    events: list[object] = []
    channel = await EventConnection.open(daemon.replay, zmtp.DEALER, "", TIMEOUT_S)
    try:
        await channel.send(question)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for _, _, told, payload in await channel.receive():
                    if told in (END_OF_REPLAY, b"end"):
                        return events
                    if word in (None, told):
                        events += _BATCH.decode(payload).events
    finally:
        channel.close()


@pytest.mark.parametrize("source", ["replay", "snapshot"])
def test_a_follower_of_events_finds_the_hit_that_the_node_finds(daemon, source, wait_until):
    with daemon.connect() as store:
        space = open_space(store, FULL, WINDOW)
        keys = new_keys(space, 6)
        space.put(keys, content(6, SIZE))
        space.put(keys[2:5], content(3, SIZE), shard=1)
        found = space.lookup(keys).pages
        questions = {"replay": [b"", bytes(8)], "snapshot": encode_question(Asked(SNAPSHOT))}
        word = None if source == "replay" else PAGES
        shown: list[Groups] = []

        def all_told() -> bool:
            """A replay may come before what the last put has changed is published."""
            shown.append(Groups(space.identity.digest.hex()))
            shown[-1].apply(asyncio.run(ask(daemon, questions[source], word)))
            return source == "snapshot" or sum(map(len, shown[-1].pages.values())) >= 9

        wait_until(all_told)
        groups = shown[-1]
        assert groups.windows == {"full": 0, "window": 2}
        assert {group: len(pages) for group, pages in groups.pages.items()} == {
            "full": 6, "window": 3,
        }  # fmt: skip
        assert groups.hit(keys) == found == 5
