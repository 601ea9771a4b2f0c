"""Goal: whatever a node answers, who asks has all of it or an error, in bounded time.

Seeded; some seconds, and minutes in a soak.
"""

import time
from collections.abc import AsyncGenerator

import msgspec

from kvstore.events.questions import END, HEAD, PAGES
from kvstore.index import snapshot
from kvstore.index.snapshot import SnapshotEnd, SnapshotPages
from tests.index.hostile import Hostile, stall_s
from tests.index.test_event_fuzz import Stopwatch, seconds, seeded
from tests.loops import in_loop

__all__ = ["seconds"]


@in_loop
async def test_a_hostile_nodes_answer_is_a_snapshot_or_an_error(seconds: float) -> None:
    with seeded(seconds) as hostile:
        complete = wrong = 0
        causes: set[str] = set()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            messages = answer(hostile)
            watch = Stopwatch()
            try:
                parts = [part async for part in snapshot._parts(received(messages), 1 << 20)]
            except snapshot.SnapshotError as error:
                causes.add(error.cause)
                wrong += 1
            else:
                told = sum(len(one.keys) for one in parts if isinstance(one, SnapshotPages))
                assert isinstance(parts[-1], SnapshotEnd)
                assert told == 32 * parts[-1].pages
                complete += 1
            watch.look()
            assert watch.worst < stall_s(seconds)
        assert causes == {"invalid"}
        assert complete > 10
        assert wrong > 10


Message = tuple[bytes, bytes]
"""A word and a payload."""


async def received(
    messages: list[tuple[bytes, bytes]],
) -> AsyncGenerator[tuple[bytes, bytes], None]:
    for message in messages:
        yield message


def answer(hostile: Hostile) -> list[Message]:
    """The messages of an answer, most of them right."""
    encode, pages = msgspec.msgpack.encode, 0
    messages = [(HEAD, encode({"boot": "aa", "sequence_first": 3}))]
    for _ in range(hostile.randrange(4)):
        keys = [hostile.randbytes(32) for _ in range(hostile.randrange(50))]
        event = {"type": "BlockStored", "block_hashes": keys, "medium": "CPU", "space": "ab",
                 "shard_digest": "cd"}  # fmt: skip
        data = bytearray(encode([1.0, [event], None]))
        if hostile.random() < 0.05:
            data = bytearray(hostile.payload())
        if hostile.random() < 0.1 and data:
            data[hostile.randrange(len(data))] = hostile.randrange(256)
        pages += len(keys)
        messages.append((hostile.choice([PAGES] * 30 + [HEAD, END, b"pages "]), bytes(data)))
    return [*messages, (END, encode({"sequence_end": 5, "pages": pages}))]
